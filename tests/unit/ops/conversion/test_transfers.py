"""Which files transfers read."""

from __future__ import annotations

from pathlib import Path

from ckptctl.catalog import (
    Box,
    Computed,
    Extent,
    Input,
    TensorEntry,
    computed_name,
    memory_name,
)
from ckptctl.ops.conversion.transfers import sources_of
from ckptctl.planner.plan import Operand, RawCopy, Side, Transfer


def _entry(file: str) -> TensorEntry:
    extent = Extent(Box.whole((4,)), file, 0, 4)
    return TensorEntry(file, "uint8", (4,), (extent,), (file,))


def _transfer(*files: str) -> Transfer:
    operands = tuple(
        Operand(file, 0, (4 * n,), (4,), (1,), 4, None, -1) for n, file in enumerate(files)
    )
    side = Side(((0,),), operands)
    return Transfer("t", "t", (4 * len(files),), side, side, "uint8", "uint8")


def test_files_are_named_once_and_memory_is_none(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        for number, name in enumerate("abcd", 1):
            (folder / name).write_bytes(bytes(number))
    outer, inner, unread = map(computed_name, ("outer", "inner", "unread"))
    virtual = {
        outer: Computed("copied", "uint8", (4,), {"base": Input(str(root), _entry(inner))}),
        inner: Computed(
            "copied",
            "uint8",
            (4,),
            {"base": Input(str(root), _entry("c")), "more": Input(str(other), _entry("d"))},
        ),
        unread: Computed("constant", "uint8", (4,)),
    }
    read = [_transfer("b", outer), _transfer(memory_name("0"), "b")]
    raw = [RawCopy("a", 0, 1, "x", 0)]
    computed, sources = sources_of(str(root), read, virtual, raw)
    assert computed.keys() == {outer, inner}
    assert {name: one.size for name, one in sources.items()} == {"b": 2, "c": 3, "a": 1}
