"""Memory as a place of the executor: written from, and read into, without a copy in between."""

from __future__ import annotations

import gc
import math
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.catalog import Computed, computed_name, memory_name, row_major
from ckptctl.errors import DamagedError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.plan import Operand, OutputFile, Plan, Record, Side, Transfer
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import ExecutionOptions
from ckptctl.storage.files import source_files

FAST = ExecutionOptions(jobs=2, sync=False)


def operand(
    file: str, offset: int, sizes: Sequence[int], strides: Sequence[int] | None = None, **more: int
) -> Operand:
    sizes = tuple(sizes)
    steps = tuple(strides or row_major(sizes))
    span = sum((n - 1) * s for n, s in zip(sizes, steps, strict=True)) + 1
    return Operand(file, offset, (0,) * len(sizes), sizes, steps, span, **more)


def plan(
    source: Operand, target: Operand, record: Record, files: Sequence[OutputFile], root: Path
) -> Plan:
    dims = tuple((axis,) for axis in range(len(source.sizes)))
    transfer = Transfer(
        "t", "t", source.sizes, Side(dims, (source,)), Side(dims, (target,)), "uint8", "uint8"
    )
    sources: dict[str, FileIdentity] = {}
    if not source.file.startswith("/"):
        with source_files(root) as known:
            sources[source.file] = known.identity(source.file)
    return Plan(str(root), sources, "", False, tuple(files), (record,), (transfer,), (), digest="")


def output(name: str, size: int) -> OutputFile:
    return OutputFile(name, size, lambda _: iter(()))


@pytest.mark.parametrize("size", [0, 1, 100, (5 << 20) + 3])
def test_memory_becomes_a_file_with_its_checksum(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    target = operand("out", 0, [size], record=0)
    moved = plan(
        operand(memory_name("a"), 0, [size]),
        target,
        Record("t", "out", 0, size),
        [output("out", size)],
        tmp_path,
    )
    done = execute(
        moved, tmp_path, FAST, lambda _: None, memory={memory_name("a"): memoryview(content)}
    )
    assert (tmp_path / "out").read_bytes() == content
    assert done.crcs == [zlib.crc32(content)]


def test_rows_with_gaps_are_gathered(tmp_path: Path) -> None:
    content = bytes(range(200)) + bytes(40)
    moved = plan(
        operand(memory_name("a"), 0, [10, 7], [20, 2]),
        operand("out", 0, [10, 7], record=0),
        Record("t", "out", 0, 70),
        [output("out", 70)],
        tmp_path,
    )
    execute(moved, tmp_path, FAST, lambda _: None, memory={memory_name("a"): memoryview(content)})
    expected = bytes(20 * row + 2 * column for row in range(10) for column in range(7))
    assert (tmp_path / "out").read_bytes() == expected


@pytest.mark.parametrize("strides", [None, (40, 1), (20, 2)])
def test_a_file_fills_memory_and_nothing_beside(
    tmp_path: Path, strides: tuple[int, ...] | None
) -> None:
    (tmp_path / "in").write_bytes(bytes(range(200)))
    memory = bytearray(b"\xa5" * 500)
    moved = plan(
        operand("in", 0, [10, 7], [20, 1]),
        operand(memory_name("a"), 3, [10, 7], strides, record=0),
        Record("t", memory_name("a"), 3, 70),
        [],
        tmp_path,
    )
    execute(moved, tmp_path, FAST, lambda _: None, memory={memory_name("a"): memoryview(memory)})
    steps = strides or (7, 1)
    expected = bytearray(b"\xa5" * 500)
    for row in range(10):
        for column in range(7):
            expected[3 + row * steps[0] + column * steps[1]] = 20 * row + column
    assert memory == expected


@pytest.mark.parametrize("source", ["in", computed_name("in")])
def test_filled_memory_is_released_after_the_run(tmp_path: Path, source: str) -> None:
    class Buffer(bytearray):
        """Can be referred to weakly."""

    (tmp_path / "in").write_bytes(bytes(100))
    target, record = (
        operand(memory_name("a"), 0, [100], record=0),
        Record("t", memory_name("a"), 0, 100),
    )
    moved = plan(operand(source, 0, [100]), target, record, [], tmp_path)
    constant = Computed("constant", "uint8", (100,), arguments=0)
    moved = replace(moved, computed={computed_name("in"): constant})
    buffer = Buffer(b"\xa5" * 100)
    released = weakref.ref(buffer)
    gc.disable()
    try:
        memory = {memory_name("a"): memoryview(buffer)}
        execute(moved, tmp_path, FAST, lambda _: None, memory=memory)
        assert bytes(buffer) == bytes(100)
        del buffer, memory
        assert released() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [100, (5 << 20) + 3])
def test_what_is_read_whole_is_checked(tmp_path: Path, size: int) -> None:
    content = bytes(math.ceil(size / 251) * list(range(251)))[:size]
    (tmp_path / "in").write_bytes(content)
    memory = bytearray(size)
    source = operand("in", 0, [size])._replace(crc32=zlib.crc32(content))
    target = operand(memory_name("a"), 0, [size], record=0)
    record = Record("t", memory_name("a"), 0, size)
    views = {memory_name("a"): memoryview(memory)}
    execute(
        plan(source, target, record, [], tmp_path), tmp_path, FAST, lambda _: None, memory=views
    )
    assert memory == content
    wrong = source._replace(crc32=1)
    with pytest.raises(DamagedError, match="does not match"):
        execute(
            plan(wrong, target, record, [], tmp_path), tmp_path, FAST, lambda _: None, memory=views
        )


def test_what_others_wrote_stays(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    moved = plan(
        operand(memory_name("a"), 0, [4]),
        operand("out", 0, [4], record=0),
        Record("t", "out", 0, 4),
        [output("out", 4)],
        tmp_path,
    )
    views = {memory_name("a"): memoryview(b"abcd")}
    execute(moved, tmp_path, replace(FAST, shared=True), lambda _: None, memory=views)
    assert {item.name for item in tmp_path.iterdir()} == {"other", "out"}
