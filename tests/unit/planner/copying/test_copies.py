"""Lowering against the obvious: walk every element of the logical tensor."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.planner.copying import copies, runs
from ckptctl.planner.copying.copies import lower
from ckptctl.planner.copying.tile import Limits, Tile
from ckptctl.planner.plan import Operand, Record, Side, Transfer

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
    sources, targets, records = [], [], []
    used = {}
    for start, sizes in grid(draw, [math.prod(axes[a] for a in g) for g in source_dims]):
        file = draw(st.sampled_from(["a", "b"]))
        order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else None
        strides = row_major(sizes, item)
        if order is not None:
            packed = row_major([sizes[i] for i in order], item)
            strides = tuple(packed[order.index(i)] for i in range(len(sizes)))
        if draw(st.integers(0, 3)) == 0:
            strides = tuple(2 * s for s in strides)
        nbytes = item + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        offset = used.get(file, 0) + draw(st.integers(0, 3)) * item
        used[file] = offset + nbytes
        sources.append(Operand(file, offset, start, sizes, strides, nbytes, 0))
    ends = {}
    for start, sizes in grid(draw, [math.prod(axes[a] for a in g) for g in target_dims]):
        file = draw(st.sampled_from(["x", "y"]))
        strides = row_major(sizes, out)
        if len(sizes) > 1 and draw(st.integers(0, 3)) == 0:
            strides = (strides[0] + 3 * out, *strides[1:])
        nbytes = out + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        begin = ends.get(file, 7)
        offset = begin + draw(st.integers(0, 2)) * out
        ends[file] = offset + nbytes
        records.append(Record("t", file, begin, offset + nbytes - begin))
        targets.append(Operand(file, offset, start, sizes, strides, nbytes, None, len(records) - 1))
    transfer = Transfer(
        "t",
        "s",
        axes,
        Side(source_dims, tuple(sources)),
        Side(target_dims, tuple(targets)),
        DTYPES[item],
        "float32" if out == item == 4 else DTYPES[out],
    )
    return transfer, records, item, out


def element_places(side, axes):
    """Map each element of the logical tensor to its file and byte."""
    places = {}
    for index in itertools.product(*(range(n) for n in axes)):
        flat = []
        for group in side.dims:
            value = 0
            for axis in group:
                value = value * axes[axis] + index[axis]
            flat.append(value)
        for operand in side.operands:
            inside = [f - s for f, s in zip(flat, operand.start, strict=True)]
            if all(0 <= i < n for i, n in zip(inside, operand.sizes, strict=True)):
                at = operand.offset + sum(
                    i * s for i, s in zip(inside, operand.strides, strict=True)
                )
                assert index not in places
                places[index] = (operand.file, at)
    return places


def steps(tiles):
    """Yield each step of each tile as a tile of its own."""
    for tile in tiles:
        assert tile.steps == 1 or not tile.moves
        for step in range(tile.steps):
            reads = [
                read._replace(offset=read.offset + step * read.step, at=read.at + step * read.step)
                for read in tile.reads
            ]
            assert all(r.operand < 0 or r.step in (0, r.nbytes) for r in tile.reads)
            writes = [
                write._replace(
                    offset=write.offset + step * write.nbytes, at=write.at + step * write.nbytes
                )
                for write in tile.writes
            ]
            yield tile._replace(reads=tuple(reads), writes=tuple(writes), steps=1)


def fill(tile: Tile, files, item):
    buffer = bytearray(tile.nbytes)
    for read in tile.reads:
        data = files[read.file][read.offset : read.offset + read.nbytes]
        assert len(data) == read.nbytes
        where = read.pattern.runs if read.pattern else ((0, read.nbytes),)
        for start, nbytes in where:
            buffer[start : start + nbytes], data = data[:nbytes], data[nbytes:]
        assert not data
    for move in tile.moves:
        staged = bytearray(move.staging)
        for offset, nbytes, start in move.reads:
            staged[start : start + nbytes] = files[move.file][offset : offset + nbytes]
        for index in itertools.product(*(range(axis[0]) for axis in move.axes)):
            a = sum(i * axis[1] for i, axis in zip(index, move.axes, strict=True))
            b = move.buffer + sum(i * axis[2] for i, axis in zip(index, move.axes, strict=True))
            assert a + item <= move.staging
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
def test_every_element_arrives(made, sizes, permuted, few_reads):
    transfer, records, item, out = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "FEW_READS", few_reads)
        if permuted:
            patch.setattr(copies, "FEW_RUNS", 0)
            patch.setattr(copies, "SHORT_RUN", 1 << 30)
        check_transfer(transfer, records, item, out, Limits(*sizes))


def check_transfer(transfer, records, item, out, limits):
    source, target = (element_places(s, transfer.axes) for s in (transfer.source, transfer.target))
    length = max((at + item for _, at in source.values()), default=0)
    files = {
        name: bytes((i * 37 + (i >> 8) * 101 + len(name) * salt) % 251 for i in range(length))
        for salt, name in enumerate("ab")
    }
    expected = {
        target[index]: cast(files[file][at : at + item], item, out)
        if transfer.source_dtype != transfer.target_dtype
        else files[file][at : at + item]
        for index, (file, at) in source.items()
    }
    found = {}
    checked = {}
    for tile in steps(lower(transfer, records, limits)):
        assert tile.nbytes <= max(limits[:4], default=0) or tile.nbytes == item
        buffer = fill(tile, files, item)
        if transfer.source_dtype != transfer.target_dtype:
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
            if read.operand >= 0:
                operand = transfer.source.operands[read.operand]
                assert read.offset - read.at == operand.offset
                checked.setdefault(read.operand, []).append((read.at, read.nbytes))
    assert found == expected
    for number, operand in enumerate(transfer.source.operands):
        end = 0
        for at, nbytes in sorted(checked.pop(number)):
            assert at == end
            end += nbytes
        assert end == operand.nbytes


def whole(file, axes, item, record=-1, crc=None):
    size = math.prod(axes) * item
    return Operand(file, 0, (0,) * len(axes), axes, row_major(axes, item), size, crc, record)


def simple(axes, source_dims, target_dims, item=2, crc=None):
    shapes = [
        tuple(math.prod(axes[a] for a in g) for g in dims) for dims in (source_dims, target_dims)
    ]
    return Transfer(
        "t",
        "s",
        axes,
        Side(source_dims, (whole("a", shapes[0], item, crc=crc),)),
        Side(target_dims, (whole("x", shapes[1], item, 0),)),
        DTYPES[item],
        DTYPES[item],
    ), [Record("t", "x", 0, math.prod(axes) * item)]


def test_zero_sized_tensors_have_no_tiles():
    transfer, records = simple((4, 0, 2), ((0,), (1,), (2,)), ((2,), (1,), (0,)))
    assert list(lower(transfer, records, Limits())) == []


def test_a_scalar_is_one_tile():
    transfer, records = simple((), (), ())
    (tile,) = lower(transfer, records, Limits())
    assert (tile.nbytes, len(tile.reads), len(tile.writes)) == (2, 1, 1)


def test_rope_reads_whole_heads_and_scatters_rows():
    axes, hf, meta = (4, 2, 8, 64), ((0, 1, 2), (3,)), ((0, 2, 1), (3,))
    transfer, records = simple(axes, hf, meta, crc=1)
    (series,) = lower(transfer, records, Limits(tile=2048, widest=4096))
    tiles = list(steps([series]))
    assert [len(tile.reads) for tile in tiles] == [1] * 4
    assert all(tile.reads[0].nbytes == 2048 for tile in tiles)
    patterns = {tile.reads[0].pattern for tile in tiles}
    assert len(patterns) == 1, "equal tiles share their pattern"
    assert {nbytes for _, nbytes in patterns.pop().runs} == {128}


def test_transposes_are_permuted_in_memory_and_others_are_not():
    transposed, _ = simple((512, 512), ((0,), (1,)), ((1,), (0,)))
    assert copies.permutes(transposed)
    small, _ = simple((16, 16), ((0,), (1,)), ((1,), (0,)))
    assert not copies.permutes(small)
    rope, _ = simple((32, 2, 64, 4096), ((0, 1, 2), (3,)), ((0, 2, 1), (3,)))
    assert not copies.permutes(rope)


def test_a_column_split_reads_each_row_once():
    axes = (64, 32)
    halves = tuple(
        Operand("x", i * 2048, (0, i * 16), (64, 16), (32, 2), 2048, None, i) for i in range(2)
    )
    transfer = Transfer(
        "t",
        "s",
        axes,
        Side(((0,), (1,)), (whole("a", axes, 2),)),
        Side(((0,), (1,)), halves),
        "bfloat16",
        "bfloat16",
    )
    records = [Record("t", "x", i * 2048, 2048) for i in range(2)]
    (tile,) = lower(transfer, records, Limits(tile=512))  # twice that, as two files share it
    assert (tile.steps, len(tile.reads), len(tile.writes)) == (4, 1, 2)
    tiles = list(lower(transfer, records, Limits(tile=512, flat=2048)))
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
            for tile in lower(transfer, records, Limits(tile=64, widest=128))
        ]

    first = shape()
    runs.spans.cache_clear()
    assert shape() == first


def test_many_boxes_are_found_without_looking_at_all():
    axes = (4096, 8)
    shards = tuple(Operand("a", i * 64, (i * 4, 0), (4, 8), (16, 2), 64) for i in range(1024))
    transfer, records = simple(axes, ((0,), (1,)), ((0,), (1,)))
    transfer = replace(transfer, source=Side(transfer.source.dims, shards))
    assert sum(t.copied for t in lower(transfer, records, Limits())) == 4096 * 16
    index = runs.PartIndex(runs.pieces(transfer.source, ((0,), (1,)), axes))
    assert [p.operand for p in index.meeting((10, 2), (6, 1))] == [2, 3]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1300), st.integers(0, 1300)
)
def test_product_boxes_cover_a_range_once_and_in_order(sizes, a, b):
    total = math.prod(sizes)
    lo, hi = sorted((a % (total + 1), b % (total + 1)))
    found = [
        sum(i * w for i, w in zip(index, row_major(sizes, 1), strict=True))
        for start, count in runs.product_boxes(lo, hi, tuple(sizes))
        for index in itertools.product(
            *(range(s, s + n) for s, n in zip(start, count, strict=True))
        )
    ]
    assert found == list(range(lo, hi))
