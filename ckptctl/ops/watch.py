"""What a library function is watched by while it reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Watch = Callable[[int], AbstractContextManager[Callable[[int], None] | None]]
"""Takes the bytes in all; its context yields what is to be called with bytes done, or None."""


def unwatched(_: int) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()
