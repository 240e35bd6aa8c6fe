"""Which files transfers read, and which bytes of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import (
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Extent,
    TensorEntry,
    build_computed_name,
)
from ckptctl.conversion.transfers import identify_read_files, plan_transfers
from ckptctl.formats.base import OutputLayout, TensorPlace
from ckptctl.planner.copying.copies import tile_transfer
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.planner.mapping.logical import build_placeholder
from ckptctl.planner.mapping.mapped import MappedTensor, SourceTensor, TargetTensor, compose_tensors
from ckptctl.planner.plan import RawCopy, Record, Transfer
from ckptctl.planner.strided import StridedTensor, concat
from tests.transfers import stored, target
from tests.unit.planner.copying.test_copies import fill, steps


def _transfer(*files: str) -> Transfer:
    tensors = [StridedTensor.from_entry(stored(file, [4])) for file in files]
    return Transfer("t", concat(tensors, 0), (target("x", 0, [4 * len(files)]),))


def test_source_files_are_listed_once(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        for number, name in enumerate("abcd", 1):
            (folder / name).write_bytes(bytes(number))
    outer, inner, unread = map(build_computed_name, ("outer", "inner", "unread"))
    virtual = {
        outer: ComputedTensor("added", "uint8", (4,), (ComputeInput(root, stored(inner, [4])),)),
        inner: ComputedTensor(
            "added",
            "uint8",
            (4,),
            (ComputeInput(root, stored("c", [4])), ComputeInput(other, stored("d", [4]))),
        ),
        unread: ComputedTensor("constant", "uint8", (4,)),
    }
    read = [_transfer("b", outer), _transfer(inner, "b")]
    raw = [RawCopy("a", 0, 1, "x", 0)]
    computed, sources = identify_read_files(root, read, virtual, raw)
    assert computed.keys() == {outer, inner}
    assert {name: one.size for name, one in sources.items()} == {"b": 2, "c": 3, "a": 1}


INDICES, PARTS, WIDTH = 3, (4, 2, 2), 5
"""Indices that the parts of a tensor are interleaved along, rows of each part for one, columns."""


def _boxes(cuts: list[int], rows: int) -> list[Box]:
    edges = sorted({0, rows, *cuts})
    return [Box((a, 0), (b - a, WIDTH)) for a, b in pairwise(edges)]


@given(*(st.lists(st.integers(1, sum(PARTS) * INDICES - 1), max_size=5) for _ in "ab"))
def test_interleaved_parts_survive_any_box_split(read: list[int], write: list[int]) -> None:
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
        places.append(TensorPlace(box, number))
    output = OutputLayout((), tuple(records), {"u": tuple(places)})
    mapped, first, grid = [], 0, array.reshape(INDICES, step, WIDTH)
    for part in PARTS:
        rows_of_part = (
            build_placeholder(0, (rows, WIDTH)).split(0, (INDICES, step)).narrow(1, first, part)
        )
        tensor = rows_of_part.place(1, first, step).merge(0, 2)
        into = TargetTensor("u", tensor)
        mapped.append(MappedTensor((SourceTensor("t", (rows, WIDTH), "p"),), (into,)))
        first += part
    catalog = Catalog(Path("/"), Path("/"), "torch", {}, {"t": entry})
    ((found,), _) = plan_transfers(catalog, compose_tensors(mapped), output, {"u": "uint8"})
    assert len(found.tensor.parts) == len(PARTS)
    written = bytearray(rows * WIDTH)
    for tile in steps(tile_transfer(found, records, TileLimits())):
        buffer = fill(tile, {"f": array.tobytes()}, 1)
        for _, offset, nbytes, start, *_ in tile.writes:
            written[offset : offset + nbytes] = buffer[start : start + nbytes]
    assert written == grid.tobytes()


def test_parts_of_several_dtypes_are_cast_before_merging() -> None:
    entries = {
        "a": stored("a", [2], dtype="float32"),
        "b": stored("b", [2], dtype="bfloat16"),
    }
    mapped = [
        MappedTensor(
            (SourceTensor(key, (2,), key),),
            (TargetTensor("ab", build_placeholder(0, (2,)).place(0, first, 4)),),
        )
        for key, first in (("a", 0), ("b", 2))
    ]
    output = OutputLayout(
        (), (Record("ab", "f", 0, 8),), {"ab": (TensorPlace(Box((0,), (4,)), 0),)}
    )
    catalog = Catalog(Path("/"), Path("/"), "torch", {}, entries)
    (transfer,), computed = plan_transfers(
        catalog, compose_tensors(mapped), output, {"ab": "bfloat16"}
    )
    assert (transfer.tensor.stored_dtype, transfer.is_cast) == ("bfloat16", False)
    assert transfer.list_files() == {"b", *computed}
    (made,) = computed.values()
    assert (made.kind, made.dtype) == ("rearranged", "bfloat16")
