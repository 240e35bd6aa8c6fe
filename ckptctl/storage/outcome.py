"""Counts of out-of-range elements and quantization errors of computed and cast tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from operator import add
from typing import Annotated

from ckptctl.errors import RefusedError
from ckptctl.results import JsonField
from ckptctl.units import pluralize

MAX_SHOWN_TENSORS = 3
OUT_OF_RANGE = JsonField(
    "values that a cast, dequantization or merge could not represent, by output tensor; a "
    "tensor that is repeated on model-parallel ranks is counted once per rank"
)
ROUNDED = JsonField("quantization error, by unquantized tensor")


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """Counts of elements that a cast, dequantization or merge could not represent.

    Infinities and NaN that the source already contains are not counted.
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
        """Total number of elements that are out of range."""
        return self.infinite + self.nan + self.saturated

    def __str__(self) -> str:
        words = {"infinite": self.infinite, "NaN": self.nan, "saturated": self.saturated}
        return ", ".join(f"{count:,} {word}" for word, count in words.items() if count)


NO_LOSS = OutOfRange()


def describe_out_of_range(losses: Mapping[str, OutOfRange]) -> str:
    """Format the tensors with the most out-of-range elements and count the remaining tensors."""
    names = sorted(losses, key=lambda name: (-losses[name].total, name))
    hidden_count = len(names) - MAX_SHOWN_TENSORS
    summary = "; ".join(f"`{name}`: {losses[name]}" for name in names[:MAX_SHOWN_TENSORS])
    return (
        f"{summary}; and {pluralize(hidden_count, 'more tensor')}" if hidden_count > 0 else summary
    )


def require_in_range(losses: Mapping[str, OutOfRange], hint: str) -> None:
    """Raise if any tensor in *losses* has elements that became infinite, NaN or saturated."""
    if losses:
        raise RefusedError(
            "elements became infinite, NaN or saturated",
            why=describe_out_of_range(losses),
            hint=hint,
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """Quantization error, stored as sums so that the errors of several tensors can be added.

    Attributes:
        largest: Largest absolute difference between unquantized and dequantized elements.
        error_squares: Sum of the squares of all differences.
        reference_squares: Sum of the squares of the unquantized elements.
    """

    largest: float = 0.0
    error_squares: float = 0.0
    reference_squares: float = 0.0

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(
            max(self.largest, other.largest),
            self.error_squares + other.error_squares,
            self.reference_squares + other.reference_squares,
        )

    def __bool__(self) -> bool:
        """Return whether any nonzero elements were quantized."""
        return self.reference_squares > 0 or self.largest > 0

    @property
    def max_abs(self) -> Annotated[float, JsonField()]:
        """Largest absolute difference."""
        return _round_digits(self.largest)

    @property
    def relative_rms(self) -> Annotated[float, JsonField()]:
        """Root mean square of the differences, divided by that of the unquantized elements."""
        return (
            _round_digits(math.sqrt(self.error_squares / self.reference_squares))
            if self.reference_squares
            else 0.0
        )

    def __str__(self) -> str:
        return f"max {self.max_abs:.3g}, relative RMS {self.relative_rms:.3g}"


def describe_rounding(roundings: Mapping[str, Rounding]) -> str:
    """Format the overall quantization error and the tensor with the largest error."""
    total = sum(roundings.values(), NO_ROUNDING)
    worst_name = max(roundings, key=lambda name: roundings[name].relative_rms)
    return (
        f"quantization error (relative RMS): {total.relative_rms:.2g} overall, "
        f"max {roundings[worst_name].relative_rms:.2g} (`{worst_name}`)"
    )


def _round_digits(value: float) -> float:
    """Round *value* to six significant digits, so that the order of summation does not matter."""
    return float(f"{value:.6g}")


NO_ROUNDING = Rounding()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Out-of-range counts and quantization error of a set of elements."""

    lost: OutOfRange = NO_LOSS
    rounding: Rounding = NO_ROUNDING

    def __add__(self, other: Outcome) -> Outcome:
        if not other:
            return self
        return Outcome(self.lost + other.lost, self.rounding + other.rounding)

    def __bool__(self) -> bool:
        return bool(self.lost or self.rounding)


NO_OUTCOME = Outcome()
