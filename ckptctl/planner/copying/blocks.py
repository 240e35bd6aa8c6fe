"""Strided byte copies that fill a buffer with elements of a tensor.

A :class:`BlockPlanner` divides a box of a strided tensor into blocks. It looks up the stored boxes
of a tensor in the columns of the catalog. A box that is larger than the buffer is read in several
domains. Parts with uniform strides can be views of stored tensors, which need no copy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from operator import add, mul, sub
from typing import NamedTuple
from weakref import ref

from ckptctl import dtypes
from ckptctl.catalog import (
    Box,
    ComputedTensor,
    ComputeInput,
    Extent,
    TensorEntry,
    compute_row_major_strides,
)
from ckptctl.columns import NO_CRC, ExtentColumns
from ckptctl.planner.plan import RecordedRange
from ckptctl.planner.strided import Axis, Part, StridedTensor
from ckptctl.tree import TreePath

MIB = 1 << 20
Ints = tuple[int, ...]
Strides = tuple[tuple[int, int, int], ...]
LINEAR_SEARCH_LIMIT = 8
"""Maximum number of boxes that are searched linearly for overlaps."""
SHORT_RUN_BYTES = 256
"""Run length in bytes below which a tensor with many runs is permuted in memory."""
FEW_RUNS_LIMIT = 1024
"""Maximum number of runs that are copied one by one regardless of their length."""


class Block(NamedTuple):
    """A strided copy of bytes from a source file into a buffer.

    Attributes:
        source: Byte position of the first element in the source.
        buffer: Byte position of the first element in the buffer.
        axes: ``(count, source stride, buffer stride)`` of each axis, with strides in bytes and the
            largest source stride first.
        run_nbytes: Bytes of one run, which is contiguous in the source and in the buffer. There is
            one run for each combination of indices.
    """

    source: int
    buffer: int
    axes: Strides
    run_nbytes: int

    @property
    def run_count(self) -> int:
        """Number of contiguous runs that the block copies."""
        return math.prod(axis[0] for axis in self.axes)


def compute_dense_strides(sizes: Ints, itemsize: int) -> Ints:
    """Return the byte strides of a dense row-major box."""
    return tuple([step * itemsize for step in compute_row_major_strides(sizes)])


def merge_axes(strides: Iterable[tuple[int, int, int]], itemsize: int) -> tuple[Strides, int]:
    """Merge the axes of a copy that are contiguous in the source and in the buffer.

    Args:
        strides: ``(source stride, buffer stride, count)`` of each axis, with strides in bytes.
        itemsize: Bytes of one element.

    Returns:
        ``axes`` and ``run_nbytes`` of the :class:`Block` that copies these axes.
    """
    axes: list[tuple[int, int, int]] = []
    count, source_stride, buffer_stride = itemsize, 1, 1
    for stride, step, axis_size in sorted(strides):
        if stride == source_stride * count and step == buffer_stride * count:
            count *= axis_size
        else:
            axes.append((count, source_stride, buffer_stride))
            count, source_stride, buffer_stride = axis_size, stride, step
    axes.append((count, source_stride, buffer_stride))
    return tuple(axes[:0:-1]), axes[0][0]


def list_block_runs(block: Block) -> list[tuple[int, int, int]]:
    """List ``(source position, buffer position, bytes)`` of every run of *block*."""
    places = [(block.source, block.buffer)]
    for count, source_stride, buffer_stride in block.axes:
        places = [
            (s + i * source_stride, b + i * buffer_stride) for s, b in places for i in range(count)
        ]
    return [(s, b, block.run_nbytes) for s, b in places]


class BoxIndex:
    """Index of boxes for overlap searches, sorted along the axis with the most distinct offsets."""

    def __init__(self, offsets: Sequence[Ints], sizes: Sequence[Ints]) -> None:
        self._count = len(offsets)
        rank = len(offsets[0]) if offsets else 0
        spread = [len({lo[axis] for lo in offsets}) for axis in range(rank)]
        self._axis = (
            spread.index(max(spread)) if len(offsets) > LINEAR_SEARCH_LIMIT and rank else None
        )
        if self._axis is not None:
            axis = self._axis
            self._order = sorted(range(len(offsets)), key=lambda number: offsets[number][axis])
            self._starts = [offsets[number][axis] for number in self._order]
            self._widest = max(size[axis] for size in sizes)

    def find_overlap_candidates(self, lo: Ints, sizes: Ints) -> Iterable[int]:
        """Return the indices of all boxes that may overlap the given box, in ascending order."""
        if self._axis is None:
            return range(self._count)
        first = bisect_left(self._starts, lo[self._axis] - self._widest + 1)
        last = bisect_left(self._starts, lo[self._axis] + sizes[self._axis])
        return sorted(self._order[first:last])


class Domain(NamedTuple):
    """A box that is copied in several steps, each of *step* indices along *axis*."""

    lo: Ints
    sizes: Ints
    axis: int
    step: int

    @property
    def length(self) -> int:
        """Size of the box along :attr:`axis`."""
        return self.sizes[self.axis] if self.sizes else 1

    def narrow(self, length: int, begin: int = 0) -> Domain:
        """Narrow :attr:`axis` to at most *length* indices, starting at *begin* within the box."""
        if not self.sizes:
            return self
        lo, sizes = list(self.lo), list(self.sizes)
        lo[self.axis] += begin
        sizes[self.axis] = min(length, self.length - begin)
        return self._replace(lo=tuple(lo), sizes=tuple(sizes))

    def split_into_parts(self, length: int, begin: int = 0) -> Iterator[Domain]:
        """Split :attr:`axis` from *begin* on into domains of at most *length* indices."""
        return (self.narrow(length, position) for position in range(begin, self.length, length))


def split_into_domains(
    lo: Ints, sizes: Ints, limit: int, granularity: Mapping[int, int] | None = None
) -> Iterator[Domain]:
    """Split a box into domains whose steps have at most *limit* elements.

    Args:
        lo: First indices of the box.
        sizes: Sizes of the box.
        limit: Maximum number of elements in a step.
        granularity: For each axis, the number of indices of which a step should be a multiple.
    """
    axis, inner = len(sizes) - 1, 1
    while axis >= 0 and inner * sizes[axis] <= limit:
        inner *= sizes[axis]
        axis -= 1
    if axis < 0:
        yield Domain(lo, sizes, 0, max(sizes, default=1))
        return
    max_length = max(1, limit // inner)
    unit = granularity.get(axis, 1) if granularity else 1
    unit = unit if unit <= max_length else 1
    parts = -(-sizes[axis] // (max_length // unit * unit))
    step = -(-sizes[axis] // (parts * unit)) * unit
    for indices in product(*map(range, sizes[:axis])):
        start = (*map(add, lo[:axis], indices), *lo[axis:])
        yield Domain(start, (1,) * axis + sizes[axis:], axis, step)


class BlockSource(NamedTuple):
    """A file that blocks read, and the recorded range whose checksum includes their bytes."""

    file: str
    check: RecordedRange | None = None


Blocks = dict[BlockSource, list[Block]]
"""Blocks that fill one buffer, grouped by the source that they read."""


class StoredBoxes:
    """The boxes of a stored tensor, with the file, byte offset and strides of each box."""

    def __init__(self, entry: TensorEntry) -> None:
        self._name, self._shape, self._dims = entry.name, entry.shape, range(len(entry.shape))
        self._extents = extents = entry.extents
        if isinstance(extents, ExtentColumns):
            self.offsets, self.sizes = extents.boxes.offsets, extents.boxes.sizes
            self.files, self.starts, self._strides = extents.files, extents.starts, None
        else:
            self.offsets = [extent.box.offsets for extent in extents]
            self.sizes = [extent.box.sizes for extent in extents]
            self.files = [extent.file for extent in extents]
            self.starts = [extent.offset for extent in extents]
            self._strides = [extent.strides for extent in extents]

    @cached_property
    def _index(self) -> BoxIndex:
        return BoxIndex(self.offsets, self.sizes)

    def get_strides(self, number: int) -> Ints:
        """Return the strides of box *number* in its file, in elements."""
        explicit_strides = self._strides[number] if self._strides else None
        return explicit_strides or compute_row_major_strides(self.sizes[number])

    def find_recorded_range(self, number: int) -> RecordedRange | None:
        """Find the byte range with a recorded checksum that contains box *number*, or None."""
        extents, name = self._extents, self._name
        if isinstance(extents, ExtentColumns):
            crc = extents.crcs[number] if extents.crcs else NO_CRC
            if crc == NO_CRC:
                return None
            nbytes = extents.lengths[number]
            return RecordedRange(self.files[number], self.starts[number], nbytes, crc, name)
        return find_recorded_range(extents[number], name)

    def iterate_overlaps(self, part: Part) -> Iterator[tuple[int, Part]]:
        """Yield each stored box that *part* overlaps, as the box number and the elements in it."""
        if len(self.files) == 1 and self.sizes[0] == self._shape:
            yield 0, part
            return
        axes = _map_dims_to_axes(part, STORED)
        if (
            axes is not None
            and all(axis.stride == 1 for axis in part.axes)
            and self._shape == tuple(axes[at].size if at in axes else 1 for at in self._dims)
        ):
            yield from self._iterate_all_boxes(part)
            return
        numbers: Iterable[int] = range(len(self.files))
        if len(self.files) > LINEAR_SEARCH_LIMIT:
            numbers = self._index.find_overlap_candidates(
                part.stored_origin, _compute_extents(part, STORED)
            )
        for number in numbers:
            for cut in _intersect_part_with_box(
                part, axes, self.offsets[number], self.sizes[number], STORED
            ):
                yield number, cut

    def _iterate_all_boxes(self, part: Part) -> Iterator[tuple[int, Part]]:
        """Yield the number and the elements of every non-empty box.

        *part* must contain all elements of the tensor. This is a hot path because a plan may have a
        million boxes, but these have few distinct shapes.
        """
        stored, axes, origin, _ = part
        in_order = (
            not any(origin)
            and all(dim == at and step == 1 for _, dim, step, at, _ in axes)
            and len(origin) == len(self._shape)
        )
        axes_by_sizes: dict[Ints, tuple[Axis, ...]] = {}
        for number, (lo, sizes) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            box_axes = axes_by_sizes.get(sizes)
            if box_axes is None:
                cuts = (axis._replace(size=sizes[axis.at]) for axis in axes)
                box_axes = axes_by_sizes[sizes] = tuple(axis for axis in cuts if axis.size > 1)
            if 0 in sizes:
                continue
            first = lo
            if not in_order:
                starts = list(origin)
                for _, dim, step, at, _ in axes:
                    starts[dim] += lo[at] * step
                first = tuple(starts)
            yield number, Part(stored, box_axes, first, lo)

    def iterate_element_ranges(self, part: Part) -> Iterator[tuple[int, int, int]]:
        """Yield ``(box number, first element, length)`` for each box that *part* overlaps.

        *part* must be a row-major range of the tensor. Its elements in a box then form one range of
        that box, even if they consist of several parts.
        """
        range_by_box: dict[int, tuple[int, int]] = {}
        for number, cut in self.iterate_overlaps(part):
            start, count = (
                self.compute_offset(number, cut),
                math.prod(axis.size for axis in cut.axes),
            )
            first, total = range_by_box.get(number, (start, 0))
            range_by_box[number] = min(first, start), total + count
        return ((number, *range_) for number, range_ in range_by_box.items())

    def compute_offset(self, number: int, part: Part) -> int:
        """Return the offset of the first element of *part* in box *number*, in elements."""
        first = self.offsets[number]
        if part.stored_origin == first:
            return 0
        return sum(map(mul, map(sub, part.stored_origin, first), self.get_strides(number)))


_boxes_by_entry: dict[int, tuple[StoredBoxes, ref[TensorEntry]]] = {}
"""Cached boxes by ``id`` of a :class:`TensorEntry`, because its hash covers all extents."""
MAX_CACHED_ENTRIES = 1024
"""Maximum number of stored tensors whose boxes are cached."""


def get_stored_boxes(entry: TensorEntry) -> StoredBoxes:
    """Return the boxes of a stored tensor, cached at most until *entry* is freed."""
    key = id(entry)
    if key not in _boxes_by_entry:
        if len(_boxes_by_entry) >= MAX_CACHED_ENTRIES:
            _boxes_by_entry.clear()
        _boxes_by_entry[key] = StoredBoxes(entry), ref(entry, lambda _: _boxes_by_entry.pop(key))
    return _boxes_by_entry[key][0]


def find_recorded_range(extent: Extent, name: str) -> RecordedRange | None:
    """Find the byte range with a recorded checksum that contains *extent*, or return None.

    *name* is the stored tensor to which *extent* belongs.
    """
    recorded = extent.recorded_checksum
    if recorded is None or not recorded.nbytes:
        return None
    has_own_crc = extent.crc32 is not None
    return RecordedRange(
        extent.file, recorded.offset, recorded.nbytes, recorded.crc32, name if has_own_crc else ""
    )


class _TensorSide(NamedTuple):
    """Indices of the dimension and the step in an :class:`Axis`, for either of two tensors."""

    dim: int
    step: int


TENSOR, STORED = _TensorSide(dim=1, step=2), _TensorSide(dim=3, step=4)
_AxisByDim = Mapping[int, Axis] | None


def _map_dims_to_axes(part: Part, side: _TensorSide) -> _AxisByDim:
    """Map each dimension to its axis in *part*, or return None if a dimension has several axes."""
    axes = {axis[side.dim]: axis for axis in part.axes}
    return axes if len(axes) == len(part.axes) else None


def _compute_extents(part: Part, side: _TensorSide) -> Ints:
    """Compute the distance from the first to the last index of *part*, plus 1, per dimension."""
    spans = [1] * len(part.origin if side is TENSOR else part.stored_origin)
    for axis in part.axes:
        spans[axis[side.dim]] += (axis.size - 1) * axis[side.step]
    return tuple(spans)


def _intersect_part_with_box(
    part: Part, axes: _AxisByDim, lo: Ints, sizes: Ints, side: _TensorSide
) -> Sequence[Part]:
    """Return the elements of *part* that are in a box of the tensor or of the stored tensor.

    *side* selects the tensor. The result has several parts only if *axes* is None, and is empty if
    the box contains no element of *part*.

    *axes* is the result of :func:`_map_dims_to_axes`.
    """
    if axes is None:
        cut_range = Part.cut_range if side is TENSOR else Part.cut_stored_range
        cuts = [part]
        for dim, first in enumerate(lo):
            cuts = [
                cut
                for cut_part in cuts
                for cut in cut_range(cut_part, dim, first, first + sizes[dim])
            ]
        return cuts
    # Hot path: a plan may have a million boxes.
    entry, _, origin, begin = part
    origins, step_field = origin if side is TENSOR else begin, side.step
    cut_axes, starts, begins = list[Axis](), list(origin), list(begin)
    is_complete = True
    for dim, first in enumerate(lo):
        start = first - origins[dim]
        stop = start + sizes[dim]
        axis = axes.get(dim)
        if axis is None:
            if not start <= 0 < stop:
                return ()
            continue
        size, step = axis[0], axis[step_field]
        if start <= 0 and (size - 1) * step < stop:
            cut_axes.append(axis)
            continue
        is_complete = False
        index = -(-start // step) if start > 0 else 0
        count = min(size, (stop - 1) // step + 1) - index
        if count <= 0:
            return ()
        _, target_dim, target_step, stored_dim, stride = axis
        starts[target_dim] += index * target_step
        begins[stored_dim] += index * stride
        if count > 1:
            cut_axes.append(Axis(count, target_dim, target_step, stored_dim, stride))
    return (part if is_complete else Part(entry, tuple(cut_axes), tuple(starts), tuple(begins)),)


class LocatedElements(NamedTuple):
    """Elements of a tensor that are in one stored box.

    Attributes:
        source: The file that contains the box.
        byte_offset: Offset of the first element in the file, in bytes.
        strides: Strides of the stored box, in elements.
        part: The elements, which are all in this box.
    """

    source: BlockSource
    byte_offset: int
    strides: Ints
    part: Part


class BlockPlanner:
    """Planner of the copies that fill a buffer with elements of a tensor.

    A plan may have tens of thousands of tensors, so stored boxes are looked up on demand.

    Attributes:
        tensor: The tensor to read.
        itemsize: Bytes of a stored element.
        checked: Names of stored tensors whose recorded checksums are verified while they are read.
    """

    def __init__(self, tensor: StridedTensor, checked: Collection[str] = ()) -> None:
        self.tensor = tensor
        self.itemsize = tensor.itemsize
        self.checked = checked

    @cached_property
    def _index(self) -> BoxIndex:
        """Index of the boxes in the tensor that its parts span."""
        parts = self.tensor.parts
        extents = [_compute_extents(part, TENSOR) for part in parts]
        return BoxIndex([part.origin for part in parts], extents)

    def __repr__(self) -> str:
        # Plan digests hash this text: changing it breaks `--resume`.
        parts = [(part.entry.name, *part[1:]) for part in self.tensor.parts]
        return f"BlockReader({self.tensor.stored_dtype}, {self.tensor.shape}, {parts})"

    @cached_property
    def is_permuted(self) -> bool:
        """Whether to permute the elements in memory because their runs are many and short."""
        shape = self.tensor.shape
        return self.should_permute((0,) * len(shape), shape)

    def should_permute(self, lo: Ints, shape: Ints) -> bool:
        """Return whether to permute a box in memory because its contiguous runs are many and short.

        The runs are estimated from the first elements of the box.
        """
        if 0 in shape or self._has_long_rows(shape):
            return False
        domain = next(split_into_domains(lo, shape, MIB // self.itemsize))
        box = domain.narrow(domain.step)
        blocks = self.find_dense_copies(box.lo, box.sizes)
        run_count = sum(
            block.run_count for source_blocks in blocks.values() for block in source_blocks
        )
        sample_bytes, total_bytes = (
            math.prod(box.sizes) * self.itemsize,
            math.prod(shape) * self.itemsize,
        )
        return (
            sample_bytes < SHORT_RUN_BYTES * run_count
            and total_bytes * run_count > FEW_RUNS_LIMIT * sample_bytes
        )

    def _has_long_rows(self, shape: Ints) -> bool:
        """Return whether every row of a box of *shape* is stored as a long contiguous run."""
        last = len(shape) - 1
        return all(
            len(part.entry.extents) == 1
            and not part.entry.extents[0].strides
            and any(
                axis.dim == last
                and axis.step == axis.stride == 1
                and axis.at == len(part.stored_origin) - 1
                and min(axis.size, shape[last]) * self.itemsize >= SHORT_RUN_BYTES
                for axis in part.axes
            )
            for part in self.tensor.parts
        )

    def find_dense_copies(self, lo: Ints, sizes: Ints) -> Blocks:
        """Find the blocks that fill a contiguous row-major buffer with a box of the tensor."""
        copies: Blocks = {}
        strides = compute_dense_strides(sizes, self.itemsize)
        for source, block in self.iterate_blocks(self.locate_elements(lo, sizes), lo, 0, strides):
            copies.setdefault(source, []).append(block)
        return copies

    def locate_elements(self, lo: Ints, sizes: Ints) -> Iterator[LocatedElements]:
        """Yield the locations of the elements of a box of the tensor in stored tensors."""
        parts: Sequence[Part] = self.tensor.parts
        if any(lo) or sizes != self.tensor.shape:
            if len(parts) > LINEAR_SEARCH_LIMIT:
                parts = [parts[number] for number in self._index.find_overlap_candidates(lo, sizes)]
            pairs = ((part, _map_dims_to_axes(part, TENSOR)) for part in parts)
            parts = [
                cut for pair in pairs for cut in _intersect_part_with_box(*pair, lo, sizes, TENSOR)
            ]
        for part in parts:
            entry, check = part.entry, None
            is_checked = self.checked and entry.name in self.checked
            if len(entry.extents) == 1 and (extent := entry.extents[0]).box.sizes == entry.shape:
                # Common case: nothing to look up.
                steps = extent.strides or compute_row_major_strides(entry.shape)
                first = extent.offset + sum(map(mul, part.stored_origin, steps)) * self.itemsize
                if is_checked:
                    check = find_recorded_range(extent, entry.name)
                yield LocatedElements(BlockSource(extent.file, check), first, steps, part)
                continue
            stored = get_stored_boxes(entry)
            for number, cut in stored.iterate_overlaps(part):
                first = stored.starts[number] + stored.compute_offset(number, cut) * self.itemsize
                if is_checked:
                    check = stored.find_recorded_range(number)
                source = BlockSource(stored.files[number], check)
                yield LocatedElements(source, first, stored.get_strides(number), cut)

    def iterate_blocks(
        self, located: Iterable[LocatedElements], lo: Ints, position: int, strides: Ints
    ) -> Iterator[tuple[BlockSource, Block]]:
        """Yield the blocks that copy a box of the tensor into a buffer.

        Args:
            located: Locations of the elements of the box.
            lo: First indices of the box.
            position: Byte position of the first element of the box in the buffer.
            strides: Strides of the buffer, in bytes.

        Yields:
            The source of each block, and the block.
        """
        origin, item = position - sum(map(mul, lo, strides)), self.itemsize
        # Hot path: boxes of a checkpoint have few shapes.
        merged_axes: dict[tuple[tuple[Axis, ...], Ints], tuple[Strides, int]] = {}
        for source, first, steps, (_, axes, start, _) in located:
            merged = merged_axes.get((axes, steps))
            if merged is None:
                byte_axes = [
                    (stride * steps[at] * item, step * strides[dim], size)
                    for size, dim, step, at, stride in axes
                ]
                merged = merged_axes[axes, steps] = merge_axes(byte_axes, item)
            yield source, Block(first, origin + sum(map(mul, start, strides)), *merged)

    def clip_elements(
        self, located: Iterable[LocatedElements], lo: Ints, sizes: Ints
    ) -> Iterator[LocatedElements]:
        """Restrict *located* elements to those in a box of the tensor."""
        for source, first, steps, part in located:
            for cut in _intersect_part_with_box(
                part, _map_dims_to_axes(part, TENSOR), lo, sizes, TENSOR
            ):
                distance = (
                    sum(map(mul, map(sub, cut.stored_origin, part.stored_origin), steps))
                    * self.itemsize
                )
                yield LocatedElements(source, first + distance, steps, cut)


def build_rearranged_file(root: TreePath, tensor: StridedTensor) -> ComputedTensor:
    """Build a virtual file with the elements of a tensor in row-major order.

    Args:
        root: Directory of the files in which the elements are stored.
        tensor: Tensor whose elements the virtual file contains.
    """
    entries = {id(part.entry): part.entry for part in tensor.parts}
    inputs = tuple(ComputeInput(root, entry) for entry in entries.values())
    matrix = BlockPlanner(tensor.as_matrix())
    return ComputedTensor("rearranged", tensor.dtype, tensor.shape, inputs, matrix)


def build_view(entry: TensorEntry, tensor: StridedTensor, name: str | None = None) -> TensorEntry:
    """Build an entry for a view of *entry*, which refers to the same bytes of the same files.

    Args:
        entry: The stored tensor.
        tensor: Elements of *entry*, with a uniform stride in every dimension.
        name: Name of the new entry, or None for the name of *entry*.

    Raises:
        ValueError: Strides are not uniform.
    """
    if not has_uniform_strides(tensor):
        raise ValueError(f"elements of `{entry.name}` are not evenly apart")
    stored = StoredBoxes(entry)
    extents = (
        _restrict_extent(
            entry.extents[number], stored, number, cut, dtypes.get_itemsize(entry.dtype)
        )
        for part in tensor.parts
        for number, cut in stored.iterate_overlaps(part)
    )
    view_entry = replace(entry, shape=tensor.shape, extents=tuple(extents))
    return view_entry if name is None else replace(view_entry, name=name, path=(name,))


def has_uniform_strides(tensor: StridedTensor) -> bool:
    """Return whether each part of a tensor has a uniform stride in every dimension."""
    return all(
        axis.step == 1 and sum(other.dim == axis.dim for other in part.axes) == 1
        for part in tensor.parts
        for axis in part.axes
    )


def transpose_entry(entry: TensorEntry, name: str | None = None) -> TensorEntry:
    """Build a view of *entry* with the last two dimensions swapped, named *name* if given."""
    *lead, rows, columns = range(len(entry.shape))
    return build_view(entry, StridedTensor.from_entry(entry).permute((*lead, columns, rows)), name)


def _restrict_extent(
    extent: Extent, stored: StoredBoxes, number: int, cut: Part, item: int
) -> Extent:
    """Restrict *extent* to the elements of *cut*, without the checksum unless all are kept."""
    sizes, strides = [1] * len(cut.origin), [0] * len(cut.origin)
    for axis in cut.axes:
        sizes[axis.dim] = axis.size
        strides[axis.dim] = axis.stride * stored.get_strides(number)[axis.at]
    pairs = list(zip(sizes, strides, compute_row_major_strides(tuple(sizes)), strict=True))
    restricted = replace(
        extent,
        box=Box(cut.origin, tuple(sizes)),
        strides=None
        if all(size == 1 or step == packed for size, step, packed in pairs)
        else tuple(packed if size == 1 else step for size, step, packed in pairs),
    )
    if restricted.box.numel == extent.box.numel:
        return restricted
    return replace(
        restricted,
        offset=extent.offset + stored.compute_offset(number, cut) * item,
        nbytes=(sum((size - 1) * step for size, step, _ in pairs) + 1) * item,
        crc32=None,
        within=None,
    )
