"""Map parameters to ranges of ZeRO's flat vectors, which are partitioned among ranks.

Source: ``deepspeed/utils/zero_to_fp32.py`` (``_zero2_merge_trainable_params``, ``GatheredTensor``),
and ZeRO (https://arxiv.org/abs/1910.02054). Parameters have the order of ``param_shapes``,
because ``param_slice_mappings`` ignores the parameter order of ``round_robin_gradients``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeGuard

from ckptctl import dtypes
from ckptctl.catalog import Box, Checksum, Extent
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.shared.stored_leaves import make_extent
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.units import pluralize

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
_OTHER_SAVE_HINT = "check for a rank file of another save or world size"


@dataclass(frozen=True, slots=True)
class Segment:
    """Flat tensor of one rank, such as its partition of a parameter group.

    Attributes:
        file: Path of the rank's file, relative to the checkpoint's root.
        tensor: Contiguous one-dimensional tensor.
    """

    file: str
    tensor: StoredTensor

    @property
    def numel(self) -> int:
        """Number of elements in this segment."""
        return self.tensor.shape[0]

    @property
    def checksum(self) -> Checksum | None:
        """Checksum of the zip record that contains the tensor, or None if not recorded."""
        return make_extent(self.tensor, self.file).recorded_checksum


class FlatVector:
    """Concatenation of one or more segments of the same dtype."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.dtype = segments[0].tensor.dtype
        self.starts = [0, *accumulate(segment.numel for segment in segments)]

    @property
    def numel(self) -> int:
        """Total number of elements in all segments."""
        return self.starts[-1]

    def find_segment(self, position: int) -> int:
        """Return the index of the segment that contains element *position* of the vector."""
        return bisect_right(self.starts, position) - 1

    def iterate_runs(self, low: int, high: int) -> Iterator[tuple[str, int, int, Checksum | None]]:
        """Yield ``(file, byte offset, number of elements, checksum)`` for elements [*low*, *high*).

        The checksum covers the complete zip record that contains the elements. It is None if not
        recorded.
        """
        item = dtypes.get_itemsize(self.dtype)
        while low < high:
            index = self.find_segment(low)
            segment = self.segments[index]
            end = min(high, self.starts[index + 1])
            offset = segment.tensor.offset + (low - self.starts[index]) * item
            yield segment.file, offset, end - low, segment.checksum
            low = end


@dataclass(frozen=True, slots=True)
class FlatLocation:
    """Location of a parameter in flat vectors.

    Attributes:
        shape: Shape of the parameter.
        spans: ``(index of the flat vector, first element, end)`` in the order of the elements.
        group_number: Index of the parameter group (stages 1 and 2) or sub-group (stage 3) that
            contains the first element.
    """

    shape: Shape
    spans: tuple[tuple[int, int, int], ...]
    group_number: int


FlatLocations = dict[str, FlatLocation]


def is_flat(value: object) -> TypeGuard[StoredTensor]:
    """Return whether *value* is a contiguous one-dimensional tensor."""
    return isinstance(value, StoredTensor) and len(value.shape) == 1 and value.strides is None


def locate_extents(location: FlatLocation, vectors: Sequence[FlatVector]) -> tuple[Extent, ...]:
    """Return the extents of a parameter, or of one of its moments, in *vectors*."""
    located: list[Extent] = []
    position = 0
    for number, low, high in location.spans:
        item = dtypes.get_itemsize(vectors[number].dtype)
        for file, offset, count, record in vectors[number].iterate_runs(low, high):
            for lo, sizes in split_into_boxes(position, position + count, location.shape):
                nbytes, box = math.prod(sizes) * item, Box(lo, sizes)
                if record is not None and (record.offset, record.nbytes) == (offset, nbytes):
                    extent = Extent(box, file, offset, nbytes, crc32=record.crc32)
                else:
                    extent = Extent(box, file, offset, nbytes, within=record)
                located.append(extent)
                offset += nbytes
            position += count
    return tuple(located)


def compute_partition_numels(
    shapes: Shapes, paddings: Sequence[int], world: int
) -> tuple[tuple[int, int], ...]:
    """Return the minimum and maximum number of elements in each rank's partition of a group.

    The maximum includes the padding after the last parameter, which some DeepSpeed versions strip.
    *paddings* contains the number of padding elements after each parameter, or is empty.
    """
    data = sum(map(math.prod, shapes.values())) + sum(paddings[:-1])
    full = _align_numel(data + sum(paddings[-1:]), world) // world
    return tuple((max(0, min(full, data - rank * full)), full) for rank in range(world))


def locate_in_groups(
    groups: Sequence[Shapes],
    paddings: Sequence[Sequence[int]] | None,
    vectors: Sequence[FlatVector],
    world: int,
    where: str,
) -> FlatLocations:
    """Locate parameters for stages 1 and 2, where a partition may end inside a parameter.

    *groups* contains the parameter shapes of each group in the order of *vectors*, which has one
    flat vector per group. *paddings* contains the number of padding elements after each parameter
    of each group, or is None if there is no padding.
    """
    locations: FlatLocations = {}
    for number, (shapes, vector) in enumerate(zip(groups, vectors, strict=True)):
        gaps = paddings[number] if paddings else [0] * len(shapes)
        if len(gaps) != len(shapes):
            raise UnsupportedError(
                "the alignment paddings do not match the parameters",
                where=where,
                why=f"{pluralize(len(gaps), 'padding')}, but "
                f"{pluralize(len(shapes), 'parameter')} in "
                f"group {number}",
            )
        end = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            low, high = end, end + math.prod(shape)
            locations[name] = FlatLocation(shape, ((number, low, high),), number)
            if high > vector.numel:
                raise DamagedError(
                    f"the partitions end before `{name}`",
                    where=where,
                    why=f"group {number} contains {pluralize(vector.numel, 'element')}",
                    hint=_OTHER_SAVE_HINT,
                )
            end = high + gap
        if _align_numel(end, world) != _align_numel(vector.numel, world):
            raise UnsupportedError(
                "the length of the partitions does not match the parameters",
                where=where,
                why=f"the ranks have {pluralize(vector.numel, 'element')}, but the parameters need "
                f"{end:,}",
                hint=_OTHER_SAVE_HINT,
            )
    return locations


def _align_numel(numel: int, world: int) -> int:
    """Round *numel* up to a multiple of twice the world size, as DeepSpeed aligns partitions."""
    return -(-numel // (2 * world)) * (2 * world)


def locate_in_ranks(shapes: Shapes, vectors: Sequence[FlatVector], where: str) -> FlatLocations:
    """Locate parameters for stage 3, where every parameter is divided evenly among all ranks."""
    locations: FlatLocations = {}
    world, start = len(vectors), 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        share = -(-numel // world)
        spans = (
            (rank, start, start + min(share, numel - rank * share))
            for rank in range(world)
            if rank * share < numel
        )
        locations[name] = FlatLocation(shape, tuple(spans), vectors[0].find_segment(start))
        start += share
    for rank, vector in enumerate(vectors):
        if vector.numel != start:
            raise UnsupportedError(
                f"the length of rank {rank}'s partition does not match its share of the parameters",
                where=where,
                why=f"`{vector.segments[0].file}` has {pluralize(vector.numel, 'element')}, "
                f"expected {start:,}",
                hint="check whether the file belongs to another save or world size",
            )
    return locations


def split_into_boxes(lo: int, hi: int, sizes: Shape) -> list[tuple[Shape, Shape]]:
    """Split elements ``[lo, hi)`` of a flattened tensor of shape *sizes* into boxes.

    Returns:
        ``(offsets, sizes)`` of at most ``2 * len(sizes) - 1`` boxes, in ascending order.
    """
    if lo >= hi:
        return []
    if len(sizes) < 2:
        return [((lo,), (hi - lo,))] if sizes else [((), ())]
    tail = sizes[1:]
    inner = math.prod(tail)
    first, skip = divmod(lo, inner)
    last, rest = divmod(hi, inner)
    if first == last:
        return _prepend_index(first, split_into_boxes(skip, rest, tail))
    boxes: list[tuple[Shape, Shape]] = []
    if skip:
        boxes += _prepend_index(first, split_into_boxes(skip, inner, tail))
        first += 1
    if first < last:
        boxes.append(((first, *(0 for _ in tail)), (last - first, *tail)))
    if rest:
        boxes += _prepend_index(last, split_into_boxes(0, rest, tail))
    return boxes


def _prepend_index(index: int, boxes: list[tuple[Shape, Shape]]) -> list[tuple[Shape, Shape]]:
    return [((index, *lo), (1, *count)) for lo, count in boxes]
