"""Values that every rank has for itself: a random-number state, a data loader's position.

The lowest rank's keeps its name; another one's lies below ``rank_N.`` if it differs from that.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptctl.catalog import Path
from ckptctl.errors import listed


def below_rank(rank: int, path: Path) -> Path:
    """Return where what *rank* has at *path* lies."""
    return (f"rank_{rank}", *path)


def kept_apart(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note on the values called *names*, if there are any."""
    found = list(dict.fromkeys(names))
    if not found:
        return ()
    return (f"ranks differ, so each one's is kept, below `rank_N.`: {listed(found)}",)
