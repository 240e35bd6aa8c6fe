"""Scales that are stored beside the weights that they belong to, derived instead of tabulated.

A scale stands for a block of its weight: ``[ceil(rows / 128), ceil(columns / 128)]`` of them for
DeepSeek's fp8 (``README_WEIGHTS.md``). It may follow its weight where that keeps its dimensions,
under another name or rank; where a layout reorders, stacks or fuses the weight, the blocks have no
place, and mapping refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.families.templates import Template

BLOCK_AXES = ("down", "across")
"""Blocks of rows and of columns: axes that a family with companions declares as free."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A kind of scale.

    Attributes:
        endings: For each layout that knows it what the keys of weight and scale end with; the
            scales are stored as the first layout has the weights.
        suffix: What the name of the derived logical tensor ends with, as in ``q_scale``.
    """

    endings: Mapping[str, tuple[str, str]]
    suffix: str = "_scale"

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the scales of *weight*; None: it has none, being no matrix of its own."""
        home = next(iter(self.endings))
        first = weight.leaves.get(home)
        if first is None or first.part is not None or len(first.dims) != len(BLOCK_AXES):
            return None
        leaves = {
            layout: Leaf(_key(leaf, *ends), tuple((axis,) for axis in BLOCK_AXES), leaf.spread)
            for layout, ends in self.endings.items()
            for leaf in [weight.leaves.get(layout)]
            if leaf and _shape(leaf) == _shape(first) and leaf.key.text.endswith(ends[0])
        }
        stem, dot, indices = weight.name.partition(".")
        return Tensor(
            f"{stem}{self.suffix}{dot}{indices}",
            weight.block,
            weight.indices,
            _split(weight.split, first),
            True,
            weight.variant,
            leaves,
            scales=weight.name,
        )


def with_companions(tensors: Iterable[Tensor], kinds: Iterable[Companion]) -> Iterator[Tensor]:
    """Yield *tensors*, each followed by its scales."""
    known = list(kinds)
    for tensor in tensors:
        yield tensor
        found = [kind.of(tensor) for kind in known]
        yield from (scales for scales in found if scales and scales.leaves)


def _key(leaf: Leaf, weight: str, scale: str) -> Template:
    return Template.parse(leaf.key.text.removesuffix(weight) + scale)


def _shape(leaf: Leaf) -> object:
    return leaf.dims, leaf.spread, leaf.part


def _split(axis: str | None, leaf: Leaf) -> str | None:
    """Return the axis of the scales that ranks divide where they divide *axis* of the weight."""
    if axis is None or axis in leaf.spread:
        return axis
    dims = zip(BLOCK_AXES, leaf.dims, strict=True)
    return next((own for own, group in dims if axis == group[0]), None)
