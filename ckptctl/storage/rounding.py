"""How far quantized elements are from those that they stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ckptctl.results import JsonField

ROUNDED = JsonField("quantization error, by unquantized tensor")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Differences between quantized elements and plain ones, as sums that can be added.

    Attributes:
        largest: The largest absolute difference.
        squares: The sum of the squares of all differences.
        whole: The sum of the squares of the plain elements.
    """

    largest: float = 0.0
    squares: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(
            max(self.largest, other.largest),
            self.squares + other.squares,
            self.whole + other.whole,
        )

    def __bool__(self) -> bool:
        """Return whether anything was quantized that is not 0."""
        return self.whole > 0 or self.largest > 0

    @property
    def max_abs(self) -> Annotated[float, JsonField()]:
        """Largest absolute difference."""
        return _shortened(self.largest)

    @property
    def relative_rms(self) -> Annotated[float, JsonField()]:
        """Root mean square of the differences, divided by that of the unquantized elements."""
        return _shortened(math.sqrt(self.squares / self.whole)) if self.whole else 0.0

    def __str__(self) -> str:
        return f"max {self.max_abs:.3g}, relative RMS {self.relative_rms:.3g}"


def summed_up(found: Mapping[str, Rounding]) -> str:
    """Return one line on all of *found*, and the tensor that is the furthest off."""
    total = sum(found.values(), EXACT)
    worst = max(found, key=lambda name: found[name].relative_rms)
    return (
        f"quantization error (relative RMS): {total.relative_rms:.2g} overall, "
        f"max {found[worst].relative_rms:.2g} (`{worst}`)"
    )


def _shortened(value: float) -> float:
    """Return *value* without the digits that depend on the order in which numbers were added."""
    return float(f"{value:.6g}")


EXACT = Rounding()
