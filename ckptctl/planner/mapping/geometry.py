"""How a logical tensor lies in a stored one of either layout: axes, order, place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.errors import MappingError
from ckptctl.planner.axes import Axes, Sizes
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.layouts import Family, Layout, Stored

Dims = tuple[tuple[int, ...], ...]
Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Origin and sizes in the stored dimensions."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all tensors of one kind and shape have in common.

    Attributes:
        axes: Sizes of the atomic axes, in the source's order.
        source: The source's dimensions as indices into *axes*, spread ones first.
        target: The target's.
        read: Where the tensor lies in what the source stores.
        write: Where it lies in what the target stores.
    """

    axes: tuple[int, ...]
    source: Dims
    target: Dims
    read: Region
    write: Region


def geometry(
    family: Family,
    sizes: Sizes,
    source: tuple[Layout, Tensor],
    target: tuple[Layout, Tensor],
    key: str,
    shape: tuple[int, ...],
) -> Geometry:
    """Return how a tensor moves from *source* to *target*.

    Args:
        family: The model type.
        sizes: What is known of axis sizes.
        source: The layout read, and the logical tensor as it is called there.
        target: The layout written, and the logical tensor; another one where two are tied.
        key: The stored tensor, for errors.
        shape: Its shape.

    Raises:
        MappingError: An axis size is needed that neither shapes nor configuration give.
    """
    return _Geometry(family, sizes, source, target, key, shape).result()


class _Geometry:
    def __init__(
        self,
        family: Family,
        sizes: Sizes,
        source: tuple[Layout, Tensor],
        target: tuple[Layout, Tensor],
        key: str,
        shape: tuple[int, ...],
    ) -> None:
        self.family, self.known, self.key, self.shape = family, sizes, key, shape
        self.source, self.target = source, target
        self.stored = source[0].leaves[source[1].name]
        self.wanted = target[0].leaves[target[1].name]
        self.local: dict[Axes, int] = {}
        for dim, group in enumerate(self.stored.dims):
            if self.stored.part is None or dim != self.stored.along:
                self.local[family.expand(group)] = shape[dim]

    def result(self) -> Geometry:
        skipped = set(self.stored.spread) & set(self.wanted.spread)
        before, after = (
            [self.family.expand(group) for group in leaf.groups if not skipped.intersection(group)]
            for leaf in (self.stored, self.wanted)
        )
        atoms: list[Axes]
        if sorted(before) == sorted(after):
            atoms = before
        else:
            atoms = [(axis,) for group in before for axis in group]
        place = {axis: n for n, atom in enumerate(atoms) for axis in atom}
        read, write = (
            tuple(tuple(dict.fromkeys(place[axis] for axis in group)) for group in groups)
            for groups in (before, after)
        )
        return Geometry(
            tuple(self._size(atom) for atom in atoms),
            read,
            write,
            self._region(*self.source),
            self._region(*self.target),
        )

    def _size(self, group: Axes) -> int:
        found = self.local.get(group)
        found = self.known.of(group) if found is None else found
        if found is None:
            raise self._unknown(group)
        return found

    def _region(self, layout: Layout, tensor: Tensor) -> Region:
        leaf = layout.leaves[tensor.name]
        sizes = tuple(self._size(self.family.expand(group)) for group in leaf.dims)
        origin = [0] * len(sizes)
        if leaf.part:
            stored = next(s for s in layout.stored if (tensor, leaf) in s.parts)
            origin[leaf.along] = sum(self._before(stored, leaf))
        return tuple(origin), sizes

    def _before(self, stored: Stored, leaf: Leaf) -> Sequence[int]:
        parts = {other.part or 0: other for _, other in stored.parts}
        return [
            self._size(self.family.expand(parts[number].dims[leaf.along]))
            for number in range(leaf.part or 0)
        ]

    def _unknown(self, group: Axes) -> MappingError:
        unknown = [axis for axis in group if axis not in self.known.axes]
        names = list(dict.fromkeys(self.family.called(axis) for axis in unknown))
        return MappingError(
            f"cannot reorder the axes of `{self.source[1].name.partition('.')[0]}` without "
            f"{' and '.join(names)}",
            where=f"tensor `{self.key}`",
            why=f"its shape is {self.shape}: {self.stored} becomes {self.wanted}, and no "
            "configuration says how many there are",
            hint="`--assets DIR` takes them from the model that was trained: a folder with "
            "config.json or params.json; `--set` gives single numbers",
        )
