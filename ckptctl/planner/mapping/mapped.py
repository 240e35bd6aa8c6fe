"""Source and target tensors of each logical tensor in a conversion between layouts."""

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
    """Source elements that are not written, because they must be zero or equal other elements.

    Attributes:
        part: The elements that are not written.
        same_as: Written elements that *part* must equal, or None if *part* must be zero.
        kind: ``tensor`` for a complete tensor, ``tiles`` for tile embeddings by aspect ratio, or
            ``padding`` for vocabulary padding.
    """

    part: Region
    same_as: Region | None = None
    kind: Literal["tensor", "tiles", "padding"] = "tensor"

    @classmethod
    def from_copy(cls, key: str, kept_key: str) -> RedundantData:
        """Build the record of a complete tensor *key* that must equal the tensor *kept_key*."""
        return cls(Region(key), Region(kept_key))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the tensors whose elements must be compared or must be zero."""
        return (self.part.key, *([self.same_as.key] if self.same_as else ()))

    def with_prefix(self, root: str) -> RedundantData:
        """Return a copy with the prefix *root* added to all keys."""
        part, same_as = self.part, self.same_as
        return replace(
            self,
            part=part._replace(key=root + part.key),
            same_as=same_as and same_as._replace(key=root + same_as.key),
        )


class SourceTensor(NamedTuple):
    """A stored tensor of the source, from which one logical tensor is read.

    Attributes:
        logical: Name of the logical tensor with index values, as in ``q.3``.
        offset: Number to add to each element. If it is not 0, elements are computed, not copied.
    """

    key: str
    shape: tuple[int, ...]
    logical: str
    offset: int = 0


class TargetTensor(NamedTuple):
    """A stored tensor of the target, which one logical tensor fills completely or in part.

    Attributes:
        tensor: Elements of the logical tensor. The parts refer to placeholders for source tensors,
            as in :mod:`ckptctl.planner.mapping.logical`.
    """

    key: str
    tensor: StridedTensor


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A logical tensor in the source and in the target.

    Attributes:
        sources: Stored tensors from which the logical tensor is read, at least one.
        targets: Stored tensors to which it is written.
    """

    sources: tuple[SourceTensor, ...]
    targets: tuple[TargetTensor, ...]

    @classmethod
    def from_unchanged(
        cls, source: str, target: str, shape: tuple[int, ...], logical: str = ""
    ) -> MappedTensor:
        """Map a stored tensor whose elements stay in place. *logical* defaults to *target*."""
        read = SourceTensor(source, shape, logical or target)
        return cls((read,), (TargetTensor(target, build_placeholder(0, shape)),))

    @property
    def logical(self) -> str:
        """Name of the logical tensor with index values, as in ``q.3``."""
        return self.sources[0].logical


@dataclass(frozen=True, slots=True)
class ZeroTensor:
    """A virtual tensor of zeros, which is a source of mapped tensors.

    Attributes:
        key: Name of the virtual file that contains the zeros.
        dtype: Name of a torch dtype, or empty for the dtype of *like*.
        like: Key of the source tensor that the zeros extend, or empty.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str = ""
    like: str = ""


@dataclass(frozen=True, slots=True)
class ComposedTensor:
    """A stored tensor of the target that is composed of elements of stored source tensors.

    Attributes:
        tensor: Elements of the target. The parts refer to placeholders, numbered like *sources*.
    """

    key: str
    tensor: StridedTensor
    sources: tuple[SourceTensor, ...]

    @classmethod
    def from_unchanged(cls, source: str, target: str, shape: tuple[int, ...]) -> ComposedTensor:
        """Compose a target that contains one stored tensor of the source unchanged."""
        return cls(target, build_placeholder(0, shape), (SourceTensor(source, shape, target),))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the composed tensor."""
        return self.tensor.shape

    @property
    def keys(self) -> dict[str, None]:
        """Keys of the source tensors in order, without duplicates. Values are None."""
        return dict.fromkeys([source.key for source in self.sources])

    @property
    def logical(self) -> dict[str, list[SourceTensor]]:
        """Source tensors from which each logical tensor is read, by its name."""
        groups: dict[str, list[SourceTensor]] = {}
        for source in self.sources:
            groups.setdefault(source.logical, []).append(source)
        return groups

    @property
    def arrangement(self) -> tuple[object, ...]:
        """Value that is equal for tensors that arrange source elements in the same way."""
        return self.shape, tuple([(part.entry.name, *part[1:]) for part in self.tensor.parts])

    @property
    def is_rename(self) -> bool:
        """Whether the target has the bytes of one source tensor, possibly under another key."""
        first, *other_sources = self.sources
        if other_sources or first.offset:
            return False
        same = all(
            self.tensor == StridedTensor.from_entry(part.entry) for part in self.tensor.parts
        )
        return same and (bool(self.tensor.parts) or first.shape == self.shape)

    @property
    def is_covered(self) -> bool:
        """Whether logical tensors fill all elements of the target."""
        return self.tensor.covered_elements == math.prod(self.shape)

    def bind_entries(
        self, entries: Mapping[str, TensorEntry], dtype: str | None = None
    ) -> StridedTensor:
        """Replace the placeholders by stored tensors, ignoring offsets.

        Args:
            entries: Source tensors by key.
            dtype: Dtype to which elements are cast, or None to keep the stored dtype.

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
        """Return a tensor with the elements and sources of this tensor and of *other*."""
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
    """Compose the stored tensors of the target from *tensors*, by target key and in order.

    The prefix *root* is added to source keys, except for virtual tensors. *prefix* is added to
    target keys.
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
        (mapped.logical.partition(".")[0], mapped.offset)
        for mapped in read
        if mapped.offset and not is_computed(mapped.key)
    )
    for (name, offset), count in offset_counts.items():
        verb = "added to" if offset > 0 else "subtracted from"
        yield (
            f"{abs(offset)} is {verb} `{name}`: {pluralize(count, 'tensor')} computed and "
            "rounded to "
            "the dtype, not copied"
        )


def has_same_interleaving(tensor: LogicalTensor, source: Layout, target: Layout) -> bool:
    """Return whether *source* and *target* interleave *tensor* with other parts in the same way."""
    sides = (layout.stored_by_name[tensor.name].parts for layout in (source, target))
    source_placements, target_placements = (
        {part.name: leaf.placement for part, leaf in parts} for parts in sides
    )
    return (
        bool(source.leaves[tensor.name].interleave_axis) and source_placements == target_placements
    )
