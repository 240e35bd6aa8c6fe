"""Lower strided tensors to copies: into a buffer, and as tiles that write them.

The boxes in which a checkpoint stores tensors come straight from the columns of the catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import add, mul, sub
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Computed, Input, TensorEntry, is_computed, row_major
from ckptctl.columns import ExtentColumns, boxes_of, files_of, ranges_of, vectors_of
from ckptctl.planner.copying import runs
from ckptctl.planner.copying.copies import FEW_RUNS, SHORT_RUN, writes
from ckptctl.planner.copying.domains import domains
from ckptctl.planner.copying.runs import Block, BoxIndex, Ints, OperandPart, PartIndex
from ckptctl.planner.copying.tile import MIB, UNCHECKED, Limits, Move, Read, Tile, Write, moves
from ckptctl.planner.plan import Operand, Record
from ckptctl.planner.strided import Part, Strided

Blocks = dict[str, list[Block]]
"""Copies into one buffer, by the file that they read."""


class StoredBoxes:
    """Where a stored tensor lies: its boxes, and the bytes of each."""

    def __init__(self, entry: TensorEntry) -> None:
        extents = entry.extents
        self.offsets, self.sizes = vectors_of(boxes_of(extents))
        self.files = files_of(extents)
        self.starts = [start for _, start, _ in ranges_of(extents)]
        columns = isinstance(extents, ExtentColumns)
        self._strides = None if columns else [extent.strides for extent in extents]
        self._index = BoxIndex(self.offsets, self.sizes)

    def strides(self, number: int) -> Sequence[int]:
        """Return the elements between neighbors along each dimension of an extent."""
        stated = self._strides[number] if self._strides else None
        return stated or row_major(self.sizes[number])

    def meeting(self, part: Part) -> Iterator[tuple[int, Part]]:
        """Yield the numbers of boxes that a part has elements in, and those elements."""
        reach = [1] * len(part.begin)
        for axis in part.axes:
            reach[axis.at] += (axis.size - 1) * axis.stride
        for number in self._index.near(part.begin, tuple(reach)):
            for cut in _inside(part, Part.stored_within, self.offsets[number], self.sizes[number]):
                yield number, cut

    def position(self, number: int, part: Part) -> int:
        """Return how many elements of a box lie before the first one of a part of it."""
        return sum(map(mul, map(sub, part.begin, self.offsets[number]), self.strides(number)))


Within = Callable[[Part, int, int, int], Sequence[Part]]
"""What of a part lies between two positions along a dimension."""


def _inside(part: Part, within: Within, lo: Ints, sizes: Ints) -> Sequence[Part]:
    """Return what of a part lies inside a box."""
    cuts: Sequence[Part] = (part,)
    for dim, first in enumerate(lo):
        stop = first + sizes[dim]
        if len(cuts) == 1:
            cuts = within(cuts[0], dim, first, stop)
        else:
            cuts = [cut for one in cuts for cut in within(one, dim, first, stop)]
    return cuts


class BlockReader:
    """Finds what fills a buffer with elements of a tensor.

    A plan has tens of thousands of readers, so they look up boxes when elements are read.
    """

    def __init__(self, tensor: Strided) -> None:
        self.tensor = tensor
        self.item = dtypes.itemsize(tensor.stored_dtype)

    @cached_property
    def _stored(self) -> dict[int, StoredBoxes]:
        entries = {id(part.of): part.of for part in self.tensor.parts}
        return {key: StoredBoxes(entry) for key, entry in entries.items()}

    @cached_property
    def _index(self) -> BoxIndex:
        rank, parts = range(len(self.tensor.shape)), self.tensor.parts
        sizes = [tuple(_length(part, dim) for dim in rank) for part in parts]
        return BoxIndex([part.origin for part in parts], sizes)

    def __repr__(self) -> str:
        # Digests of plans are taken of this text: another one ends `--resume`.
        parts = [(part.of.name, *part[1:]) for part in self.tensor.parts]
        return f"BlockReader({self.tensor.stored_dtype}, {self.tensor.shape}, {parts})"

    @cached_property
    def permuted(self) -> bool:
        """Return whether elements are better permuted in memory: mostly, the first ones tell."""
        shape = self.tensor.shape
        if 0 in shape:
            return False
        order = tuple(range(len(shape)))
        domain = next(domains((0,) * len(shape), shape, order, MIB // self.item))
        box = domain.first(domain.step)
        blocks = self.dense(box.lo, box.sizes)
        number = sum(block.runs for some in blocks.values() for block in some)
        size, whole = math.prod(box.sizes) * self.item, math.prod(shape) * self.item
        return size < SHORT_RUN * number and whole * number > FEW_RUNS * size

    def dense(self, lo: Ints, sizes: Ints) -> Blocks:
        """Return the copies that fill a buffer with a box of the tensor, row-major."""
        strides = runs.dense(sizes, range(len(sizes)), self.item)
        found: Blocks = {}
        self.add(found, lo, sizes, 0, strides)
        return found

    def add(self, found: Blocks, lo: Ints, sizes: Ints, position: int, strides: Ints) -> None:
        """Add the copies that fill a part of a buffer with a box of the tensor.

        Args:
            found: The copies.
            lo: The first indices of the box.
            sizes: Its sizes.
            position: Byte position of its first element in the buffer.
            strides: Bytes between neighbors there.
        """
        origin = position - sum(map(mul, lo, strides))
        for number in self._index.near(lo, sizes):
            for part in _inside(self.tensor.parts[number], Part.within, lo, sizes):
                for file, block in self._blocks(part, origin, strides):
                    found.setdefault(file, []).append(block)

    def _blocks(self, part: Part, origin: int, strides: Ints) -> Iterator[tuple[str, Block]]:
        """Yield the copies that fill the places of a part; *origin* is that of index 0."""
        stored, item = self._stored[id(part.of)], self.item
        for number, cut in stored.meeting(part):
            steps = stored.strides(number)
            source = stored.starts[number] + stored.position(number, cut) * item
            axes = (
                (axis.stride * steps[axis.at] * item, axis.step * strides[axis.dim], axis.size)
                for axis in cut.axes
            )
            buffer = origin + sum(map(mul, cut.origin, strides))
            yield stored.files[number], runs.melted(source, buffer, axes, item)


def _length(part: Part, dim: int) -> int:
    """Return how many elements of a dimension a part reaches over."""
    return 1 + sum((axis.size - 1) * axis.step for axis in part.axes if axis.dim == dim)


def rearranged(root: str, tensor: Strided) -> Computed:
    """Make a virtual file of the elements of a tensor, row-major.

    Args:
        root: The directory of the files of its stored tensors.
        tensor: The tensor.
    """
    entries = {id(part.of): part.of for part in tensor.parts}
    inputs = {str(number): Input(root, entry) for number, entry in enumerate(entries.values())}
    matrix = BlockReader(tensor.as_matrix())
    return Computed("rearranged", tensor.dtype, tensor.shape, inputs, matrix)


def reads(blocks: Blocks) -> Iterator[Read]:
    """Yield contiguous reads that together do *blocks*."""
    for file, some in blocks.items():
        base = min(block.source for block in some)
        relative = tuple(block._replace(source=block.source - base) for block in some)
        for begin, nbytes, pattern in runs.spans(relative):
            yield Read(file, base + begin, nbytes, pattern, UNCHECKED, 0)


def element_moves(blocks: Blocks, item: int, limit: int) -> Iterator[Move]:
    """Yield moves of elements, *limit* bytes of a staging area at most, that do *blocks*."""
    for file, some in blocks.items():
        for block in some:
            yield from moves(file, block, item, limit, computed=is_computed(file))


# ------------------------------------------------------------------------------------- tiles


def tiles(
    reader: BlockReader, targets: Sequence[Operand], records: Sequence[Record], limits: Limits
) -> Iterator[Tile]:
    """Yield the tiles that write boxes of a tensor.

    Args:
        reader: Of the tensor.
        targets: The boxes, and where their elements go.
        records: What targets are parts of.
        limits: Sizes of buffers.
    """
    kept = [target for target in targets if 0 not in target.sizes]
    if kept:
        work = _Tiling(reader, kept, records, limits)
        ranges = work.ranges()
        yield from work.tiles() if ranges is None else ranges


class _Tiling(NamedTuple):
    """One call of :func:`tiles`."""

    reader: BlockReader
    targets: Sequence[Operand]
    records: Sequence[Record]
    limits: Limits

    def ranges(self) -> list[Tile] | None:
        """Return a tile for each contiguous range; None: not all elements lie in such."""
        tensor = self.reader.tensor
        if tensor.dtype != tensor.stored_dtype:
            return None
        found: list[Tile] = []
        for target in self.targets:
            blocks: Blocks = {}
            self.reader.add(blocks, target.start, target.sizes, target.offset, target.strides)
            if any(block.axes for some in blocks.values() for block in some):
                return None
            for file, some in blocks.items():
                for block in some:
                    found += self._range(file, block, target)
        return found

    def _range(self, file: str, block: Block, target: Operand) -> Iterator[Tile]:
        at = block.buffer - self.records[target.record].offset
        for done in range(0, block.run, self.limits.flat):
            size = min(self.limits.flat, block.run - done)
            read = Read(file, block.source + done, size, None, UNCHECKED, 0)
            write = Write(target.file, block.buffer + done, size, 0, target.record, at + done)
            yield Tile(size, (read,), (), (write,), True)

    def tiles(self) -> Iterator[Tile]:
        """Yield tiles of consecutive rows of the tensor, which all targets share."""
        tensor, item, limits = self.reader.tensor, self.reader.item, self.limits
        order, out = range(len(tensor.shape)), dtypes.itemsize(tensor.dtype)
        limit = min(limits.tile << (len(self.targets) > 1), limits.widest)
        if permuted := self.reader.permuted:
            limit = limits.arithmetic
        for parts, blocks in self._filled(limit // max(item, out)):
            moved = element_moves(blocks, item, limits.arithmetic // 2) if permuted else ()
            read = () if permuted else reads(blocks)
            written = writes(parts, self.targets, self.records, order, out)
            nbytes = sum(math.prod(part.sizes) for part in parts) * item
            yield Tile(nbytes, tuple(read), tuple(moved), written, False)

    def _filled(self, limit: int) -> Iterator[tuple[list[OperandPart], Blocks]]:
        """Yield parts of targets that fit into a buffer together, and what fills it."""
        found = [
            OperandPart(number, target.offset, target.start, target.sizes, target.strides)
            for number, target in enumerate(self.targets)
        ]
        index, item = PartIndex(found), self.reader.item
        lo = tuple(map(min, zip(*(part.lo for part in found), strict=True)))
        ends = (map(add, part.lo, part.sizes) for part in found)
        sizes = tuple(map(sub, map(max, zip(*ends, strict=True)), lo))
        order = tuple(range(len(lo)))
        for domain in domains(lo, sizes, order, max(1, limit)):
            for box in domain.cut(domain.step):
                parts, blocks, position = index.meeting(box.lo, box.sizes), Blocks(), 0
                for part in parts:
                    strides = runs.dense(part.sizes, order, item)
                    self.reader.add(blocks, part.lo, part.sizes, position, strides)
                    position += math.prod(part.sizes) * item
                if parts:
                    yield parts, blocks
