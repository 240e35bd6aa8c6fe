"""Parameters of a model that hold the experts of a layer stacked, and their layers one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl import families
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, listed, spell_option
from ckptctl.planner.config_facts import Json, read_sizes
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.detect import configured
from ckptctl.planner.mapping.matching import match, slots

STACKED = "hf-v5"
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One layer of each expert, as a part of a stacked parameter.

    Attributes:
        start: Its first row in the output of the stack.
        rows: How many it has.
        modules: Its names, expert by expert.
    """

    start: int
    rows: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter of stacked experts.

    Attributes:
        key: Its name in the model.
        inputs: Columns of each layer in it.
        swapped: Whether a layer is ``[out, in]``.
    """

    key: str
    inputs: int
    swapped: bool
    parts: tuple[ExpertSlice, ...]

    @property
    def experts(self) -> int:
        """Return how many there are."""
        return len(self.parts[0].modules)

    @property
    def outputs(self) -> int:
        """Return the rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def entry(self) -> TensorEntry:
        """Return the parameter without its elements: what has its shape."""
        sides = (self.outputs, self.inputs) if self.swapped else (self.inputs, self.outputs)
        return TensorEntry(self.key, "float32", (self.experts, *sides), (), (self.key,))


def family_of(catalog: Catalog, config: Json | None) -> Family:
    """Return the family of the model of an adapter with experts."""
    names = configured(families.families(), config) if config is not None else []
    if len(names) != 1:
        raise MappingError(
            "converting the experts of an adapter requires the configuration of its model",
            where=catalog.path,
            why=f"config.json matches {listed(names)}" if names else "there is no config.json",
            hint=f"pass {spell_option('--assets DIR')} to use that of the trained model",
        )
    return families.family(names[0])


def stacks(catalog: Catalog, config: Json | None) -> Iterator[Stack]:
    """Yield the parameters of the model that experts can be stacked in."""
    family = family_of(catalog, config)
    sizes = read_sizes(family, config)
    found = stacked(family)
    if not found:
        raise MappingError(
            f"`{family.name}` has no experts that are stacked in one layout and per-expert in "
            "another",
            where=catalog.path,
        )
    # Where the configuration lists kinds of layers, it does not count them.
    numbers = (int(n) for name in catalog.tensors for n in _NUMBER.findall(name))
    most = 1 + max(numbers, default=0)
    for parts in found.values():
        counts = dict.fromkeys(parts[0][0].indices, most)
        yield from _of_layers(family, parts, {**counts, **sizes})


def stacked(family: Family) -> dict[Template, list[tuple[Tensor, Leaf, Leaf]]]:
    """Return what one layout stacks and another keeps apart: parts with both leaves, by key."""
    if not {HF, STACKED} <= {*family.layouts}:
        return {}
    apart = family.layout(HF).leaves
    found = {}
    for stored in family.layout(STACKED).stored:
        parts = [(t, leaf, apart[t.name]) for t, leaf in stored.parts if t.name in apart]
        own = [part for part in parts if _is_stack(part[1], part[2])]
        if own and len(own) == len(stored.parts):
            found[stored.template] = own
    return found


def stack_keys(family: Family, keys: Collection[str]) -> dict[str, int]:
    """Return which of *keys* hold experts, and how many layers of each, as a module has them."""
    known = stacked(family)
    groups = match(family, family.layout(STACKED), keys).groups if known else ()
    held = {group.stored.template: group.keys for group in groups}
    return {
        key: len({leaf.part for _, leaf, _ in parts})
        for template, parts in known.items()
        for key in held.get(template, ())
    }


def _is_stack(leaf: Leaf, apart: Leaf) -> bool:
    """Whether *leaf* is the same matrix for all experts that *apart* has one by one."""
    axes = apart.spread
    return len(axes) == 1 and len(apart.dims) == 2 and leaf.dims[:1] == (axes,) and not leaf.spread


def _of_layers(
    family: Family, parts: Sequence[tuple[Tensor, Leaf, Leaf]], sizes: Mapping[str, int]
) -> Iterator[Stack]:
    """Yield a stack for each layer."""
    tensor, leaf, apart = parts[0]

    def size(axes: tuple[str, ...]) -> int:
        unknown = next((axis for axis in axes if axis not in sizes), None)
        if unknown:
            raise UnsupportedError(
                f"config.json does not state the expert width of `{family.name}`",
                where=f"{family.called(unknown)}",
                hint=f"convert the model to layout {STACKED} first, with "
                f"{spell_option(f'--to-layout {STACKED}')}",
            )
        return math.prod(sizes[axis] for axis in axes)

    (axis,) = apart.spread
    swapped = leaf.dims[1] == apart.dims[0]
    for values in slots(tensor, sizes):
        named = dict(zip(tensor.indices, values, strict=True))
        start, made = 0, []
        for _, _, one in parts:
            keys = (one.key.key({**named, axis: expert}) for expert in range(sizes[axis]))
            rows = size(one.dims[0])
            modules = tuple(key.removesuffix(".weight") for key in keys)
            made.append(ExpertSlice(start, rows, modules))
            start += rows
        yield Stack(leaf.key.key(named), size(apart.dims[1]), swapped, tuple(made))
