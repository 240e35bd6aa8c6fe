"""Model-parallel shards: which boxes of a tensor each rank keeps.

A stored tensor is one part or several that are concatenated. Ranks divide each part on the axis
that its table marks, and a rank's tensor is the concatenation of its own parts: of ``[q; k; v]``
rank r has ``[q_r; k_r; v_r]``, of ``(x f) d`` with ``f`` divided its rows of every expert.

:mod:`ckptctl.planner.parallel.division` applies these rules to a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptctl.catalog import Box
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Sizes
from ckptctl.planner.families.tables import Leaf
from ckptctl.planner.layouts import Drop, Family


@dataclass(frozen=True, slots=True)
class Cut:
    """Where ranks divide one part of a stored tensor.

    Attributes:
        leaf: The part.
        axis: The axis that is divided; None: every rank has all of it.
        dim: The dimension with that axis; None: no dimension, but the keys are divided.
    """

    leaf: Leaf
    axis: str | None
    dim: int | None

    @property
    def before(self) -> tuple[str, ...]:
        """Return the axes of the dimension that are outside the divided one."""
        if self.dim is None or self.axis is None:
            return ()
        group = self.leaf.dims[self.dim]
        return group[: group.index(self.axis)]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A box of a tensor inside what one rank holds of it.

    Attributes:
        offsets: Where it begins in the rank's tensor.
        axis: The axis that was divided to get it.
    """

    box: Box
    offsets: tuple[int, ...]
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds of a tensor.

    Attributes:
        shape: Shape of the rank's tensor.
        pieces: The boxes that tile it.
    """

    shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> RankShard:
        """Return the share of a rank that holds all of a tensor."""
        return cls(shape, (ShardPiece(Box.whole(shape), (0,) * len(shape)),))


@lru_cache(maxsize=1 << 16)
def cuts(family: Family, layout: str, key: str) -> tuple[Cut, ...]:
    """Return how ranks divide each part of *key*; ``()``: a tensor without information."""
    found = family.layout(layout).table.find(key)
    if found is None:
        raise MappingError(
            f"`{family.name}` has no such tensor in layout `{layout}`", where=f"tensor `{key}`"
        )
    if isinstance(found[0], Drop):
        return ()
    parts = {leaf.part: (tensor.split, leaf) for tensor, leaf in reversed(found[0].parts)}
    return tuple(_cut(*parts[number]) for number in sorted(parts, key=lambda n: n or 0))


def _cut(axis: str | None, leaf: Leaf) -> Cut:
    dims = (dim for dim, group in enumerate(leaf.dims) if axis in group)
    return Cut(leaf, axis, next(dims, None))


def divided_dim(family: Family, layout: str, key: str) -> int | None:
    """Return the dimension of *key* that ranks divide; None: every rank has all of it."""
    dims = {cut.dim for cut in cuts(family, layout, key)} - {None}
    return dims.pop() if len(dims) == 1 else None


def owned(family: Family, layout: str, key: str) -> str | None:
    """Return the axis of which one rank has this entry alone: an index in the key; None: none."""
    found = cuts(family, layout, key)
    axis = found[0].axis if found else None
    return axis if axis and axis in found[0].leaf.spread else None


def part_lengths(
    family: Family, key: str, parts: Sequence[Cut], shape: tuple[int, ...], sizes: Sizes
) -> list[int]:
    """Return how long each part of a tensor is along the dimension of the concatenation."""
    along = parts[0].leaf.along
    if len(parts) == 1:
        return [shape[along]]
    lengths = sum_parts(family, key, parts, sizes)
    if sum(lengths) != shape[along]:
        raise MappingError(
            f"the parts of a tensor add up to {sum(lengths)}, not to {shape[along]}",
            where=f"tensor `{key}`",
            hint="do the configuration and all files belong to the same model?",
        )
    return lengths


def sum_parts(family: Family, key: str, parts: Sequence[Cut], sizes: Sizes) -> list[int]:
    """Return the lengths of concatenated parts by axis sizes alone."""
    lengths: list[int] = []
    for cut in parts:
        group = cut.leaf.dims[cut.leaf.along]
        length = sizes.of(family.expand(group))
        if length is None:
            raise unknown(family, key, [a for a in group if a not in sizes.axes], 2)
        lengths.append(length)
    return lengths


def unknown(family: Family, key: str, axes: Sequence[str], ranks: int) -> MappingError:
    """Return the error that says which sizes are needed to divide a tensor."""
    names = " and ".join(dict.fromkeys(map(family.called, axes)))
    return MappingError(
        f"cannot divide a tensor among {ranks} ranks without {names}",
        where=f"tensor `{key}`",
        hint="`--assets DIR` takes them from the model that was trained: a folder with config.json "
        "or params.json",
    )
