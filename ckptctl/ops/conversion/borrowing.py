"""Tensors of one checkpoint among those of another: virtual files that read them where they lie.

What a lent tensor is called, and how its elements are ordered, is that of the borrower's layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl import dtypes
from ckptctl.catalog import (
    Catalog,
    Computed,
    Extent,
    Input,
    Path,
    TensorEntry,
    computed_name,
    is_computed,
)
from ckptctl.ops.sources import located
from ckptctl.planner.mapping.composing import pieces
from ckptctl.planner.mapping.mapped import MappedTensor


@dataclass(slots=True)
class Lender:
    """A checkpoint that lends tensors.

    Attributes:
        label: What the names of its virtual files begin with, so that no others are called so.
        computed: The virtual files that are lent so far, and those that they are made of.
    """

    catalog: Catalog
    label: str
    computed: dict[str, Computed] = field(default_factory=dict)
    _lent: dict[str, TensorEntry] = field(default_factory=dict)

    def entry(self, name: str, path: Path, key: str, mapped: Sequence[MappedTensor]) -> TensorEntry:
        """Return what the borrower calls *name*.

        Args:
            name: In the borrower.
            path: There.
            key: What *mapped* calls it.
            mapped: All that it consists of; its sources are names in the lender.
        """
        lent = {view.key: self._whole(view.key) for one in mapped for view in one.sources}
        shapes = {one: entry.shape for one, entry in lent.items()}
        first = next(iter(lent.values()))
        item = dtypes.itemsize(first.dtype)
        found = [piece for one in mapped for piece in pieces(one, key, shapes)]
        extents = tuple(
            Extent(
                piece.box,
                lent[piece.key].extents[0].file,
                piece.start * item,
                _span(piece.box.sizes, piece.strides) * item,
                strides=piece.strides,
            )
            for piece in found
        )
        ends = (
            tuple(map(sum, zip(piece.box.offsets, piece.box.sizes, strict=True))) for piece in found
        )
        shape = tuple(map(max, zip(*ends, strict=True)))
        return TensorEntry(name, first.dtype, shape, extents, path)

    def _whole(self, key: str) -> TensorEntry:
        """Return a tensor of the lender as one virtual file with its elements, row-major."""
        if key not in self._lent:
            entry = located(self.catalog, [key]).tensors[key]
            self._lend(entry)
            made = Input(self.catalog.root, self._renamed(entry))
            name = computed_name(f"{self.label}/{key}")
            virtual = Computed("copied", entry.dtype, entry.shape, {"base": made})
            self.computed[name] = virtual
            self._lent[key] = replace(entry, extents=(virtual.extent(name),), alias_of=None)
        return self._lent[key]

    def _lend(self, entry: TensorEntry) -> None:
        """Add the lender's own virtual files that *entry* lies in."""
        for file in {extent.file for extent in entry.extents if is_computed(extent.file)}:
            if self._own(file) not in self.computed:
                made = self.catalog.computed[file]
                self.computed[self._own(file)] = self._with_inputs(made)

    def _with_inputs(self, made: Computed) -> Computed:
        inputs = {}
        for role, one in made.inputs.items():
            self._lend(one.entry)
            inputs[role] = replace(one, entry=self._renamed(one.entry))
        return replace(made, inputs=inputs)

    def _renamed(self, entry: TensorEntry) -> TensorEntry:
        extents: Iterable[Extent] = (
            replace(one, file=self._own(one.file)) if is_computed(one.file) else one
            for one in entry.extents
        )
        return replace(entry, extents=tuple(extents))

    def _own(self, file: str) -> str:
        return computed_name(f"{self.label}{file}")


def by_target(mapped: Iterable[MappedTensor]) -> Mapping[str, list[MappedTensor]]:
    """Return what each tensor of a target consists of, by its key."""
    found: dict[str, list[MappedTensor]] = {}
    for one in mapped:
        for key in dict.fromkeys(view.key for view in one.targets):
            found.setdefault(key, []).append(one)
    return found


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first one of a box to its last one, which count."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
