"""Plain ranges of files that are not in the page cache are read past it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.catalog import build_memory_name
from ckptctl.errors import DamagedError
from ckptctl.planner.plan import Record
from ckptctl.storage.execution import run_files
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.page_cache import is_mostly_uncached
from tests.sweeps import one_in
from tests.transfers import stored, target
from tests.unit.storage.execution.test_memory import plan
from tests.unit.storage.test_page_cache import drop

SIZE = (17 << 20) + 1234
DIRECT = ExecutionOptions(jobs=2, checksum=False, sync=False, direct=True)


@pytest.fixture
def content(tmp_path: Path) -> Iterator[bytes]:
    """What the file `in` holds, which is on a disk and not in the page cache."""
    made = random.Random(1).randbytes(SIZE)
    (tmp_path / "in").write_bytes(made)
    drop(tmp_path / "in")
    if not is_cold(tmp_path / "in"):
        pytest.skip("the page cache keeps what is here")
    yield made


def is_cold(path: Path) -> bool:
    with path.open("rb") as file:
        return is_mostly_uncached(file.fileno())


def read(folder: Path, begin: int, size: int, how: ExecutionOptions = DIRECT) -> bytes:
    memory = bytearray(size)
    name = build_memory_name("a")
    moved = plan(
        stored("in", [size], offset=begin),
        target(name, 0, [size], 0),
        Record("t", name, 0, size),
        [],
        folder,
    )
    done = execute_plan(moved, folder, how, lambda _: None, memory={name: memoryview(memory)})
    assert done.bytes_read == size
    return bytes(memory)


@pytest.mark.parametrize("begin", one_in(4, [0, 1, 4095, 4096, 12345]))
@pytest.mark.parametrize("left", [0, 1, 4097])
def test_direct_reads_match_content_and_skip_page_cache(
    tmp_path: Path, content: bytes, begin: int, left: int
) -> None:
    how = replace(DIRECT, checksum=begin % 2 == 0, memory=601 << 10 if left else DIRECT.memory)
    size = SIZE - begin - left
    assert read(tmp_path, begin, size, how) == content[begin : begin + size]
    assert is_cold(tmp_path / "in")


def test_buffered_read_fills_page_cache(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path, 5, SIZE - 5, replace(DIRECT, direct=False)) == content[5:]
    assert not is_cold(tmp_path / "in")


def test_short_ranges_are_read_through_page_cache(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(run_files, "enable_direct_reads")
    assert read(tmp_path, 70_000, 1000) == content[70_000:71_000]


def refused(descriptor: int) -> None:
    os.close(descriptor)


def test_unsupported_direct_reads_fall_back_to_buffered(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "enable_direct_reads", refused)
    assert read(tmp_path, 5, SIZE - 5) == content[5:]


def test_failed_direct_read_is_retried_buffered(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "PAGE_BYTES", 512 - 100)  # nothing is aligned
    assert read(tmp_path, 5, SIZE - 5) == content[5:]


def test_truncated_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DamagedError, match="truncated"):
        read(tmp_path, 1, len(content))
