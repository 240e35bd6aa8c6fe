"""Layer numbers of layouts that number layers of different kinds together.

Hugging Face inserts the cross-attention layers of Llama 3.2 Vision among the others. torchtune
gives each of them the number of the layer that follows it. Hugging Face numbers the
multi-token-prediction layers of DeepSeek-V3 after the others. Other layouts count each kind from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.families.templates import KeyKind, TemplateTable
from ckptctl.planner.layouts import Family, Layout, Shift
from ckptctl.units import counted

OTHER = -1
"""Meaning of a number that belongs to the other kind of layers."""


@dataclass(frozen=True, slots=True)
class Numbering:
    """Layer numbers of one checkpoint.

    Attributes:
        inserted: For each inserted index, the numbers of its layers in ascending order.
        into: For each inserted index, the one that it is inserted into.
    """

    inserted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    into: Mapping[str, str] = field(default_factory=dict)

    def logical(self, values: Mapping[str, int]) -> dict[str, int] | None:
        """Convert stored numbers to index values, or return None if they are of the other kind."""
        if not self.inserted:
            return dict(values)
        found = {index: self.meant(index, number) for index, number in values.items()}
        return None if OTHER in found.values() else found

    def meant(self, index: str, number: int) -> int:
        """Convert a stored number to a value of *index*, or to :data:`OTHER`."""
        own, others = self.inserted.get(index), self._among(index)
        if (own is not None and number not in own) or number in others:
            return OTHER
        count = sum(1 for n in (others if own is None else own) if n < number)
        return number - count if own is None else count

    def column(self, index: str, numbers: Sequence[int]) -> list[int]:
        """Convert several stored numbers to values of *index*."""
        known = {number: self.meant(index, number) for number in set(numbers)}
        return [known[number] for number in numbers]

    def stored(self, values: Mapping[str, int]) -> dict[str, int]:
        """Convert index values to the numbers in stored keys."""
        if not self.inserted:
            return dict(values)
        return {index: self._stored(index, value) for index, value in values.items()}

    def _stored(self, index: str, value: int) -> int:
        own = self.inserted.get(index)
        if own is not None:
            return own[value] if value < len(own) else (own[-1] if own else -1) + 1 + value
        for number in self._among(index):
            value += number <= value
        return value

    def _among(self, index: str) -> Sequence[int]:
        inside = (self.inserted[own] for own, other in self.into.items() if other == index)
        return sorted(number for numbers in inside for number in numbers)


def observed(family: Family, layout: str, kinds: Iterable[KeyKind]) -> Numbering:
    """Infer the numbering of a checkpoint from its keys in *layout*."""
    shifts = family.shifts_in(layout)
    if not shifts:
        return Numbering()
    table = _own(family.layout(layout), tuple(shifts))
    found: dict[str, set[int]] = {shift.index: set() for shift in shifts}
    for key in (key for kind in kinds if table.entries(kind.skeleton) for key in kind.keys):
        match = table.find(key)
        if match:
            found[match[0].index].add(match[1][match[0].index])
    return Numbering(
        {index: tuple(sorted(numbers)) for index, numbers in found.items()},
        _into(shifts),
    )


@lru_cache(maxsize=64)
def _own(layout: Layout, shifts: tuple[Shift, ...]) -> TemplateTable[Shift]:
    """Build a table of the keys that only inserted layers have in *layout*."""
    found = []
    for shift in shifts:
        for template in (stored.template for stored in layout.stored):
            alike = [other for other, _ in layout.table.entries(template.skeleton)]
            if shift.index in template.indices and not any(shift.into in t.indices for t in alike):
                found.append((template, shift))
    return TemplateTable(found)


def planned(
    family: Family,
    layout: str,
    counts: Mapping[str, int],
    lists: Mapping[str, Sequence[int]],
) -> Numbering:
    """Compute the numbering of a new checkpoint in *layout*.

    Args:
        family: The model type.
        layout: The layout.
        counts: Number of layers by index.
        lists: Lists of layer numbers from the config, by field.

    Raises:
        MappingError: The config does not list the positions of inserted layers.
    """
    found: dict[str, tuple[int, ...]] = {}
    shifts = family.shifts_in(layout)
    for shift in shifts:
        count = counts.get(shift.index, 0)
        first = counts.get(shift.into, 0)
        stated = lists.get(shift.place)
        if shift.place == "after":
            found[shift.index] = tuple(range(first, first + count))
        elif count == 0:
            found[shift.index] = ()
        elif stated is None or len(stated) != count:
            raise MappingError(
                f"layout `{layout}` requires the positions of {counted(count, 'inserted layer')}",
                why=f"config.json must list their numbers as `{shift.place}`",
                hint=f"pass {spell_option('--assets DIR')} with the model's config.json",
            )
        else:
            before = range(count) if shift.nested else (0,) * count
            found[shift.index] = tuple(
                number - n for number, n in zip(sorted(stated), before, strict=True)
            )
    return Numbering(found, _into(shifts))


def require_stated(
    family: Family, layout: str, found: Numbering, lists: Mapping[str, Sequence[int]]
) -> None:
    """Require that the layer numbers of a checkpoint agree with the *lists* of its config.

    Raises:
        MappingError: They disagree.
    """
    for shift in family.shifts_in(layout):
        held, stated = found.inserted.get(shift.index, ()), lists.get(shift.place)
        moved = range(len(held)) if shift.nested else (0,) * len(held)
        numbers = [number + n for number, n in zip(held, moved, strict=True)]
        if held and stated is not None and numbers != sorted(stated):
            raise MappingError(
                "config.json and the names of the tensors disagree on which layers are inserted",
                where=shift.place,
                why=f"it lists {sorted(stated)}, but the tensor names show {numbers}",
                hint=f"pass {spell_option('--assets DIR')} with the right config.json",
            )


def _into(shifts: Iterable[Shift]) -> dict[str, str]:
    return {shift.index: shift.into for shift in shifts if not shift.nested}
