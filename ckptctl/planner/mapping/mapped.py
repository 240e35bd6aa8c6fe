"""Sources and targets of each tensor in a change of layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckptctl.catalog import TensorEntry, is_computed
from ckptctl.errors import MappingError, format_option
from ckptctl.planner.families.tables import LogicalTensor
from ckptctl.planner.layouts import Layout
from ckptctl.planner.mapping.logical import build_placeholder
from ckptctl.planner.strided import Part, StridedTensor
from ckptctl.units import pluralize


class Region(NamedTuple):
    """A box of a stored tensor, or the complete tensor if *sizes* is empty."""

    key: str
    origin: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RedundantData:
    """Elements of the source that no target has, because they must be zero or copies of others.

    Attributes:
        part: The elements.
        same_as: The kept elements that they must equal, or None if *part* must be zero.
        kind: ``tensor`` for a complete tensor, ``tiles`` for embeddings of aspect ratios, or
            ``padding`` for padding of a vocabulary.
    """

    part: Region
    same_as: Region | None = None
    kind: Literal["tensor", "tiles", "padding"] = "tensor"

    @classmethod
    def from_copy(cls, key: str, kept_key: str) -> RedundantData:
        """Build the record of a tensor that must equal another one, which is kept."""
        return cls(Region(key), Region(kept_key))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the tensors to compare."""
        return (self.part.key, *([self.same_as.key] if self.same_as else ()))

    def with_prefix(self, root: str) -> RedundantData:
        """Add the prefix *root* to its keys."""
        part, same_as = self.part, self.same_as
        return replace(
            self,
            part=part._replace(key=root + part.key),
            same_as=same_as and same_as._replace(key=root + same_as.key),
        )


class SourceTensor(NamedTuple):
    """A stored tensor of the source, and the logical tensor that is read from it.

    Attributes:
        logical: Name of the logical tensor with index values, as in ``q.3``.
        offset: Offset to add to each element. Elements are then computed, not copied.
    """

    key: str
    shape: tuple[int, ...]
    logical: str
    offset: int = 0


class TargetTensor(NamedTuple):
    """A stored tensor of the target, filled by one logical tensor.

    Attributes:
        tensor: The elements of the logical tensor. Parts refer to placeholders for the sources
            (:mod:`ckptctl.planner.mapping.logical`).
    """

    key: str
    tensor: StridedTensor


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A logical tensor in the source and in the target.

    Attributes:
        sources: The stored tensors that contain it, at least one.
        targets: The stored tensors to write.
    """

    sources: tuple[SourceTensor, ...]
    targets: tuple[TargetTensor, ...]

    @classmethod
    def from_unchanged(
        cls, source: str, target: str, shape: tuple[int, ...], logical: str = ""
    ) -> MappedTensor:
        """Map a stored tensor that keeps its axes. *logical* defaults to *target*."""
        read = SourceTensor(source, shape, logical or target)
        return cls((read,), (TargetTensor(target, build_placeholder(0, shape)),))

    @property
    def logical(self) -> str:
        """Its name with index values."""
        return self.sources[0].logical


@dataclass(frozen=True, slots=True)
class ZeroTensor:
    """A virtual tensor of zeros among the sources of mapped tensors.

    Attributes:
        key: Name of a virtual file.
        dtype: torch's dtype name, or empty for that of *like*.
        like: The source's key of the tensor that the zeros extend, or empty.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str = ""
    like: str = ""


@dataclass(frozen=True, slots=True)
class ComposedTensor:
    """A stored tensor of the target, composed of elements of the source's stored tensors.

    Attributes:
        tensor: The elements. Parts refer to placeholders, which are numbered like *sources*.
    """

    key: str
    tensor: StridedTensor
    sources: tuple[SourceTensor, ...]

    @classmethod
    def from_unchanged(cls, source: str, target: str, shape: tuple[int, ...]) -> ComposedTensor:
        """Compose a target from one stored tensor that is kept unchanged."""
        return cls(target, build_placeholder(0, shape), (SourceTensor(source, shape, target),))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.tensor.shape

    @property
    def keys(self) -> dict[str, None]:
        """Keys of the source's tensors, each once."""
        return dict.fromkeys([source.key for source in self.sources])

    @property
    def logical(self) -> dict[str, list[SourceTensor]]:
        """The source's tensors by name of the logical tensor that is read from them."""
        groups: dict[str, list[SourceTensor]] = {}
        for source in self.sources:
            groups.setdefault(source.logical, []).append(source)
        return groups

    @property
    def arrangement(self) -> tuple[object, ...]:
        """Value that is equal for tensors with the same arrangement of source elements."""
        return self.shape, tuple([(part.entry.name, *part[1:]) for part in self.tensor.parts])

    @property
    def is_rename(self) -> bool:
        """Whether it is one stored tensor, renamed, with the same bytes."""
        first, *other_sources = self.sources
        if other_sources or first.offset:
            return False
        same = all(
            self.tensor == StridedTensor.from_entry(part.entry) for part in self.tensor.parts
        )
        return same and (bool(self.tensor.parts) or first.shape == self.shape)

    @property
    def is_covered(self) -> bool:
        """Whether logical tensors fill all of its elements."""
        return self.tensor.covered_elements == math.prod(self.shape)

    def bind_entries(
        self, entries: Mapping[str, TensorEntry], dtype: str | None = None
    ) -> StridedTensor:
        """Replace placeholders by stored tensors, without offsets.

        Args:
            entries: The source's tensors, by key.
            dtype: The dtype to which elements are cast, or None to keep theirs.

        Raises:
            MappingError: Sources have different dtypes.
        """
        read = [entries[source.key] for source in self.sources]
        stored_dtype = read[0].dtype
        for entry in read:
            if entry.dtype != stored_dtype:
                raise MappingError(
                    f"parts of one tensor have different dtypes: {stored_dtype} and {entry.dtype}",
                    where=f"tensor `{entry.name}`",
                    why=f"they are merged into one tensor, `{self.key}`",
                )
        parts = [Part(read[int(part.entry.name)], *part[1:]) for part in self.tensor.parts]
        return StridedTensor(self.shape, stored_dtype, dtype or stored_dtype, tuple(parts))

    def __add__(self, other: ComposedTensor) -> ComposedTensor:
        """Add the parts and the sources of *other*."""
        count = len(self.sources)
        other_parts = [
            Part(replace(part.entry, name=str(count + int(part.entry.name))), *part[1:])
            for part in other.tensor.parts
        ]
        parts = (*self.tensor.parts, *other_parts)
        tensor = replace(self.tensor, parts=parts)
        return replace(self, tensor=tensor, sources=(*self.sources, *other.sources))


def compose_tensors(
    tensors: Iterable[MappedTensor], root: str = "", prefix: str = ""
) -> dict[str, ComposedTensor]:
    """Compose the stored tensors of the target, by key, in the order of *tensors*.

    Keys of the source get the prefix *root*, except for virtual tensors. Keys of the target get
    *prefix*.
    """
    composed: dict[str, ComposedTensor] = {}
    for mapped in tensors:
        sources = mapped.sources
        if root:
            sources = tuple(
                [
                    SourceTensor(key if is_computed(key) else root + key, shape, logical, offset)
                    for key, shape, logical, offset in sources
                ]
            )
        for target in mapped.targets:
            key, tensor = prefix + target.key, target.tensor
            composed_tensor = ComposedTensor(key, tensor, sources)
            composed[key] = composed[key] + composed_tensor if key in composed else composed_tensor
    return composed


def require_filled_targets(tensors: Sequence[MappedTensor]) -> None:
    """Require that every target tensor is filled completely.

    Raises:
        MappingError: Some parts of a target tensor are missing.
    """
    missing_elements: dict[str, int] = {}
    for mapped in tensors:
        for key, tensor in mapped.targets:
            missing_elements[key] = (
                missing_elements.get(key, math.prod(tensor.shape)) - tensor.covered_elements
            )
    partial_key = next((key for key, count in missing_elements.items() if count), None)
    if partial_key is not None:
        raise MappingError(
            "a target tensor would be only partly filled",
            where=f"tensor `{partial_key}`",
            why="the tensors for the rest of it are missing",
            hint=f"convert all of them or none ({format_option('--include')}, "
            f"{format_option('--exclude')})",
        )


def describe_added_offsets(tensors: Iterable[MappedTensor]) -> Iterator[str]:
    """Yield notes about tensors to which an offset is added."""
    read = (mapped.sources[0] for mapped in tensors)
    offset_counts = Counter(
        (mapped.logical.partition(".")[0], mapped.offset) for mapped in read if mapped.offset
    )
    for (name, offset), count in offset_counts.items():
        verb = "added to" if offset > 0 else "subtracted from"
        yield (
            f"{abs(offset)} is {verb} `{name}`: {pluralize(count, 'tensor')} computed and "
            "rounded to "
            "the dtype, not copied"
        )


def has_same_interleaving(tensor: LogicalTensor, source: Layout, target: Layout) -> bool:
    """Return whether both layouts interleave the parts of a tensor in the same way."""
    sides = (layout.stored_by_name[tensor.name].parts for layout in (source, target))
    source_placements, target_placements = (
        {part.name: leaf.placement for part, leaf in parts} for parts in sides
    )
    return (
        bool(source.leaves[tensor.name].interleave_axis) and source_placements == target_placements
    )
