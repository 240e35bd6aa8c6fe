"""Files that are not in the page cache: they are recognized, and read from the disk."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ckptctl.storage import page_cache
from ckptctl.storage.page_cache import PAGE_BYTES, enable_direct_reads, is_mostly_uncached

SIZE = 16 << 20


@pytest.fixture
def dropped(tmp_path: Path) -> Path:
    """A file of a disk that is not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    drop(path)
    with path.open("rb") as file:
        if not is_mostly_uncached(file.fileno()):
            pytest.skip("the page cache keeps what is here")
    return path


def drop(path: Path) -> None:
    """Take a file out of the page cache, if that is possible where it lies."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_file_is_cold_until_fully_read(dropped: Path) -> None:
    with dropped.open("rb") as file:
        os.pread(file.fileno(), SIZE // 8, 0)
        assert is_mostly_uncached(file.fileno())
        os.pread(file.fileno(), SIZE, 0)
        assert not is_mostly_uncached(file.fileno())


def test_cold_check_does_not_fill_page_cache(
    dropped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "SAMPLES", SIZE // PAGE_BYTES)
    with dropped.open("rb") as file:
        assert is_mostly_uncached(file.fileno())
        monkeypatch.setattr(page_cache, "SAMPLES", 1)
        assert is_mostly_uncached(file.fileno())


def test_small_files_and_directories_are_not_cold(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(bytes(SIZE - 1))
    drop(small)
    with small.open("rb") as file:
        assert not is_mostly_uncached(file.fileno())
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert not is_mostly_uncached(descriptor)
        assert enable_direct_reads(os.dup(descriptor)) is None
    finally:
        os.close(descriptor)
