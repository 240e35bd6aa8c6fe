"""What is told of bytes while they are read or written."""

from __future__ import annotations

from collections.abc import Callable

Advance = Callable[[int], None]
"""Called with the bytes done since its last call."""
