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

from ckptctl.catalog import ComputedTensor, TensorEntry, build_computed_name, build_memory_name
from ckptctl.errors import DamagedError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.plan import OutputFile, Plan, Record, TargetBox, Transfer
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.files import source_files
from tests.transfers import stored, target

FAST = ExecutionOptions(jobs=2, sync=False)


def plan(
    source: TensorEntry, target: TargetBox, record: Record, files: Sequence[OutputFile], root: Path
) -> Plan:
    transfer = Transfer("t", StridedTensor.from_entry(source), (target,))
    sources: dict[str, FileIdentity] = {}
    if not source.name.startswith("/"):
        with source_files(root) as known:
            sources[source.name] = known.read_identity(source.name)
    checked = frozenset([(0, source.name)])
    return Plan(
        root, sources, Path(), False, tuple(files), (record,), (transfer,), (), "", checked=checked
    )


def output(name: str, size: int) -> OutputFile:
    return OutputFile(name, size, lambda _: iter(()))


@pytest.mark.parametrize("size", [0, 1, 100, (5 << 20) + 3])
def test_memory_is_written_to_file_with_checksum(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    into = target("out", 0, [size], 0)
    moved = plan(
        stored(build_memory_name("a"), [size]),
        into,
        Record("t", "out", 0, size),
        [output("out", size)],
        tmp_path,
    )
    done = execute_plan(
        moved, tmp_path, FAST, lambda _: None, memory={build_memory_name("a"): memoryview(content)}
    )
    assert (tmp_path / "out").read_bytes() == content
    assert done.crcs == [zlib.crc32(content)]


def test_strided_rows_in_memory_are_gathered(tmp_path: Path) -> None:
    content = bytes(range(200)) + bytes(40)
    moved = plan(
        stored(build_memory_name("a"), [10, 7], strides=[20, 2]),
        target("out", 0, [10, 7], 0),
        Record("t", "out", 0, 70),
        [output("out", 70)],
        tmp_path,
    )
    execute_plan(
        moved, tmp_path, FAST, lambda _: None, memory={build_memory_name("a"): memoryview(content)}
    )
    expected = bytes(20 * row + 2 * column for row in range(10) for column in range(7))
    assert (tmp_path / "out").read_bytes() == expected


@pytest.mark.parametrize("strides", [None, (40, 1), (20, 2)])
def test_file_read_fills_only_target_memory(
    tmp_path: Path, strides: tuple[int, ...] | None
) -> None:
    (tmp_path / "in").write_bytes(bytes(range(200)))
    memory = bytearray(b"\xa5" * 500)
    moved = plan(
        stored("in", [10, 7], strides=[20, 1]),
        target(build_memory_name("a"), 3, [10, 7], 0, strides=strides),
        Record("t", build_memory_name("a"), 3, 70),
        [],
        tmp_path,
    )
    execute_plan(
        moved, tmp_path, FAST, lambda _: None, memory={build_memory_name("a"): memoryview(memory)}
    )
    steps = strides or (7, 1)
    expected = bytearray(b"\xa5" * 500)
    for row in range(10):
        for column in range(7):
            expected[3 + row * steps[0] + column * steps[1]] = 20 * row + column
    assert memory == expected


@pytest.mark.parametrize("source", ["in", build_computed_name("in")])
def test_filled_memory_is_released_after_run(tmp_path: Path, source: str) -> None:
    class Buffer(bytearray):
        """Can be referred to weakly."""

    (tmp_path / "in").write_bytes(bytes(100))
    into = target(build_memory_name("a"), 0, [100], 0)
    record = Record("t", build_memory_name("a"), 0, 100)
    moved = plan(stored(source, [100]), into, record, [], tmp_path)
    constant = ComputedTensor("constant", "uint8", (100,), arguments=0)
    moved = replace(moved, computed={build_computed_name("in"): constant})
    buffer = Buffer(b"\xa5" * 100)
    released = weakref.ref(buffer)
    gc.disable()
    try:
        memory = {build_memory_name("a"): memoryview(buffer)}
        execute_plan(moved, tmp_path, FAST, lambda _: None, memory=memory)
        assert bytes(buffer) == bytes(100)
        del buffer, memory
        assert released() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [100, (5 << 20) + 3])
def test_complete_read_into_memory_is_checksummed(tmp_path: Path, size: int) -> None:
    content = bytes(math.ceil(size / 251) * list(range(251)))[:size]
    (tmp_path / "in").write_bytes(content)
    memory = bytearray(size)
    source = stored("in", [size], crc32=zlib.crc32(content))
    into = target(build_memory_name("a"), 0, [size], 0)
    record = Record("t", build_memory_name("a"), 0, size)
    views = {build_memory_name("a"): memoryview(memory)}
    execute_plan(
        plan(source, into, record, [], tmp_path), tmp_path, FAST, lambda _: None, memory=views
    )
    assert memory == content
    (extent,) = source.extents
    wrong = replace(source, extents=(replace(extent, crc32=1),))
    with pytest.raises(DamagedError, match="does not match"):
        execute_plan(
            plan(wrong, into, record, [], tmp_path), tmp_path, FAST, lambda _: None, memory=views
        )


def test_shared_run_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    moved = plan(
        stored(build_memory_name("a"), [4]),
        target("out", 0, [4], 0),
        Record("t", "out", 0, 4),
        [output("out", 4)],
        tmp_path,
    )
    views = {build_memory_name("a"): memoryview(b"abcd")}
    execute_plan(moved, tmp_path, replace(FAST, shared=True), lambda _: None, memory=views)
    assert {item.name for item in tmp_path.iterdir()} == {"other", "out"}
