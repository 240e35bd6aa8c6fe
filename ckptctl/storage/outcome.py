"""Statistics of computed and cast elements: out-of-range values and rounding errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from operator import add
from typing import Annotated

from ckptctl.errors import RefusedError
from ckptctl.results import JsonField
from ckptctl.units import counted

SHOWN = 3
OUT_OF_RANGE = JsonField(
    "values that a cast, dequantization or merge could not represent, by output tensor; a "
    "tensor that is repeated on model-parallel ranks is counted once per rank"
)
ROUNDED = JsonField("quantization error, by unquantized tensor")


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """Counts of elements that a cast, dequantization or merge could not represent.

    Infinities and NaN that a source already contains are not counted.
    """

    infinite: Annotated[int, JsonField("elements that became infinite")] = 0
    nan: Annotated[int, JsonField("elements that became NaN")] = 0
    saturated: Annotated[int, JsonField("elements clamped to the largest value of the dtype")] = 0

    def __add__(self, other: OutOfRange) -> OutOfRange:
        if not other:
            return self
        return OutOfRange(*map(add, astuple(self), astuple(other)))

    def __bool__(self) -> bool:
        return self.total > 0

    @property
    def total(self) -> int:
        """Total number of elements out of range."""
        return self.infinite + self.nan + self.saturated

    def __str__(self) -> str:
        words = {"infinite": self.infinite, "NaN": self.nan, "saturated": self.saturated}
        return ", ".join(f"{count:,} {word}" for word, count in words.items() if count)


NONE = OutOfRange()


def worst(found: Mapping[str, OutOfRange]) -> str:
    """Format the tensors with the most out-of-range elements and the number of further tensors."""
    names = sorted(found, key=lambda name: (-found[name].total, name))
    more = len(names) - SHOWN
    head = "; ".join(f"`{name}`: {found[name]}" for name in names[:SHOWN])
    return f"{head}; and {counted(more, 'more tensor')}" if more > 0 else head


def require_in_range(found: Mapping[str, OutOfRange], hint: str) -> None:
    """Raise if any elements became infinite, NaN or saturated."""
    if found:
        raise RefusedError(
            "elements became infinite, NaN or saturated", why=worst(found), hint=hint
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """Quantization error as sums that can be added.

    Attributes:
        largest: The largest absolute difference.
        squares: The sum of the squares of all differences.
        whole: The sum of the squares of the unquantized elements.
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
        """Return whether any nonzero elements were quantized."""
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
    """Format the overall quantization error and the tensor with the largest error."""
    total = sum(found.values(), EXACT)
    worst = max(found, key=lambda name: found[name].relative_rms)
    return (
        f"quantization error (relative RMS): {total.relative_rms:.2g} overall, "
        f"max {found[worst].relative_rms:.2g} (`{worst}`)"
    )


def _shortened(value: float) -> float:
    """Round *value* to digits that do not depend on the order of summation."""
    return float(f"{value:.6g}")


EXACT = Rounding()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Out-of-range counts and quantization error of some elements."""

    lost: OutOfRange = NONE
    rounding: Rounding = EXACT

    def __add__(self, other: Outcome) -> Outcome:
        if not other:
            return self
        return Outcome(self.lost + other.lost, self.rounding + other.rounding)

    def __bool__(self) -> bool:
        return bool(self.lost or self.rounding)


NOTHING = Outcome()
