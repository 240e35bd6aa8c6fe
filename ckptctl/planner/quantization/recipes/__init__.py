"""Ways of quantizing weights without data: a :class:`Recipe` each, in a module of this package.

A module has ``RECIPE``; nothing else needs to be told about it. What computes the elements is a
kind of ``ckptctl/storage/kinds/quantizing.py``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that a quantized weight is stored as.

    Attributes:
        ending: What stands in its name in place of ``.weight``.
        kind: What computes it: a kind in ``ckptctl/storage/kinds``.
        dtype: torch's name; empty: that of the plain weight.
        block: Rows and columns of the weight that an element of it stands for, 0 for all of them;
            None: it is one number for the whole weight.
    """

    ending: str
    kind: str
    dtype: str
    block: tuple[int, int] | None

    def shape(self, weight: Sequence[int]) -> tuple[int, ...]:
        """Return its shape for a weight ``[rows, columns]``, or ``[experts, rows, columns]``."""
        if self.block is None:
            return (1,)
        (*stack, rows, columns), (down, across) = weight, self.block
        return (*stack, -(-rows // (down or rows or 1)), -(-columns // (across or columns or 1)))

    def name(self, weight: str) -> str:
        """Return its name for a weight, which in a stack of experts does not end in ``.weight``."""
        if weight.endswith(WEIGHT):
            return weight.removesuffix(WEIGHT) + self.ending
        return weight + self.ending.removeprefix(WEIGHT)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way of quantizing weights.

    Attributes:
        name: What ``--quantize`` calls it.
        title: For people.
        parts: What a weight is stored as; the first of them has its elements.
        config: Returns ``quantization_config`` of config.json for modules that stay as they are.
        columns: The number of columns of a weight has to be a multiple of it.
        shared: The part with one number for all weights that programs fuse; None: there is none.
        stack: Rows and columns of experts stacked in one tensor have to be multiples of these;
            None: programs read experts one by one.
    """

    name: str
    title: str
    parts: tuple[StoredPart, ...]
    config: Callable[[Sequence[str]], dict[str, object]]
    columns: int = 1
    shared: StoredPart | None = None
    stack: tuple[int, int] | None = None


@cache
def recipes() -> Mapping[str, Recipe]:
    """Return the recipes by name."""
    modules = sorted(one.name for one in pkgutil.iter_modules(__path__) if one.name[0] != "_")
    found = (importlib.import_module(f"{__name__}.{name}") for name in modules)
    made = (module.RECIPE for module in found if hasattr(module, "RECIPE"))
    return {recipe.name: recipe for recipe in made}
