"""Division of the boxes of a tensor to write into tiles, each of which fits into a buffer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import add, mul, sub
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.planner.copying.blocks import (
    Block,
    BlockPlanner,
    Blocks,
    BlockSource,
    BoxIndex,
    Domain,
    Ints,
    compute_dense_strides,
    get_stored_boxes,
    list_block_runs,
    merge_axes,
    split_into_domains,
)
from ckptctl.planner.copying.tile import Read, Tile, TileLimits, Write, merge_runs, split_into_moves
from ckptctl.planner.plan import Record, RecordedRange, TargetBox, Transfer
from ckptctl.planner.strided import Part

MAX_INLINE_CHECKED_READS = 64
"""Maximum reads per tile for inline checksums. Otherwise, sources are read a second time."""


def tile_transfer(
    transfer: Transfer, records: Sequence[Record], limits: TileLimits, checked: Collection[str] = ()
) -> Iterator[Tile]:
    """Divide *transfer* into tiles.

    Args:
        transfer: The tensor to write.
        records: All records of the output, which contain the boxes of the tensor.
        limits: Maximum sizes of tiles and buffers, in bytes.
        checked: Names of the stored tensors whose recorded checksums are verified.

    Yields:
        The tiles to write, in the order of the target. Then, if source checksums cannot be computed
        inline, tiles that only read the sources again.
    """
    reader = BlockPlanner(transfer.tensor, checked if limits.verifies_checksums else ())
    return tile_targets(reader, transfer.targets, records, limits)


def needs_permutation(transfer: Transfer) -> bool:
    """Return whether *transfer* permutes elements in memory, which requires torch."""
    reader, boxes = BlockPlanner(transfer.tensor), _group_targets_by_box(transfer.targets)
    tiling = _Tiling(reader, boxes, (), TileLimits())
    if all(len(part.entry.extents) == 1 for part in transfer.tensor.parts):
        # Finding a few ranges is faster than comparing the order of elements.
        return bool(boxes) and _find_flat_ranges(reader, boxes) is None and tiling.is_permuted
    return bool(boxes) and tiling.is_permuted and _find_flat_ranges(reader, boxes) is None


def tile_targets(
    reader: BlockPlanner,
    targets: Sequence[TargetBox],
    records: Sequence[Record],
    limits: TileLimits,
) -> Iterator[Tile]:
    """Divide the boxes of a tensor that are written to *targets* into tiles.

    The order of the tiles is deterministic.
    """
    boxes = _group_targets_by_box(targets)
    ranges = _find_flat_ranges(reader, boxes)
    if ranges is None:
        return _Tiling(reader, boxes, records, limits).iterate_tiles()
    return _iterate_range_tiles(ranges, records, limits)


class _TargetPart(NamedTuple):
    """A box of a tensor, complete or clipped, and the targets that contain it."""

    targets: Sequence[TargetBox]
    lo: Ints
    sizes: Ints


def _group_targets_by_box(targets: Sequence[TargetBox]) -> list[_TargetPart]:
    """Group the targets of the same box together, and skip empty boxes."""
    boxes: dict[tuple[Ints, Ints], list[TargetBox]] = {}
    if len(targets) == 1 and 0 not in targets[0].sizes:  # common case
        return [_TargetPart(targets, targets[0].start, targets[0].sizes)]
    for target in targets:
        if 0 not in target.sizes:
            boxes.setdefault((target.start, target.sizes), []).append(target)
    return [_TargetPart(box_targets, *box) for box, box_targets in boxes.items()]


_FlatRange = tuple[TargetBox, BlockSource, Block]
"""A byte range that is copied unchanged, as its target, its source and a block without axes."""


def _find_flat_ranges(
    reader: BlockPlanner, boxes: Sequence[_TargetPart]
) -> list[_FlatRange] | None:
    """Find byte ranges that can be copied unchanged, or return None if any element needs a buffer.

    A cast, a strided copy, or a box with several targets needs a buffer.
    """
    if reader.tensor.dtype != reader.tensor.stored_dtype and boxes:
        return None
    ranges: list[_FlatRange] = []
    for targets, lo, sizes in boxes:
        if len(targets) > 1:
            return None
        (target,) = targets
        located = reader.locate_elements(lo, sizes)
        for source, block in reader.iterate_blocks(located, lo, target.offset, target.strides):
            if block.axes:
                return None
            ranges.append((target, source, block))
    return ranges


def _iterate_range_tiles(
    ranges: Iterable[_FlatRange], records: Sequence[Record], limits: TileLimits
) -> Iterator[Tile]:
    """Yield tiles that copy *ranges* unchanged, in units of at most ``max_unit_bytes``."""
    for target, (file, check), (source, buffer, _, nbytes) in ranges:
        begin = records[target.record].offset
        for done in range(0, nbytes, limits.max_unit_bytes):
            size, offset = min(limits.max_unit_bytes, nbytes - done), buffer + done
            read = Read(file, source + done, size, None, check)
            write = Write(target.file, offset, size, 0, target.record, offset - begin)
            yield Tile(size, (read,), (), (write,), True)


class _Tiling:
    """Division of the boxes of a tensor into tiles that read data once for all targets."""

    def __init__(
        self,
        reader: BlockPlanner,
        boxes: Sequence[_TargetPart],
        records: Sequence[Record],
        limits: TileLimits,
    ) -> None:
        self._reader = reader
        self._tensor = reader.tensor
        self._records = records
        self._limits = limits
        self._source_itemsize, self._target_itemsize = (
            reader.itemsize,
            dtypes.get_itemsize(reader.tensor.dtype),
        )
        self.boxes = boxes

    @cached_property
    def _index(self) -> BoxIndex:
        return BoxIndex([box.lo for box in self.boxes], [box.sizes for box in self.boxes])

    @cached_property
    def _bounds(self) -> tuple[Ints, Ints]:
        """First indices and sizes of the bounding box of all boxes to write."""
        if len(self.boxes) == 1:
            return self.boxes[0][1:]
        lo = tuple(map(min, zip(*(box.lo for box in self.boxes), strict=True)))
        ends = (map(add, box.lo, box.sizes) for box in self.boxes)
        return lo, tuple(map(sub, map(max, zip(*ends, strict=True)), lo))

    @cached_property
    def is_permuted(self) -> bool:
        """Whether tiles permute elements in memory, unless byte ranges can be copied unchanged."""
        return self._reader.should_permute(*self._bounds)

    def iterate_tiles(self) -> Iterator[Tile]:
        """Yield tiles in row-major order, each with the writes for all targets."""
        limits, largest_itemsize = self._limits, max(self._source_itemsize, self._target_itemsize)
        step, units = self._find_common_prefix()
        lo, sizes = self._bounds
        limit = self._choose_tile_size(step)
        if self.is_permuted:
            limit = limits.permuted_tile_bytes // largest_itemsize
        limit = max(1, limit)
        checks_inline = bool(self._reader.checked) and not self.is_permuted
        if checks_inline:
            first_parts = next(
                parts_and_blocks
                for domain in split_into_domains(lo, sizes, limit, units)
                for box in domain.split_into_parts(domain.step)
                if (parts_and_blocks := self._plan_buffer(box))[0]
            )
            checks_inline = (
                len(list(islice(_iterate_reads(first_parts[1]), MAX_INLINE_CHECKED_READS + 1)))
                <= MAX_INLINE_CHECKED_READS
            )
        for domain in split_into_domains(lo, sizes, limit, units):
            size = math.prod(domain.sizes) // domain.length * domain.step * largest_itemsize
            steps = max(1, limits.max_unit_bytes // max(size, 1))
            for part in domain.split_into_parts(domain.step * steps):
                done, step_count = 0, part.length // part.step
                may_merge = step_count > 1 and not self.is_permuted
                if may_merge and self._has_uniform_steps(part.narrow(step_count * part.step)):
                    first_tile, second_tile = (
                        self._build_tile(part.narrow(part.step, begin), checks_inline)
                        for begin in (0, part.step)
                    )
                    if merged_tile := _merge_steps(first_tile, second_tile, step_count):
                        yield merged_tile
                        done = step_count * part.step
                for box in part.split_into_parts(part.step, done):
                    if tile := self._build_tile(box, checks_inline):
                        yield tile
        if not checks_inline and self._reader.checked:
            written_elements = sum(math.prod(box.sizes) for box in self.boxes)
            if written_elements == math.prod(self._tensor.shape):
                yield from self._iterate_check_tiles()

    def _choose_tile_size(self, step: int) -> int:
        """Return the number of elements in a tile, at least *step* unless the size limit is lower.

        If the tensor has several boxes, parts or stored chunks, as for model-parallel output, the
        tile is twice as large. This halves the number of short writes, and the tile still fits into
        the CPU cache.
        """
        limits, tensor = self._limits, self._tensor
        shared = len(self.boxes) > 1 or len(tensor.parts) > 1
        shared = shared or any(len(part.entry.extents) > 1 for part in tensor.parts)
        size = max(
            limits.tile_bytes,
            min(
                max(step * self._source_itemsize, limits.tile_bytes << shared),
                limits.max_tile_bytes,
            ),
        )
        return max(1, size // max(self._source_itemsize, self._target_itemsize))

    def _find_common_prefix(self) -> tuple[int, dict[int, int]]:
        """Find the outermost axes that the tensor and the stored tensor of the largest part share.

        Returns:
            The number of elements in one step along the innermost of these axes, and the number of
            indices in a step by dimension.
        """
        parts = self._tensor.parts
        if not parts:
            return 1, {}
        largest = max(parts, key=lambda part: math.prod(axis.size for axis in part.axes))
        tensor_axes = sorted(largest.axes, key=lambda axis: (axis.dim, -axis.step))
        stored_axes = sorted(largest.axes, key=lambda axis: (axis.at, -axis.stride))
        pairs = enumerate(zip(tensor_axes, stored_axes, strict=True))
        prefix = next((n for n, (a, b) in pairs if a != b), len(tensor_axes))
        step = math.prod(axis.size for axis in tensor_axes[prefix:])
        return step, {axis.dim: axis.step for axis in tensor_axes[:prefix]}

    def _plan_buffer(self, box: Domain) -> tuple[list[_TargetPart], Blocks]:
        """Clip the boxes to write to *box*, and find the blocks that fill a buffer with them."""
        clipped = (
            _intersect_part(self.boxes[n], box)
            for n in self._index.find_overlap_candidates(box.lo, box.sizes)
        )
        parts = [part for part in clipped if part is not None]
        reader, blocks, position = self._reader, Blocks(), 0
        # Search once for all targets.
        located = list(reader.locate_elements(box.lo, box.sizes)) if len(parts) > 1 else ()
        for part in parts:
            lo, sizes = part.lo, part.sizes
            part_elements = (
                reader.clip_elements(located, lo, sizes)
                if located
                else reader.locate_elements(lo, sizes)
            )
            strides = compute_dense_strides(sizes, self._source_itemsize)
            for source, block in reader.iterate_blocks(part_elements, lo, position, strides):
                blocks.setdefault(source, []).append(block)
            position += math.prod(sizes) * self._source_itemsize
        return parts, blocks

    def _build_tile(self, box: Domain, checks_inline: bool) -> Tile | None:
        parts, blocks = self._plan_buffer(box)
        if not parts:
            return None
        nbytes = sum(math.prod(part.sizes) for part in parts) * self._source_itemsize
        writes = tuple(self._iterate_writes(parts))
        if self.is_permuted:
            limit = self._limits.permuted_tile_bytes // 2
            tile_moves = (
                move
                for source, source_blocks in blocks.items()
                for block in source_blocks
                for move in split_into_moves(source.file, block, self._source_itemsize, limit)
            )
            return Tile(nbytes, (), tuple(tile_moves), writes, False)
        reads = _iterate_reads(blocks)
        if not checks_inline:
            reads = (read._replace(check=None) for read in reads)
        return Tile(nbytes, tuple(reads), (), writes, False)

    def _iterate_writes(self, parts: Sequence[_TargetPart]) -> Iterator[Write]:
        """Yield the writes for a buffer that contains *parts* as consecutive row-major arrays."""
        position, last = 0, None
        for part in parts:
            steps = compute_dense_strides(part.sizes, self._target_itemsize)
            for target in part.targets:
                start = sum(map(mul, map(sub, part.lo, target.start), target.strides))
                axes = zip(target.strides, steps, part.sizes, strict=True)
                shape = merge_axes((axis for axis in axes if axis[2] > 1), self._target_itemsize)
                block = Block(target.offset + start, position, *shape)
                begin = self._records[target.record].offset if self._records else 0
                for offset, place, nbytes in list_block_runs(block):
                    write = Write(target.file, offset, nbytes, place, target.record, offset - begin)
                    if (
                        last is not None
                        and (write.file, write.record) == (last.file, last.record)
                        and write.offset == last.offset + last.nbytes
                        and write.start == last.start + last.nbytes
                    ):
                        last = last._replace(nbytes=last.nbytes + nbytes)
                        continue
                    if last is not None:
                        yield last
                    last = write
            position += math.prod(part.sizes) * self._target_itemsize
        if last is not None:
            yield last

    def _has_uniform_steps(self, box: Domain) -> bool:
        """Return whether all steps of *box* copy in the same way, except for file positions."""
        dim = box.axis
        for number in self._index.find_overlap_candidates(box.lo, box.sizes):
            part = _intersect_part(self.boxes[number], box)
            if part is None:
                continue
            if part.sizes[dim] != box.length:
                return False
            if not all(
                _is_periodic(elements.part, dim, box)
                for elements in self._reader.locate_elements(part.lo, part.sizes)
            ):
                return False
        return True

    def _iterate_check_tiles(self) -> Iterator[Tile]:
        """Yield tiles that read each checked stored tensor again, only to verify its checksums."""
        for part in self._tensor.parts:
            if part.entry.name not in self._reader.checked:
                continue
            stored = get_stored_boxes(part.entry)
            for number, first, count in stored.iterate_element_ranges(part):
                if recorded := stored.find_recorded_range(number):
                    offset = stored.starts[number] + first * self._source_itemsize
                    yield from iterate_check_tiles(
                        recorded, offset, count * self._source_itemsize, self._limits
                    )


def _iterate_reads(blocks: Blocks) -> Iterator[Read]:
    """Yield contiguous reads that contain all bytes of *blocks*."""
    for (file, check), source_blocks in blocks.items():
        base = min(block.source for block in source_blocks)
        relative = tuple(block._replace(source=block.source - base) for block in source_blocks)
        for begin, nbytes, pattern in merge_runs(relative):
            yield Read(file, base + begin, nbytes, pattern, check)


def iterate_check_tiles(
    recorded: RecordedRange, offset: int, nbytes: int, limits: TileLimits
) -> Iterator[Tile]:
    """Yield tiles that only read a byte range, for the checksum of the range *recorded*."""
    done = 0
    while done < nbytes:
        size = min(limits.tile_bytes, nbytes - done)
        steps = max(1, min(limits.max_unit_bytes, nbytes - done) // size)
        read = Read(recorded.file, offset + done, size, None, recorded, size)
        yield Tile(size, (read,), (), (), False, steps)
        done += size * steps


def _intersect_part(part: _TargetPart, box: Domain) -> _TargetPart | None:
    """Clip *part* to *box*, or return None if they do not overlap."""
    lo, sizes = list[int](), list[int]()
    for first, size, begin, count in zip(part.lo, part.sizes, box.lo, box.sizes, strict=True):
        start, end = max(first, begin), min(first + size, begin + count)
        if end <= start:
            return None
        lo.append(start)
        sizes.append(end - start)
    return _TargetPart(part.targets, tuple(lo), tuple(sizes))


def _is_periodic(part: Part, dim: int, box: Domain) -> bool:
    """Return whether *part* repeats the same pattern of elements in every step of *box*."""
    dim_axes = sorted((axis for axis in part.axes if axis.dim == dim), key=lambda axis: -axis.step)
    if not dim_axes:
        return False
    outer, *inner = dim_axes
    reach = part.origin[dim] - box.lo[dim] + sum((axis.size - 1) * axis.step for axis in inner)
    fits_steps = outer.size * outer.step == box.length and box.step % outer.step == 0
    return fits_steps and reach < outer.step


def _merge_steps(first: Tile | None, second: Tile | None, steps: int) -> Tile | None:
    """Merge *steps* uniform tiles, given the first two, or return None if these differ.

    Tiles are uniform if they differ only in file positions.
    """
    if first is None or second is None or len(first.reads) != len(second.reads):
        return None
    pairs = list(zip(first.reads, second.reads, strict=True))
    # Boxes that one read covers in one step may need two reads in the next one.
    if any(a._replace(offset=b.offset) != b for a, b in pairs):
        return None
    step_reads = tuple(a._replace(step=b.offset - a.offset) for a, b in pairs)
    writes = tuple(
        write._replace(offset=write.offset + write.nbytes, at=write.at + write.nbytes)
        for write in first.writes
    )
    is_consecutive = all(read.check is None or read.step == read.nbytes for read in step_reads)
    is_consecutive = is_consecutive and writes == second.writes
    return first._replace(reads=step_reads, steps=steps) if is_consecutive else None
