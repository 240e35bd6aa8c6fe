"""What became of elements that were computed or cast."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.storage.out_of_range import NONE, OutOfRange
from ckptctl.storage.rounding import EXACT, Rounding


@dataclass(frozen=True, slots=True)
class Outcome:
    """What of some elements was lost, and how far those that were quantized are off."""

    lost: OutOfRange = NONE
    rounding: Rounding = EXACT

    def __add__(self, other: Outcome) -> Outcome:
        if not other:
            return self
        return Outcome(self.lost + other.lost, self.rounding + other.rounding)

    def __bool__(self) -> bool:
        return bool(self.lost or self.rounding)


NOTHING = Outcome()
