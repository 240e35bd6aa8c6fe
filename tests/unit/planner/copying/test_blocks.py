"""Strided tensors as copies of bytes, against numpy on the bytes themselves."""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref

import numpy as np
import pytest

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.columns import BoxColumns, ExtentColumns
from ckptctl.planner.copying import blocks
from ckptctl.planner.copying.blocks import (
    Block,
    BlockPlanner,
    BlockSource,
    compute_dense_strides,
    get_stored_boxes,
    list_block_runs,
)
from ckptctl.planner.copying.copies import tile_targets
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.planner.plan import Record, TargetBox
from ckptctl.planner.strided import Part, StridedTensor, stack
from tests.sweeps import one_in
from tests.unit.planner.copying.test_copies import cast, fill, steps
from tests.unit.planner.test_strided import Arrays, _step

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
Files = dict[str, bytearray]


# ---------------------------------------------------------------------------- by example


def rows(name: str, count: int, width: int, boxes: int) -> TensorEntry:
    """Return a matrix of bytes in ranges of rows, each in a file of its own."""
    each = count // boxes
    found = tuple(
        Extent(Box((n * each, 0), (each, width)), f"{name}{n}", 0, each * width)
        for n in range(boxes)
    )
    return TensorEntry(name, "uint8", (count, width), found, (name,))


def test_stored_boxes_are_cached_until_tensor_is_freed():
    entry = rows("a", 4096, 8, 1024)
    boxes = get_stored_boxes(entry)
    assert get_stored_boxes(entry) is boxes
    gone = weakref.ref(boxes)
    del entry, boxes
    gc.collect()
    assert gone() is None


def test_dense_rows_are_one_run() -> None:
    reader = BlockPlanner(StridedTensor.from_entry(rows("a", 4096, 8, 1024)))
    assert reader.find_dense_copies((10, 0), (4, 8)) == {
        BlockSource("a2"): [Block(16, 0, (), 16)],
        BlockSource("a3"): [Block(0, 16, (), 16)],
    }


def test_rotary_order_is_a_strided_copy() -> None:
    turned = StridedTensor.from_entry(rows("a", 24, 8, 1)).split(0, (4, 2, 3)).permute((0, 2, 1, 3))
    reader = BlockPlanner(turned.merge(0, 3))
    assert reader.find_dense_copies((6, 0), (6, 8)) == {
        BlockSource("a0"): [Block(48, 0, ((2, 24, 8), (3, 8, 16)), 8)]
    }


def test_distant_parts_are_not_visited(monkeypatch) -> None:
    experts = stack([StridedTensor.from_entry(rows(f"e{n}", 4, 8, 1)) for n in range(64)])
    asked = []
    inside = blocks._intersect_part_with_box

    def noted(part: Part, *box):
        asked.append(part.entry.name)
        return inside(part, *box)

    monkeypatch.setattr(blocks, "_intersect_part_with_box", noted)
    assert list(BlockPlanner(experts).find_dense_copies((7, 0, 0), (1, 4, 8))) == [
        BlockSource("e70")
    ]
    assert set(asked) == {"e7"}


def test_contiguous_tensor_is_written_in_ranges() -> None:
    entry = rows("a", 64, 8, 4)
    target = TargetBox("x", 100, (0, 0), (64, 8), (8, 1), record=0)
    found = list(
        tile_targets(
            BlockPlanner(StridedTensor.from_entry(entry)),
            [target],
            [Record("t", "x", 100, 512)],
            TileLimits(),
        )
    )
    assert [tile.is_flat for tile in found] == [True] * 4
    assert [(w.offset, w.nbytes, w.at) for tile in found for w in tile.writes] == [
        (100 + 128 * n, 128, 128 * n) for n in range(4)
    ]


def test_transpose_is_moved_in_memory() -> None:
    turned = StridedTensor.from_entry(rows("a", 64, 64, 1)).permute((1, 0))
    target = TargetBox("x", 0, (0, 0), (64, 64), (64, 1), record=0)
    (tile,) = tile_targets(
        BlockPlanner(turned), [target], [Record("t", "x", 0, 4096)], TileLimits()
    )
    assert tile.moves and not tile.reads


# ---------------------------------------------------------------------------- random programs


def boxes_of(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Cut a shape into boxes: halves of halves, along any dimension."""
    found = [Box.whole(shape)]
    for _ in range(rng.choice((0, 0, 1, 3, 12))):
        box = found.pop(rng.randrange(len(found)))
        wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not wide:
            found.append(box)
            continue
        dim = rng.choice(wide)
        cut = rng.randint(1, box.sizes[dim] - 1)
        for first, size in ((0, cut), (cut, box.sizes[dim] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += first
            sizes[dim] = size
            found.append(Box(tuple(offsets), tuple(sizes)))
    rng.shuffle(found)
    return found


def strides_of(rng: random.Random, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of a box, in elements: dense in any order, or with gaps."""
    order = rng.sample(range(len(sizes)), len(sizes)) if rng.random() < 0.4 else range(len(sizes))
    steps = compute_dense_strides(tuple(sizes[axis] for axis in order), rng.choice((1, 1, 1, 2)))
    return tuple(steps[order.index(axis)] for axis in range(len(sizes)))


def reach(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((size - 1) * step for size, step in zip(sizes, strides, strict=True)) + 1


def positions(box: Box, strides: tuple[int, ...]) -> np.ndarray:
    """Return how far each element of a box lies from its first, in elements."""
    found = np.zeros(box.sizes, int)
    for dim, index in enumerate(np.indices(box.sizes)):
        found += index * strides[dim]
    return found


def store(rng: random.Random, files: Files, array: np.ndarray, name: str, item: int):
    """Write an array into files, box by box; return where it lies."""
    extents = []
    in_order = rng.random() < 0.5
    for box in boxes_of(rng, array.shape) if array.size else []:
        strides = compute_dense_strides(box.sizes, 1) if in_order else strides_of(rng, box.sizes)
        data = files.setdefault(rng.choice("ab"), bytearray())
        offset = len(data) + rng.randint(0, 3)
        nbytes = reach(box.sizes, strides) * item
        data.extend(bytes(offset + nbytes - len(data)))
        part = array[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        for value, at in zip(part.flat, positions(box, strides).flat, strict=True):
            start = offset + int(at) * item
            data[start : start + item] = int(value).to_bytes(8, "little")[:item]
        file = next(name for name, content in files.items() if content is data)
        extents.append(Extent(box, file, offset, nbytes, strides=None if in_order else strides))
    found: ExtentColumns | tuple[Extent, ...] = tuple(extents)
    if in_order and extents:
        columns = BoxColumns([e.box.offsets for e in extents], [e.box.sizes for e in extents])
        starts, lengths = [e.offset for e in extents], [e.nbytes for e in extents]
        found = ExtentColumns(columns, [e.file for e in extents], starts, lengths, "raw")
    return TensorEntry(name, DTYPES[item], array.shape, found, (name,))


def program(seed: int):
    """Return a random tensor, its elements, and the files that it is read from."""
    rng, arrays = random.Random(seed), Arrays()
    item = rng.choice(list(DTYPES))
    shape = tuple(rng.choice((1, 2, 3, 4, 6, 12)) for _ in range(rng.randint(0, 3)))
    name = "stored0"
    arrays[name] = array = np.arange(1, math.prod(shape) + 1).reshape(shape)
    tensor = StridedTensor.from_entry(TensorEntry(name, "float32", shape, (), (name,)))
    for _ in range(rng.randint(0, 5)):
        tensor, array = _step(rng, arrays, tensor, array)
    files: Files = {"//zeros": bytearray(1 << 16)}
    entries = {one: store(rng, files, held, one, item) for one, held in arrays.items()}
    parts = tuple(
        Part(entries.get(part.entry.name, part.entry), *part[1:]) for part in tensor.parts
    )
    dtype = DTYPES[item]
    tensor = StridedTensor(tensor.shape, dtype, dtype, tuple(map(_zeros(item), parts)))
    return rng, tensor, array, files, item


def _zeros(item: int):
    """Give virtual files the dtype of the others."""

    def changed(part: Part) -> Part:
        if part.entry.name != "//zeros":
            return part
        zeros = StridedTensor.from_virtual_file(DTYPES[item], part.entry.shape, "//zeros")
        return Part(zeros.parts[0].entry, *part[1:])

    return changed


def raw(array: np.ndarray, item: int) -> bytes:
    """Return the low bytes of numbers, row-major."""
    return array.astype("<i8").reshape(-1, 1).view("u1")[:, :item].tobytes()


def check_boxes(seed: int) -> None:
    rng, tensor, array, files, item = program(seed)
    reader = BlockPlanner(tensor)
    for _ in range(3):
        lo = tuple(rng.randint(0, size) for size in array.shape)
        sizes = tuple(rng.randint(0, n - o) for n, o in zip(array.shape, lo, strict=True))
        wanted = raw(array[tuple(slice(o, o + s) for o, s in zip(lo, sizes, strict=True))], item)
        buffer, filled = bytearray(len(wanted)), 0
        for (file, _), some in reader.find_dense_copies(lo, sizes).items():
            for source, start, nbytes in itertools.chain.from_iterable(map(list_block_runs, some)):
                buffer[start : start + nbytes] = files[file][source : source + nbytes]
                filled += nbytes
        assert filled == len(wanted)
        assert buffer == wanted, seed


def check_tiles(seed):
    rng, tensor, array, files, item = program(seed)
    out = rng.choice((item, item, *DTYPES))
    tensor = tensor.cast(DTYPES[out])
    written, expected, records, targets = Files(), Files(), list[Record](), list[TargetBox]()
    for box in boxes_of(rng, array.shape) if array.size else []:
        file = rng.choice("xy")
        data = expected.setdefault(file, bytearray())
        offset, strides = len(data) + rng.randint(0, 3), strides_of(rng, box.sizes)
        nbytes = reach(box.sizes, strides) * out
        data.extend(bytes(offset + nbytes - len(data)))
        part = array[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        for value, at in zip(part.flat, positions(box, strides).flat, strict=True):
            element = raw(np.array(value), item)
            start = offset + int(at) * out
            data[start : start + out] = cast(element, item, out) if out != item else element
        nearby = tuple(step * out for step in strides)
        targets.append(TargetBox(file, offset, box.offsets, box.sizes, nearby, len(records)))
        records.append(Record("t", file, offset, nbytes))
    written = {file: bytearray(len(data)) for file, data in expected.items()}
    limits = TileLimits(*(rng.choice((16, 64, 208, 4096)) for _ in range(4)))
    done = 0
    for tile in steps(tile_targets(BlockPlanner(tensor), targets, records, limits)):
        buffer = fill(tile, files, item)
        if out != item:
            buffer = cast(buffer, item, out)
        for write in tile.writes:
            record = records[write.record]
            assert (record.file, record.offset + write.at) == (write.file, write.offset)
            content = buffer[write.start : write.start + write.nbytes]
            written[write.file][write.offset : write.offset + write.nbytes] = content
            done += write.nbytes
    assert done == array.size * out
    assert written == expected, seed


@pytest.mark.parametrize("block", one_in(3, range(4)))
def test_random_boxes_match_numpy(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        check_boxes(seed)


@pytest.mark.slow
@pytest.mark.parametrize("permuted", [False, True])
def test_random_tiles_match_numpy(permuted, monkeypatch):
    if permuted:
        monkeypatch.setattr(blocks, "FEW_RUNS_LIMIT", 0)
        monkeypatch.setattr(blocks, "SHORT_RUN_BYTES", 1 << 30)
    for seed in range(permuted * 500, permuted * 500 + 500):
        check_tiles(seed)


@pytest.mark.parametrize("seed", [29_081, 31_450])
def test_steps_with_different_reads_match_numpy(seed):
    check_tiles(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_many_random_boxes_and_tiles_match_numpy(block):
    for seed in range((block + 1) * 5_000, (block + 2) * 5_000):
        check_boxes(seed)
        check_tiles(seed)
