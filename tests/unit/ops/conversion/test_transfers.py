"""Which files transfers read, and which bytes of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import (
    Box,
    Computed,
    Extent,
    Input,
    TensorEntry,
    computed_name,
)
from ckptctl.formats.base import Output, Place
from ckptctl.ops.conversion.transfers import sources_of, transfers
from ckptctl.planner.mapping.mapped import MappedTensor, View
from ckptctl.planner.plan import Operand, RawCopy, Record, Side, Transfer


def _entry(file: str) -> TensorEntry:
    extent = Extent(Box.whole((4,)), file, 0, 4)
    return TensorEntry(file, "uint8", (4,), (extent,), (file,))


def _transfer(*files: str) -> Transfer:
    operands = tuple(
        Operand(file, 0, (4 * n,), (4,), (1,), 4, None, -1) for n, file in enumerate(files)
    )
    side = Side(((0,),), operands)
    return Transfer("t", "t", (4 * len(files),), side, side, "uint8", "uint8")


def test_files_are_named_once(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        for number, name in enumerate("abcd", 1):
            (folder / name).write_bytes(bytes(number))
    outer, inner, unread = map(computed_name, ("outer", "inner", "unread"))
    virtual = {
        outer: Computed("added", "uint8", (4,), {"base": Input(str(root), _entry(inner))}),
        inner: Computed(
            "added",
            "uint8",
            (4,),
            {"base": Input(str(root), _entry("c")), "more": Input(str(other), _entry("d"))},
        ),
        unread: Computed("constant", "uint8", (4,)),
    }
    read = [_transfer("b", outer), _transfer(inner, "b")]
    raw = [RawCopy("a", 0, 1, "x", 0)]
    computed, sources = sources_of(str(root), read, virtual, raw)
    assert computed.keys() == {outer, inner}
    assert {name: one.size for name, one in sources.items()} == {"b": 2, "c": 3, "a": 1}


INDICES, PARTS, WIDTH = 3, (4, 2, 2), 5
"""Indices that the parts of a tensor are interleaved along, rows of each part for one, columns."""


def _elements(side: Side, stored: bytes) -> np.ndarray:
    """Return the logical tensor, its axes flattened to the dimensions of *side*."""
    ends = [[a + b for a, b in zip(o.start, o.sizes, strict=True)] for o in side.operands]
    found = np.full(tuple(map(max, zip(*ends, strict=True))), -1, np.int64)
    array = np.frombuffer(stored, np.uint8)
    for operand in side.operands:
        place = tuple(slice(a, a + b) for a, b in zip(operand.start, operand.sizes, strict=True))
        part = np.lib.stride_tricks.as_strided(
            array[operand.offset : operand.offset + operand.nbytes], operand.sizes, operand.strides
        )
        assert (found[place] == -1).all()
        found[place] = part
    assert (found != -1).all()
    return found


def _boxes(cuts: list[int], rows: int) -> list[Box]:
    edges = sorted({0, rows, *cuts})
    return [Box((a, 0), (b - a, WIDTH)) for a, b in pairwise(edges)]


@given(*(st.lists(st.integers(1, sum(PARTS) * INDICES - 1), max_size=5) for _ in "ab"))
def test_parts_of_interleaved_rows_wherever_boxes_are_cut(
    read: list[int], write: list[int]
) -> None:
    step = sum(PARTS)
    rows = step * INDICES
    array = np.arange(rows * WIDTH, dtype=np.uint8)
    extents = tuple(
        Extent(box, "f", box.offsets[0] * WIDTH, box.numel) for box in _boxes(read, rows)
    )
    entry = TensorEntry("t", "uint8", (rows, WIDTH), extents, ("t",))
    records, places = [], []
    for number, box in enumerate(_boxes(write, rows)):
        records.append(Record("u", "g", box.offsets[0] * WIDTH, box.numel))
        places.append(Place(box, number))
    output = Output((), tuple(records), {"u": tuple(places)})
    mapped, first = [], 0
    for part in PARTS:
        view = View("t", ((0,), (1,), (2,)), (0, first, 0), (INDICES, part, WIDTH), (), step)
        into = View("u", view.dims, view.origin, view.sizes, (), step)
        mapped.append(MappedTensor("p", (INDICES, part, WIDTH), (view,), (into,)))
        first += part
    first = 0
    grid = array.reshape(INDICES, step, WIDTH)
    for found, part in zip(
        transfers(mapped, {"t": entry}, output, {"u": "uint8"}), PARTS, strict=True
    ):
        for side in (found.source, found.target):
            assert np.array_equal(_elements(side, array.tobytes()), grid[:, first : first + part])
        first += part
