"""Lowering against the obvious: walk every element of the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.formats.deepspeed.partitions import split_into_boxes
from ckptctl.planner.copying import blocks, copies
from ckptctl.planner.copying.copies import tile_transfer
from ckptctl.planner.copying.tile import Tile, TileLimits, merge_runs
from ckptctl.planner.plan import Record, RecordedRange, TargetBox, Transfer
from ckptctl.planner.strided import StridedTensor
from tests.transfers import regrouped, stored, target

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}


def row_major(sizes, item):
    strides = []
    for size in reversed(sizes):
        strides.append(item)
        item *= size
    return tuple(reversed(strides))


def cuts(draw, size):
    inner = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=2, unique=True))
    edges = sorted({0, size, *(cut for cut in inner if cut < size)})
    return list(itertools.pairwise(edges))


def grid(draw, dims):
    """Cut every dimension and return all boxes."""
    spans = [cuts(draw, size) for size in dims]
    boxes = [tuple(zip(*box, strict=True)) for box in itertools.product(*spans)]
    return (
        [((a, tuple(e - s for s, e in zip(a, b, strict=True)))) for a, b in boxes if boxes]
        if (dims)
        else [((), ())]
    )


def grouping(draw, axes):
    order = draw(st.permutations(range(axes)))
    groups, rest = [], list(order)
    while rest:
        count = draw(st.integers(1, len(rest)))
        groups.append(tuple(rest[:count]))
        rest = rest[count:]
    if draw(st.booleans()):
        groups.insert(draw(st.integers(0, len(groups))), ())
    return tuple(groups)


@st.composite
def transfers(draw):
    axes = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    item = draw(st.sampled_from(sorted(DTYPES)))
    out = draw(st.sampled_from([item, item, *DTYPES]))
    source_dims = grouping(draw, len(axes))
    target_dims = source_dims if draw(st.booleans()) else grouping(draw, len(axes))
    extents, targets, records = [], [], []
    in_order, used = draw(st.booleans()), {}
    for start, sizes in grid(draw, [math.prod(axes[a] for a in g) for g in source_dims]):
        file = draw(st.sampled_from(["a", "b"]))
        order = draw(st.permutations(range(len(sizes))))
        strides = row_major(sizes, 1)
        if not in_order:
            packed = row_major([sizes[i] for i in order], draw(st.sampled_from([1, 1, 2])))
            strides = tuple(packed[order.index(i)] for i in range(len(sizes)))
        nbytes = item * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))
        offset = used.get(file, 0) + draw(st.integers(0, 3)) * item
        used[file] = offset + nbytes
        extents.append(Extent(Box(start, sizes), file, offset, nbytes, "raw", strides, 0))
    shape = tuple(math.prod(axes[a] for a in g) for g in source_dims)
    entry = TensorEntry("s", DTYPES[item], shape, tuple(extents), ("s",))
    ends = {}
    for start, sizes in grid(draw, [math.prod(axes[a] for a in g) for g in target_dims]):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            file = draw(st.sampled_from(["x", "y"]))
            strides = row_major(sizes, out)
            if len(sizes) > 1 and draw(st.integers(0, 3)) == 0:
                strides = (strides[0] + 3 * out, *strides[1:])
            nbytes = out + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
            begin = ends.get(file, 7)
            offset = begin + draw(st.integers(0, 2)) * out
            ends[file] = offset + nbytes
            records.append(Record("t", file, begin, offset + nbytes - begin))
            targets.append(TargetBox(file, offset, start, sizes, strides, len(records) - 1))
    tensor = regrouped(StridedTensor.from_entry(entry), axes, source_dims, target_dims)
    tensor = tensor.cast("float32" if out == item == 4 else DTYPES[out])
    transfer = Transfer("t", tensor, tuple(targets))
    return transfer, records, (axes, source_dims, target_dims), in_order


def element_places(dims, boxes, axes):
    """Map each element of the logical tensor to its places: file and byte.

    Args:
        dims: For each stored dimension the axes grouped in it.
        boxes: ``(start, sizes, strides in bytes, file, offset)``.
        axes: Sizes of axes.
    """
    places = {}
    for index in itertools.product(*(range(n) for n in axes)):
        flat = []
        for group in dims:
            value = 0
            for axis in group:
                value = value * axes[axis] + index[axis]
            flat.append(value)
        for start, sizes, strides, file, offset in boxes:
            inside = [f - s for f, s in zip(flat, start, strict=True)]
            if all(0 <= i < n for i, n in zip(inside, sizes, strict=True)):
                at = offset + sum(i * s for i, s in zip(inside, strides, strict=True))
                places.setdefault(index, []).append((file, at))
    return places


def steps(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Yield each step of each tile as a tile of its own."""
    for tile in tiles:
        assert tile.steps == 1 or not tile.moves
        for step in range(tile.steps):
            reads = [read._replace(offset=read.offset + step * read.step) for read in tile.reads]
            assert all(r.check is None or r.step in (0, r.nbytes) for r in tile.reads)
            writes = [
                write._replace(
                    offset=write.offset + step * write.nbytes, at=write.at + step * write.nbytes
                )
                for write in tile.writes
            ]
            yield tile._replace(reads=tuple(reads), writes=tuple(writes), steps=1)


def fill(tile: Tile, files: Mapping[str, Sequence[int]], item: int) -> bytes:
    buffer = bytearray(tile.nbytes)
    for read in tile.reads:
        data = files[read.file][read.offset : read.offset + read.nbytes]
        assert len(data) == read.nbytes
        where = read.pattern.runs if read.pattern else ((0, read.nbytes),)
        for start, nbytes in where:
            buffer[start : start + nbytes], data = data[:nbytes], data[nbytes:]
        assert not data
    for move in tile.moves:
        staged = bytearray(move.staging_nbytes)
        for offset, nbytes, start in move.iterate_reads():
            staged[start : start + nbytes] = files[move.file][offset : offset + nbytes]
        for index in itertools.product(*(range(axis[0]) for axis in move.axes)):
            a = sum(i * axis[1] for i, axis in zip(index, move.axes, strict=True))
            b = move.buffer + sum(i * axis[2] for i, axis in zip(index, move.axes, strict=True))
            assert a + item <= move.staging_nbytes
            buffer[b : b + item] = staged[a : a + item]
    return bytes(buffer)


def cast(data, item, out):
    """Stand in for a cast: keep the low bytes, pad with a mark."""
    elements = [data[i : i + item] for i in range(0, len(data), item)]
    return b"".join((e + b"\xee" * 16)[:out] for e in elements)


@settings(max_examples=150)
@given(
    made=transfers(),
    sizes=st.tuples(*(st.sampled_from([16, 64, 208, 4096]) for _ in range(4))),
    permuted=st.booleans(),
    few_reads=st.sampled_from([1, 64]),
)
def test_every_element_is_copied(made, sizes, permuted, few_reads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "MAX_INLINE_CHECKED_READS", few_reads)
        if permuted:
            patch.setattr(blocks, "FEW_RUNS_LIMIT", 0)
            patch.setattr(blocks, "SHORT_RUN_BYTES", 1 << 30)
        check_transfer(*made, TileLimits(*sizes))


def check_transfer(transfer, records, how, in_order, limits):
    axes, source_dims, target_dims = how
    (entry,) = {id(one): one for one in transfer.iterate_stored_tensors()}.values()
    tensor, extents = transfer.tensor, entry.extents
    item, out = (dtypes.get_itemsize(one) for one in (tensor.stored_dtype, tensor.dtype))
    sources = [
        (e.box.offsets, e.box.sizes, tuple(s * item for s in e.strides), e.file, e.offset)
        for e in extents
    ]
    targets = [(t.start, t.sizes, t.strides, t.file, t.offset) for t in transfer.targets]
    source = element_places(source_dims, sources, axes)
    target = element_places(target_dims, targets, axes)
    length = max((at + item for ((_, at),) in source.values()), default=0)
    files = {
        name: bytes((i * 37 + (i >> 8) * 101 + len(name) * salt) % 251 for i in range(length))
        for salt, name in enumerate("ab")
    }
    expected = {
        place: cast(files[file][at : at + item], item, out)
        if transfer.is_cast
        else files[file][at : at + item]
        for index, ((file, at),) in source.items()
        for place in target[index]
    }
    found = {}
    checked = {}
    copied = 0
    for tile in steps(tile_transfer(transfer, records, limits, {"s"} if in_order else ())):
        assert tile.nbytes <= max(limits[:4], default=0) or tile.nbytes == item
        buffer = fill(tile, files, item)
        copied += tile.nbytes if tile.writes else 0
        if transfer.is_cast:
            buffer = cast(buffer, item, out)
        for write in tile.writes:
            record = records[write.record]
            assert record.file == write.file and write.offset - write.at == record.offset
            data = buffer[write.start : write.start + write.nbytes]
            assert len(data) == write.nbytes and write.nbytes % out == 0
            for i in range(0, len(data), out):
                assert (write.file, write.offset + i) not in found
                found[write.file, write.offset + i] = data[i : i + out]
        for read in tile.reads:
            if read.check is not None:
                begin = read.offset - read.check.offset
                checked.setdefault(read.check, []).append((begin, read.nbytes))
    assert found == expected
    assert copied == transfer.nbytes
    for extent in extents if in_order else ():
        end = 0
        recorded = RecordedRange(extent.file, extent.offset, extent.nbytes, 0, "s")
        for at, nbytes in sorted(checked.pop(recorded)):
            assert at == end
            end += nbytes
        assert end == extent.nbytes
    assert not checked


def simple(axes, source_dims, target_dims, item=2, crc=None):
    shapes = [
        tuple(math.prod(axes[a] for a in g) for g in dims) for dims in (source_dims, target_dims)
    ]
    entry = stored("a", shapes[0], dtype=DTYPES[item], crc32=crc)
    tensor = regrouped(StridedTensor.from_entry(entry), axes, source_dims, target_dims)
    box = target("x", 0, shapes[1], 0, item=item)
    return Transfer("t", tensor, (box,)), [Record("t", "x", 0, math.prod(axes) * item)]


def test_empty_tensor_has_no_tiles():
    transfer, records = simple((4, 0, 2), ((0,), (1,), (2,)), ((2,), (1,), (0,)))
    assert list(tile_transfer(transfer, records, TileLimits())) == []


def test_scalar_is_one_tile():
    transfer, records = simple((), (), ())
    (tile,) = tile_transfer(transfer, records, TileLimits())
    assert (tile.nbytes, len(tile.reads), len(tile.writes)) == (2, 1, 1)


def test_rope_reads_complete_heads_and_scatters_rows():
    axes, hf, meta = (4, 2, 8, 64), ((0, 1, 2), (3,)), ((0, 2, 1), (3,))
    transfer, records = simple(axes, hf, meta, crc=1)
    (series,) = tile_transfer(
        transfer, records, TileLimits(tile_bytes=2048, max_tile_bytes=4096), {"a"}
    )
    tiles = list(steps([series]))
    assert [len(tile.reads) for tile in tiles] == [1] * 4
    assert all(tile.reads[0].nbytes == 2048 for tile in tiles)
    patterns = {tile.reads[0].pattern for tile in tiles}
    assert len(patterns) == 1, "equal tiles share their pattern"
    assert {nbytes for _, nbytes in patterns.pop().runs} == {128}


def test_only_large_transposes_are_permuted_in_memory():
    transposed, _ = simple((512, 512), ((0,), (1,)), ((1,), (0,)))
    assert copies.needs_permutation(transposed)
    small, _ = simple((16, 16), ((0,), (1,)), ((1,), (0,)))
    assert not copies.needs_permutation(small)
    rope, _ = simple((32, 2, 64, 4096), ((0, 1, 2), (3,)), ((0, 2, 1), (3,)))
    assert not copies.needs_permutation(rope)


def test_column_split_reads_each_row_once():
    axes = (64, 32)
    halves = tuple(target("x", i * 2048, (64, 16), i, item=2, start=(0, i * 16)) for i in range(2))
    entry = stored("a", axes, dtype="bfloat16")
    transfer = Transfer("t", StridedTensor.from_entry(entry), halves)
    records = [Record("t", "x", i * 2048, 2048) for i in range(2)]
    (tile,) = tile_transfer(
        transfer, records, TileLimits(tile_bytes=512)
    )  # twice that, as two files share it
    assert (tile.steps, len(tile.reads), len(tile.writes)) == (4, 1, 2)
    tiles = list(tile_transfer(transfer, records, TileLimits(tile_bytes=512, max_unit_bytes=2048)))
    assert [tile.steps for tile in tiles] == [2, 2]


def test_lowering_is_deterministic():
    transfer, records = simple((3, 5, 7, 4), ((0, 1, 2), (3,)), ((0, 2, 1), (3,)), crc=5)

    def shape():
        return [
            tile._replace(
                reads=tuple(
                    read._replace(pattern=read.pattern and read.pattern.runs) for read in tile.reads
                )
            )
            for tile in tile_transfer(
                transfer, records, TileLimits(tile_bytes=64, max_tile_bytes=128)
            )
        ]

    first = shape()
    merge_runs.cache_clear()
    assert shape() == first


def test_boxes_repeated_on_ranks_are_read_once():
    entry = stored("a", (64, 16))
    boxes = tuple(target("xyz"[i], 0, (64, 16), i) for i in range(3))
    records = [Record("t", "xyz"[i], 0, 1024) for i in range(3)]
    (tile,) = tile_transfer(
        Transfer("t", StridedTensor.from_entry(entry), boxes), records, TileLimits()
    )
    assert [(read.offset, read.nbytes) for read in tile.reads] == [(0, 1024)]
    assert [(write.file, write.start) for write in tile.writes] == [("x", 0), ("y", 0), ("z", 0)]


def test_unchecked_tensors_have_no_checksum_reads():
    transfer, records = simple((64, 64), ((0,), (1,)), ((0,), (1,)), crc=5)
    for checked, limits in ((("b",), TileLimits()), (("a",), TileLimits(verifies_checksums=False))):
        tiles = tile_transfer(transfer, records, limits, checked)
        assert [read.check for tile in tiles for read in tile.reads] == [None]


def test_single_box_among_many_is_located(monkeypatch):
    shards = tuple(Extent(Box((i * 4, 0), (4, 8)), "a", i * 64, 64) for i in range(1024))
    entry = TensorEntry("s", "bfloat16", (4096, 8), shards, ("s",))
    records, box = [Record("t", "x", 0, 4096 * 16)], target("x", 0, (4096, 8), 0, item=2)
    transfer = Transfer("t", StridedTensor.from_entry(entry), (box,))
    assert sum(t.copied_nbytes for t in tile_transfer(transfer, records, TileLimits())) == 4096 * 16
    found = blocks.BlockPlanner(transfer.tensor).locate_elements((10, 2), (6, 1))
    assert [elements.byte_offset for elements in found] == [2 * 64 + 36, 3 * 64 + 4]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1300), st.integers(0, 1300)
)
def test_product_boxes_cover_range_once_in_order(sizes, a, b):
    total = math.prod(sizes)
    lo, hi = sorted((a % (total + 1), b % (total + 1)))
    found = [
        sum(i * w for i, w in zip(index, row_major(sizes, 1), strict=True))
        for start, count in split_into_boxes(lo, hi, tuple(sizes))
        for index in itertools.product(
            *(range(s, s + n) for s, n in zip(start, count, strict=True))
        )
    ]
    assert found == list(range(lo, hi))


def test_tensor_stored_transposed_is_permuted_in_memory():
    entry = stored("a", [1024, 512], strides=[1, 1024])
    box = target("x", 0, (1024, 512), 0)
    assert copies.needs_permutation(Transfer("t", StridedTensor.from_entry(entry), (box,)))
