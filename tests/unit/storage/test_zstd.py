"""Zstandard: what is cut off, and what unpacks to more than a checkpoint may have in memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.storage import zstd
from ckptctl.storage.files import MemoryFiles
from ckptctl.storage.zstd import MemoryBudget, decompress_value, iterate_decompressed
from tests import hostile

zstandard = pytest.importorskip("zstandard")
CONTENT = bytes(range(256)) * 2_000


def unpack(data: bytes, budget: MemoryBudget | None = None) -> bytes:
    files = MemoryFiles(data, Path())
    return decompress_value(files, "x", 0, len(data), "stream.zstd/1", budget or MemoryBudget())


def frames() -> dict[str, bytes]:
    skippable = b"\x50\x2a\x4d\x18\x05\0\0\0abcde"
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT)
    streamed = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False)
    stream = streamed.compressobj()
    pieces = stream.compress(CONTENT) + stream.flush()
    return {
        "whole": whole,
        "streamed": pieces,
        "two": whole + pieces,
        "skippable": skippable + whole + skippable,
        "random": zstandard.compress(random.Random(5).randbytes(300_000)),
    }


@pytest.mark.parametrize("case", ["whole", "streamed", "two", "skippable", "random"])
def test_complete_frames_decompress(case: str) -> None:
    assert unpack(frames()[case])


@pytest.mark.parametrize("case", ["whole", "streamed", "two", "skippable", "random"])
def test_truncated_frames_are_damaged(case: str) -> None:
    data, ends = frames()[case], {13, len(frames()["whole"]), 13 + len(frames()["whole"])}
    for length in (*range(1, 40), len(data) // 2, *range(len(data) - 20, len(data))):
        if case in ("two", "skippable") and length in ends:
            continue
        with pytest.raises(DamagedError):
            unpack(data[:length])


def test_empty_frame_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="is empty"):
        unpack(zstandard.compress(b""))


def test_memory_budget_is_shared_by_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "MAX_DECOMPRESSED_BYTES", 2_000_000)
    budget, data = MemoryBudget(), zstandard.compress(CONTENT)
    for _ in range(3):
        unpack(data, budget)
    with pytest.raises(UnsupportedError, match="more than 2,000,000 bytes"):
        unpack(data, budget)


def test_zstd_bomb_is_refused_during_decompression() -> None:
    data = hostile.zstd_bomb(8 << 30)
    assert len(data) < 300_000
    read = 0
    for piece in iterate_decompressed(MemoryFiles(data, Path()), "x", 0, len(data)):
        read += len(piece)
        if read > 1 << 24:
            break
    with pytest.raises(CkptError, match="decompress to more than"):
        unpack(data)
