"""Parameters of a model that hold the experts of a layer stacked, and their layers one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl import families
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import MappingError, listed
from ckptctl.planner.configs.facts import Json, read_sizes
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.layouts import HF
from ckptctl.planner.mapping.detect import configured
from ckptctl.planner.mapping.matching import slots

STACKED = "hf-v5"


@dataclass(frozen=True, slots=True)
class Part:
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
    parts: tuple[Part, ...]

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


def stacks(catalog: Catalog, config: Json | None) -> Iterator[Stack]:
    """Yield the parameters of the model that experts can be stacked in."""
    names = configured(families.families(), config) if config is not None else []
    if len(names) != 1:
        raise MappingError(
            "the experts of an adapter need the configuration of its model",
            where=catalog.path,
            why=f"config.json is that of {listed(names)}" if names else "there is no config.json",
            hint="`--assets DIR` takes it from the model that was trained",
        )
    family = families.family(names[0])
    sizes = read_sizes(family, config)
    found = False
    both = {HF, STACKED} <= {*family.layouts}
    for stored in family.layout(STACKED).stored if both else ():
        apart = family.layout(HF).leaves
        parts = [(t, leaf, apart[t.name]) for t, leaf in stored.parts if t.name in apart]
        own = [part for part in parts if _is_stack(part[1], part[2])]
        if own and len(own) == len(stored.parts):
            found = True
            yield from _of_layers(own, sizes)
    if not found:
        raise MappingError(
            f"`{family.name}` has no experts that one layout stacks and another keeps apart",
            where=catalog.path,
        )


def _is_stack(leaf: Leaf, apart: Leaf) -> bool:
    """Whether *leaf* is the same matrix for all experts that *apart* has one by one."""
    axes = apart.spread
    return len(axes) == 1 and len(apart.dims) == 2 and leaf.dims[:1] == (axes,) and not leaf.spread


def _of_layers(
    parts: Sequence[tuple[Tensor, Leaf, Leaf]], sizes: Mapping[str, int]
) -> Iterator[Stack]:
    """Yield a stack for each layer."""
    tensor, leaf, apart = parts[0]

    def size(axes: tuple[str, ...]) -> int:
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
            made.append(Part(start, rows, modules))
            start += rows
        yield Stack(leaf.key.key(named), size(apart.dims[1]), swapped, tuple(made))
