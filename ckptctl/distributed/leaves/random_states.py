"""States of numpy's random-number generators, which read memory at a position that they are given.

numpy takes any position (``numpy/random/_mt19937.pyx``, ``_philox.pyx``) and draws the next number
from there, inside of the state or not.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.errors import UnsupportedError

POSITIONS = {"pos": "key", "buffer_pos": "buffer"}
"""What each position counts in."""
PARTS = frozenset({*POSITIONS, *POSITIONS.values()})


def require_positions(state: Mapping[object, object]) -> None:
    """Refuse a generator's state whose position lies outside of its numbers.

    Args:
        state: Its parts by the name that numpy gives them; anything else passes.

    Raises:
        UnsupportedError: It does.
    """
    for name, numbers in POSITIONS.items():
        at, found = state.get(name), state.get(numbers)
        if hasattr(found, "dtype") and type(at) is int and not 0 <= at <= len(found):  # type: ignore[arg-type]
            raise UnsupportedError(
                "it is no state of a random-number generator",
                why=f"position {at:,} of {len(found):,} numbers",  # type: ignore[arg-type]
            )
