"""Where a logical tensor lies in a stored one, as formulas in axis names and, where known, numbers.

:mod:`ckptctl.planner.mapping.logical` answers the same for a checkpoint, whose shapes give all
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from ckptctl.planner.families.tables import Leaf
from ckptctl.planner.layouts import Family, Stored
from ckptctl.results import JsonField, Result


@dataclass(frozen=True, slots=True)
class Amount:
    """A size or an offset.

    Attributes:
        text: In axis names, as in ``h*e + k*e``; a number where there are none.
        number: Its value; None: a size is not known.
    """

    text: str
    number: int | None

    def __str__(self) -> str:
        return self.text if self.number is None else str(self.number)

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        if self.number == 0 or other.number == 0:
            return other if self.number == 0 else self
        both = self.number is not None and other.number is not None
        total = (self.number or 0) + (other.number or 0) if both else None
        return Amount(f"{self.text} + {other.text}", total)


ZERO = Amount("0", 0)


@dataclass(frozen=True, slots=True)
class Range(Result, order="formula start stop"):
    """A part of one dimension.

    Attributes:
        among: Where it is every so many-th element instead: what is fixed, in which axes.
    """

    start: Amount
    stop: Amount
    whole: bool = False
    among: str = ""

    def __str__(self) -> str:
        return self.among or (":" if self.whole else f"{self.start}:{self.stop}")

    @property
    def formula(self) -> Annotated[str, JsonField("`:`, `h*e : h*e + k*e`, ...")]:
        """Return the range in axis names."""
        return self.among or (":" if self.whole else f"{self.start.text} : {self.stop.text}")

    @property
    def begin(
        self,
    ) -> Annotated[int | None, JsonField("first index; null if unknown", name="start")]:
        """Return where it begins; None: a size is not known, or it is no range of numbers."""
        return None if self.among else self.start.number

    @property
    def end(
        self,
    ) -> Annotated[int | None, JsonField("end, exclusive; null if unknown", name="stop")]:
        """Return where it ends; None: likewise."""
        return None if self.among else self.stop.number


class Extents:
    """Sizes and places by a family's tables alone."""

    def __init__(self, family: Family, sizes: Mapping[str, int]) -> None:
        self.family = family
        self.known = dict(family.constants) | dict(sizes)
        for axis, parts in family.composite.items():
            open_parts = [part for part in parts if part not in self.known]
            if axis in self.known and len(open_parts) == 1:
                product = math.prod(self.known[part] for part in parts if part in self.known)
                self.known[open_parts[0]] = self.known[axis] // product

    def amount(self, axes: Sequence[str]) -> Amount:
        """Return the product of *axes*."""
        names = self._names(self.family.expand(tuple(axes)))
        known = [self._size(name) for name in names]
        number = None if None in known else math.prod(n for n in known if n is not None)
        shown = [str(self.family.constants.get(name, name)) for name in names]
        return Amount("*".join(shown) or "1", number)

    def _size(self, axis: str) -> int | None:
        parts = [self.known.get(part) for part in self.family.composite.get(axis, ())]
        whole = math.prod(part or 0 for part in parts) if parts and None not in parts else None
        return self.known.get(axis, whole)

    def _names(self, atoms: Sequence[str]) -> list[str]:
        names = list(atoms)
        for axis, parts in self.family.composite.items():
            if set(parts) <= set(names):
                first = min(names.index(part) for part in parts)
                names[first] = axis
                names = [name for name in names if name not in parts]
        return names

    def shape(self, stored: Stored) -> tuple[Amount, ...]:
        """Return the shape of a stored tensor, all its parts together."""
        first, *others = stored.leaves
        sizes = [self.amount(group) for group in first.dims]
        for other in others:
            sizes[first.along] = sizes[first.along].plus(self.amount(other.dims[first.along]))
        return tuple(sizes)

    def place(
        self, stored: Stored, leaf: Leaf, fixed: Mapping[str, int | str]
    ) -> tuple[Range, ...]:
        """Return which part of *stored* a leaf of it is, of the *fixed* axes one entry alone."""
        ranges: list[Range] = []
        for dim, group in enumerate(leaf.dims):
            held = [axis for axis in group if axis in fixed]
            own = self.amount(group)
            if held:
                ranges.append(self._entry(group, held, fixed))
            elif leaf.part is None or dim != leaf.along:
                ranges.append(Range(ZERO, own, whole=True))
            else:
                ranges.append(self._part(stored, leaf))
        return tuple(ranges)

    def _part(self, stored: Stored, leaf: Leaf) -> Range:
        """Return which part of *stored* a leaf of it is along the dimension that they share."""
        start = ZERO
        for other in stored.leaves[: leaf.part]:
            start = start.plus(self._rows(other))
        stop = start.plus(self._rows(leaf))
        if not leaf.within:
            return Range(start, stop)
        return Range(start, stop, among=f"{start}:{stop} of each {leaf.within}")

    def _rows(self, leaf: Leaf) -> Amount:
        group = self.family.expand(leaf.dims[leaf.along])
        return self.amount(group[1:] if leaf.within else group)

    def _entry(
        self, group: Sequence[str], held: Sequence[str], fixed: Mapping[str, int | str]
    ) -> Range:
        axis, value = held[0], fixed[held[0]]
        if len(held) > 1 or group[0] != axis:
            which = ", ".join(f"{name} = {fixed[name]}" for name in held)
            return Range(ZERO, ZERO, among=f"{which} of ({' '.join(group)})")
        rest = self.amount(group[1:])
        return Range(_times(value, rest), _times(_next(value), rest))


def _next(value: int | str) -> int | str:
    return value + 1 if isinstance(value, int) else f"({value} + 1)"


def _times(value: int | str, size: Amount) -> Amount:
    single = size.text == "1"
    if isinstance(value, int) and (single or value == 0):
        return Amount(str(value), value)
    text = str(value).strip("()") if single else f"{value}*{size.text}"
    known = isinstance(value, int) and size.number is not None
    return Amount(text, int(value) * (size.number or 0) if known else None)
