"""Strided byte copies that fill a buffer with elements of a tensor.

A :class:`BlockReader` turns a box of a strided tensor into blocks. The boxes in which a checkpoint
stores tensors come straight from the columns of the catalog. A box that exceeds the buffer is read
in domains. Parts with uniform strides need no copy because they are views.
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
from ckptctl.catalog import Box, Computed, Extent, Input, TensorEntry, row_major
from ckptctl.columns import NO_CRC, ExtentColumns
from ckptctl.planner.plan import RecordedRange
from ckptctl.planner.strided import Axis, Part, Strided
from ckptctl.tree import TreePath

MIB = 1 << 20
Ints = tuple[int, ...]
Strides = tuple[tuple[int, int, int], ...]
LINEAR = 8
"""Number of boxes up to which a linear search finds overlaps."""
SHORT_RUN = 256
"""Average bytes of a run below which elements are permuted in memory ..."""
FEW_RUNS = 1024
"""... unless the tensor has fewer runs than this."""


class Block(NamedTuple):
    """A strided copy with axes from the outermost (by source address) to the innermost.

    Attributes:
        source: Byte position of the first element in the source.
        buffer: Byte position of the first element in the buffer.
        axes: ``(count, source stride, buffer stride)`` in bytes.
        run: Bytes that are contiguous on both sides below all axes.
    """

    source: int
    buffer: int
    axes: Strides
    run: int

    @property
    def runs(self) -> int:
        """Number of runs."""
        return math.prod(axis[0] for axis in self.axes)


def dense_strides(sizes: Ints, item: int) -> Ints:
    """Return the byte strides of a dense row-major box."""
    return tuple([step * item for step in row_major(sizes)])


def melted_axes(strides: Iterable[tuple[int, int, int]], item: int) -> tuple[Strides, int]:
    """Merge the axes of a copy wherever it is contiguous on both sides.

    Args:
        strides: ``(source stride, buffer stride, count)`` of each axis, in bytes.
        item: Bytes of one element.

    Returns:
        The remaining axes of a :class:`Block` and the bytes of its run.
    """
    axes: list[tuple[int, int, int]] = []
    count, near, far = item, 1, 1
    for stride, step, number in sorted(strides):
        if stride == near * count and step == far * count:
            count *= number
        else:
            axes.append((count, near, far))
            count, near, far = number, stride, step
    axes.append((count, near, far))
    return tuple(axes[:0:-1]), axes[0][0]


def list_runs(block: Block) -> list[tuple[int, int, int]]:
    """List ``(source position, buffer position, bytes)`` of every run of *block*."""
    places = [(block.source, block.buffer)]
    for count, near, far in block.axes:
        places = [(s + i * near, b + i * far) for s, b in places for i in range(count)]
    return [(s, b, block.run) for s, b in places]


class BoxIndex:
    """Index of boxes for overlap searches, sorted along the axis with the most distinct offsets."""

    def __init__(self, offsets: Sequence[Ints], sizes: Sequence[Ints]) -> None:
        self._count = len(offsets)
        rank = len(offsets[0]) if offsets else 0
        spread = [len({lo[axis] for lo in offsets}) for axis in range(rank)]
        self._axis = spread.index(max(spread)) if len(offsets) > LINEAR and rank else None
        if self._axis is not None:
            axis = self._axis
            self._order = sorted(range(len(offsets)), key=lambda number: offsets[number][axis])
            self._starts = [offsets[number][axis] for number in self._order]
            self._widest = max(size[axis] for size in sizes)

    def near(self, lo: Ints, sizes: Ints) -> Iterable[int]:
        """Return the numbers of the boxes that may overlap a box, in ascending order."""
        if self._axis is None:
            return range(self._count)
        first = bisect_left(self._starts, lo[self._axis] - self._widest + 1)
        last = bisect_left(self._starts, lo[self._axis] + sizes[self._axis])
        return sorted(self._order[first:last])


class Domain(NamedTuple):
    """A box that is copied in parts of *step* indices along *axis*."""

    lo: Ints
    sizes: Ints
    axis: int
    step: int

    @property
    def length(self) -> int:
        """Size along the axis."""
        return self.sizes[self.axis] if self.sizes else 1

    def first(self, length: int, begin: int = 0) -> Domain:
        """Return the part that starts at *begin* along the axis, with at most *length* indices."""
        if not self.sizes:
            return self
        lo, sizes = list(self.lo), list(self.sizes)
        lo[self.axis] += begin
        sizes[self.axis] = min(length, self.length - begin)
        return self._replace(lo=tuple(lo), sizes=tuple(sizes))

    def cut(self, length: int, begin: int = 0) -> Iterator[Domain]:
        """Yield consecutive parts of *length* indices along the axis, from *begin* on."""
        return (self.first(length, at) for at in range(begin, self.length, length))


def domains(
    lo: Ints, sizes: Ints, limit: int, units: Mapping[int, int] | None = None
) -> Iterator[Domain]:
    """Split a box into domains whose steps have at most *limit* elements.

    Args:
        lo: First indices of the box.
        sizes: Its sizes.
        limit: Maximum elements of a step.
        units: Number of indices, by axis, that the length of a step should be a multiple of.
    """
    axis, inner = len(sizes) - 1, 1
    while axis >= 0 and inner * sizes[axis] <= limit:
        inner *= sizes[axis]
        axis -= 1
    if axis < 0:
        yield Domain(lo, sizes, 0, max(sizes, default=1))
        return
    most = max(1, limit // inner)
    unit = units.get(axis, 1) if units else 1
    unit = unit if unit <= most else 1
    parts = -(-sizes[axis] // (most // unit * unit))
    step = -(-sizes[axis] // (parts * unit)) * unit
    for indices in product(*map(range, sizes[:axis])):
        start = (*map(add, lo[:axis], indices), *lo[axis:])
        yield Domain(start, (1,) * axis + sizes[axis:], axis, step)


class ReadFrom(NamedTuple):
    """A file that blocks read, and the recorded range whose checksum their bytes count toward."""

    file: str
    check: RecordedRange | None = None


Blocks = dict[ReadFrom, list[Block]]
"""Copies into one buffer, by source."""


class StoredBoxes:
    """The boxes of a stored tensor, with the file, position and strides of each."""

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

    def strides(self, number: int) -> Ints:
        """Return the strides of an extent, in elements."""
        stated = self._strides[number] if self._strides else None
        return stated or row_major(self.sizes[number])

    def recorded(self, number: int) -> RecordedRange | None:
        """Return the range with a recorded checksum that contains an extent, or None."""
        extents, name = self._extents, self._name
        if isinstance(extents, ExtentColumns):
            crc = extents.crcs[number] if extents.crcs else NO_CRC
            if crc == NO_CRC:
                return None
            nbytes = extents.lengths[number]
            return RecordedRange(self.files[number], self.starts[number], nbytes, crc, name)
        return recorded_range(extents[number], name)

    def meeting(self, part: Part) -> Iterator[tuple[int, Part]]:
        """Yield the number of each box that a part overlaps, and the elements in that box."""
        if len(self.files) == 1 and self.sizes[0] == self._shape:
            yield 0, part
            return
        axes = _single_axes(part, STORED)
        if (
            axes is not None
            and all(axis.stride == 1 for axis in part.axes)
            and self._shape == tuple(axes[at].size if at in axes else 1 for at in self._dims)
        ):
            yield from self._each(part)
            return
        numbers: Iterable[int] = range(len(self.files))
        if len(self.files) > LINEAR:
            numbers = self._index.near(part.begin, _reach(part, STORED))
        for number in numbers:
            for cut in _inside(part, axes, self.offsets[number], self.sizes[number], STORED):
                yield number, cut

    def _each(self, part: Part) -> Iterator[tuple[int, Part]]:
        """Yield all boxes and their elements, for a part with all elements of the tensor.

        This is a hot path because a plan may have a million boxes. They have few distinct shapes.
        """
        stored, axes, origin, _ = part
        in_order = (
            not any(origin)
            and all(dim == at and step == 1 for _, dim, step, at, _ in axes)
            and len(origin) == len(self._shape)
        )
        by_sizes: dict[Ints, tuple[Axis, ...]] = {}
        for number, (lo, sizes) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            own = by_sizes.get(sizes)
            if own is None:
                cuts = (axis._replace(size=sizes[axis.at]) for axis in axes)
                own = by_sizes[sizes] = tuple(axis for axis in cuts if axis.size > 1)
            if 0 in sizes:
                continue
            first = lo
            if not in_order:
                starts = list(origin)
                for _, dim, step, at, _ in axes:
                    starts[dim] += lo[at] * step
                first = tuple(starts)
            yield number, Part(stored, own, first, lo)

    def ranges(self, part: Part) -> Iterator[tuple[int, int, int]]:
        """Yield ``(box, first element, length)`` of a row-major range of the tensor.

        The elements in a box form one range, even if they consist of several parts.
        """
        found: dict[int, tuple[int, int]] = {}
        for number, cut in self.meeting(part):
            start, count = self.position(number, cut), math.prod(axis.size for axis in cut.axes)
            first, total = found.get(number, (start, 0))
            found[number] = min(first, start), total + count
        return ((number, *range_) for number, range_ in found.items())

    def position(self, number: int, part: Part) -> int:
        """Return the offset of the first element of a part in its box, in elements."""
        first = self.offsets[number]
        if part.begin == first:
            return 0
        return sum(map(mul, map(sub, part.begin, first), self.strides(number)))


_known: dict[int, tuple[StoredBoxes, ref[TensorEntry]]] = {}
"""Boxes by the identity of a tensor's entry, because hashing an entry hashes all its extents."""
KEPT = 1024
"""Number of stored tensors whose boxes are cached."""


def stored_boxes(entry: TensorEntry) -> StoredBoxes:
    """Return the boxes of a stored tensor, cached for the lifetime of the entry."""
    key = id(entry)
    if key not in _known:
        if len(_known) >= KEPT:
            _known.clear()
        _known[key] = StoredBoxes(entry), ref(entry, lambda _: _known.pop(key))
    return _known[key][0]


def recorded_range(extent: Extent, name: str) -> RecordedRange | None:
    """Return the range with a recorded checksum that contains an extent, or None."""
    known = extent.recorded
    if known is None or not known.nbytes:
        return None
    own = extent.crc32 is not None
    return RecordedRange(extent.file, known.offset, known.nbytes, known.crc32, name if own else "")


class _Side(NamedTuple):
    """Positions of a dimension and a step in :class:`Axis`, for one of the tensors of a part."""

    dim: int
    step: int


TENSOR, STORED = _Side(dim=1, step=2), _Side(dim=3, step=4)
_SingleAxes = Mapping[int, Axis] | None


def _single_axes(part: Part, side: _Side) -> _SingleAxes:
    """Return the axis along each dimension, or None if a dimension has several."""
    axes = {axis[side.dim]: axis for axis in part.axes}
    return axes if len(axes) == len(part.axes) else None


def _reach(part: Part, side: _Side) -> Ints:
    """Return the extent of a part in each dimension, in elements."""
    reach = [1] * len(part.origin if side is TENSOR else part.begin)
    for axis in part.axes:
        reach[axis[side.dim]] += (axis.size - 1) * axis[side.step]
    return tuple(reach)


def _inside(part: Part, axes: _SingleAxes, lo: Ints, sizes: Ints, side: _Side) -> Sequence[Part]:
    """Intersect a part, which has *axes*, with a box of one side."""
    if axes is None:
        within = Part.within if side is TENSOR else Part.stored_within
        cuts = [part]
        for dim, first in enumerate(lo):
            cuts = [cut for one in cuts for cut in within(one, dim, first, first + sizes[dim])]
        return cuts
    # Hot path: a plan may have a million boxes.
    of, _, origin, begin = part
    firsts, step_at = origin if side is TENSOR else begin, side.step
    kept, starts, begins = list[Axis](), list(origin), list(begin)
    is_complete = True
    for dim, first in enumerate(lo):
        start = first - firsts[dim]
        stop = start + sizes[dim]
        axis = axes.get(dim)
        if axis is None:
            if not start <= 0 < stop:
                return ()
            continue
        size, step = axis[0], axis[step_at]
        if start <= 0 and (size - 1) * step < stop:
            kept.append(axis)
            continue
        is_complete = False
        index = -(-start // step) if start > 0 else 0
        count = min(size, (stop - 1) // step + 1) - index
        if count <= 0:
            return ()
        _, to, to_step, at, stride = axis
        starts[to] += index * to_step
        begins[at] += index * stride
        if count > 1:
            kept.append(Axis(count, to, to_step, at, stride))
    return (part if is_complete else Part(of, tuple(kept), tuple(starts), tuple(begins)),)


class Located(NamedTuple):
    """Elements of a tensor that are in one stored box.

    Attributes:
        source: The file.
        first: Byte position of the first element in the file.
        steps: Strides of the stored tensor, in elements.
        part: The elements.
    """

    source: ReadFrom
    first: int
    steps: Ints
    part: Part


class BlockReader:
    """Finder of the copies that fill a buffer with elements of a tensor.

    A plan has tens of thousands of readers, so boxes are looked up only when elements are read.

    Attributes:
        tensor: The tensor to read.
        item: Bytes of an element.
        checked: Names of stored tensors whose recorded checksums are verified by reads.
    """

    def __init__(self, tensor: Strided, checked: Collection[str] = ()) -> None:
        self.tensor = tensor
        self.item = tensor.itemsize
        self.checked = checked

    @cached_property
    def _index(self) -> BoxIndex:
        """Index of the parts."""
        parts = self.tensor.parts
        reaches = [_reach(part, TENSOR) for part in parts]
        return BoxIndex([part.origin for part in parts], reaches)

    def __repr__(self) -> str:
        # Plan digests hash this text: changing it breaks `--resume`.
        parts = [(part.of.name, *part[1:]) for part in self.tensor.parts]
        return f"BlockReader({self.tensor.stored_dtype}, {self.tensor.shape}, {parts})"

    @cached_property
    def permuted(self) -> bool:
        """Whether to permute elements of the tensor in memory."""
        shape = self.tensor.shape
        return self.permutes((0,) * len(shape), shape)

    def permutes(self, lo: Ints, shape: Ints) -> bool:
        """Return whether to permute the elements of a box in memory, judged by the first ones."""
        if 0 in shape or self._has_long_rows(shape):
            return False
        domain = next(domains(lo, shape, MIB // self.item))
        box = domain.first(domain.step)
        blocks = self.dense(box.lo, box.sizes)
        number = sum(block.runs for some in blocks.values() for block in some)
        size, whole = math.prod(box.sizes) * self.item, math.prod(shape) * self.item
        return size < SHORT_RUN * number and whole * number > FEW_RUNS * size

    def _has_long_rows(self, shape: Ints) -> bool:
        """Return whether rows of a box of *shape* are clearly long runs in the stored tensors."""
        last = len(shape) - 1
        return all(
            len(part.of.extents) == 1
            and not part.of.extents[0].strides
            and any(
                axis.dim == last
                and axis.step == axis.stride == 1
                and axis.at == len(part.begin) - 1
                and min(axis.size, shape[last]) * self.item >= SHORT_RUN
                for axis in part.axes
            )
            for part in self.tensor.parts
        )

    def dense(self, lo: Ints, sizes: Ints) -> Blocks:
        """Find the copies that fill a row-major buffer with a box of the tensor."""
        found: Blocks = {}
        strides = dense_strides(sizes, self.item)
        for source, block in self.blocks(self.locate(lo, sizes), lo, 0, strides):
            found.setdefault(source, []).append(block)
        return found

    def locate(self, lo: Ints, sizes: Ints) -> Iterator[Located]:
        """Yield the stored elements of a box of the tensor, one item per stored box."""
        parts: Sequence[Part] = self.tensor.parts
        if any(lo) or sizes != self.tensor.shape:
            if len(parts) > LINEAR:
                parts = [parts[number] for number in self._index.near(lo, sizes)]
            pairs = ((part, _single_axes(part, TENSOR)) for part in parts)
            parts = [cut for pair in pairs for cut in _inside(*pair, lo, sizes, TENSOR)]
        for part in parts:
            entry, check = part.of, None
            is_checked = self.checked and entry.name in self.checked
            if len(entry.extents) == 1 and (extent := entry.extents[0]).box.sizes == entry.shape:
                # Common case: nothing to look up.
                steps = extent.strides or row_major(entry.shape)
                first = extent.offset + sum(map(mul, part.begin, steps)) * self.item
                if is_checked:
                    check = recorded_range(extent, entry.name)
                yield Located(ReadFrom(extent.file, check), first, steps, part)
                continue
            stored = stored_boxes(entry)
            for number, cut in stored.meeting(part):
                first = stored.starts[number] + stored.position(number, cut) * self.item
                if is_checked:
                    check = stored.recorded(number)
                source = ReadFrom(stored.files[number], check)
                yield Located(source, first, stored.strides(number), cut)

    def blocks(
        self, located: Iterable[Located], lo: Ints, position: int, strides: Ints
    ) -> Iterator[tuple[ReadFrom, Block]]:
        """Yield the copies that fill a part of a buffer with a box of the tensor.

        Args:
            located: The stored elements of the box.
            lo: The first indices of the box.
            position: Byte position of its first element in the buffer.
            strides: Strides of the buffer, in bytes.

        Yields:
            The source of each copy, and the copy.
        """
        origin, item = position - sum(map(mul, lo, strides)), self.item
        # Hot path: boxes of a checkpoint have few shapes.
        melted: dict[tuple[tuple[Axis, ...], Ints], tuple[Strides, int]] = {}
        for source, first, steps, (_, axes, start, _) in located:
            shape = melted.get((axes, steps))
            if shape is None:
                byte_axes = [
                    (stride * steps[at] * item, step * strides[dim], size)
                    for size, dim, step, at, stride in axes
                ]
                shape = melted[axes, steps] = melted_axes(byte_axes, item)
            yield source, Block(first, origin + sum(map(mul, start, strides)), *shape)

    def clip(self, located: Iterable[Located], lo: Ints, sizes: Ints) -> Iterator[Located]:
        """Yield the *located* elements that are in a box of the tensor."""
        for source, first, steps, part in located:
            for cut in _inside(part, _single_axes(part, TENSOR), lo, sizes, TENSOR):
                further = sum(map(mul, map(sub, cut.begin, part.begin), steps)) * self.item
                yield Located(source, first + further, steps, cut)


def rearranged(root: TreePath, tensor: Strided) -> Computed:
    """Build a virtual file with the elements of a tensor in row-major order.

    Args:
        root: The directory of the files of its stored tensors.
        tensor: The tensor.
    """
    entries = {id(part.of): part.of for part in tensor.parts}
    inputs = tuple(Input(root, entry) for entry in entries.values())
    matrix = BlockReader(tensor.as_matrix())
    return Computed("rearranged", tensor.dtype, tensor.shape, inputs, matrix)


def view(entry: TensorEntry, tensor: Strided, name: str | None = None) -> TensorEntry:
    """Build the entry of a strided tensor whose extents are views of those of *entry*.

    Args:
        entry: A stored tensor.
        tensor: Elements of it, with a uniform stride in every dimension.
        name: Name of the new entry, or None to keep the name.

    Raises:
        ValueError: Strides are not uniform.
    """
    if not is_view(tensor):
        raise ValueError(f"elements of `{entry.name}` are not evenly apart")
    stored = StoredBoxes(entry)
    extents = (
        _extent(entry.extents[number], stored, number, cut, dtypes.itemsize(entry.dtype))
        for part in tensor.parts
        for number, cut in stored.meeting(part)
    )
    found = replace(entry, shape=tensor.shape, extents=tuple(extents))
    return found if name is None else replace(found, name=name, path=(name,))


def is_view(tensor: Strided) -> bool:
    """Return whether each part of a tensor has a uniform stride in every dimension."""
    return all(
        axis.step == 1 and sum(other.dim == axis.dim for other in part.axes) == 1
        for part in tensor.parts
        for axis in part.axes
    )


def transposed(entry: TensorEntry, name: str | None = None) -> TensorEntry:
    """Return *entry* with its last two dimensions swapped."""
    *lead, rows, columns = range(len(entry.shape))
    return view(entry, Strided.whole(entry).permute((*lead, columns, rows)), name)


def _extent(extent: Extent, stored: StoredBoxes, number: int, cut: Part, item: int) -> Extent:
    """Restrict an extent to the elements of a part. The checksum is kept only if all remain."""
    sizes, strides = [1] * len(cut.origin), [0] * len(cut.origin)
    for axis in cut.axes:
        sizes[axis.dim] = axis.size
        strides[axis.dim] = axis.stride * stored.strides(number)[axis.at]
    pairs = list(zip(sizes, strides, row_major(tuple(sizes)), strict=True))
    found = replace(
        extent,
        box=Box(cut.origin, tuple(sizes)),
        strides=None
        if all(size == 1 or step == packed for size, step, packed in pairs)
        else tuple(packed if size == 1 else step for size, step, packed in pairs),
    )
    if found.box.numel == extent.box.numel:
        return found
    return replace(
        found,
        offset=extent.offset + stored.position(number, cut) * item,
        nbytes=(sum((size - 1) * step for size, step, _ in pairs) + 1) * item,
        crc32=None,
        within=None,
    )
