"""Elements that a cast, a dequantization or a merge could not keep, and what becomes of them."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """Numbers of elements that a cast, a dequantization or a merge could not keep.

    What a source holds itself is none of them: its infinities and NaN may stay what they are.
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
        """Return the number of all of them."""
        return self.infinite + self.nan + self.saturated

    def __str__(self) -> str:
        words = {"infinite": self.infinite, "NaN": self.nan, "saturated": self.saturated}
        return ", ".join(f"{count:,} {word}" for word, count in words.items() if count)


NONE = OutOfRange()


def worst(found: Mapping[str, OutOfRange]) -> str:
    """Return the tensors with most such elements, their numbers, and how many more there are."""
    names = sorted(found, key=lambda name: (-found[name].total, name))
    more = len(names) - SHOWN
    head = "; ".join(f"`{name}`: {found[name]}" for name in names[:SHOWN])
    return f"{head}; and {counted(more, 'more tensor')}" if more > 0 else head


def require_in_range(found: Mapping[str, OutOfRange], hint: str) -> None:
    """Refuse elements that became infinite, NaN or saturated."""
    if found:
        raise RefusedError(
            "elements became infinite, NaN or saturated", why=worst(found), hint=hint
        )
