"""Files that a run opens by name: whatever they are, they hold the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckptctl.catalog import Box, Extent, TensorEntry, build_computed_name, build_memory_name
from ckptctl.errors import DamagedError
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage import computed
from ckptctl.storage.byte_files import ByteSource, HostMemory
from ckptctl.storage.execution import run_files
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.files import LocalFiles, MemoryFiles, SourceFiles

CONTENT = random.Random(3).randbytes(10_000)
NAMES = {
    "local": "in",
    "remote": "in",
    "computed": build_computed_name("in"),
    "memory": build_memory_name("0"),
}


def opened(kind: str, folder: Path) -> tuple[RunFiles, ByteSource]:
    """Open a file of a kind that holds :data:`CONTENT`."""
    (folder / "in").write_bytes(CONTENT)
    files: SourceFiles = LocalFiles(folder)
    if kind == "remote":
        files = MemoryFiles(CONTENT, folder)
    shape = (100, 100)
    extent = Extent(Box.whole(shape), "in", 0, len(CONTENT))
    entry = TensorEntry("t", "uint8", shape, (extent,), ("t",))
    virtual = {NAMES["computed"]: build_rearranged_file(folder, StridedTensor.from_entry(entry))}
    memory = {NAMES["memory"]: HostMemory(memoryview(bytearray(CONTENT)))}
    made = RunFiles(virtual, lambda _: files, folder, memory)
    return made, made.open_source(files, NAMES[kind])


@pytest.mark.parametrize("kind", NAMES)
def test_every_source_kind_reads_same_bytes(tmp_path: Path, kind: str) -> None:
    files, source = opened(kind, tmp_path)
    parts = [bytearray(70), bytearray(1), bytearray(2000)]
    source.read_into(333, [memoryview(part) for part in parts], 2071)
    assert b"".join(parts) == CONTENT[333 : 333 + 2071]
    room = memoryview(bytearray(300))
    assert not source.read_pieces([(9_990, 10, 0), (5, 200, 90), (205, 10, 290)], room)
    assert bytes(room) == CONTENT[9_990:] + bytes(80) + CONTENT[5:215]
    assert (files.bytes_read == 0) == (kind == "memory")
    seen = source.view_memory(40, 60)
    assert (seen is None) == (kind != "memory") and (seen is None or seen == CONTENT[40:100])
    assert (source.descriptor is None) == (kind != "local")
    assert source.batches_pieces == (kind == "computed")
    files.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_gather_merges_reads_across_small_gaps(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, source = opened(kind, tmp_path)
    monkeypatch.setattr(computed, "MAX_GAP_BYTES", 5)
    monkeypatch.setattr(computed, "IOV_MAX", 8)
    calls = []
    read_into = source.read_into

    def counted(offset, views, nbytes):
        assert len(views) <= 8 and sum(map(len, views)) == nbytes
        calls.append((offset, nbytes))
        read_into(offset, views, nbytes)

    monkeypatch.setattr(source, "read_into", counted)
    offsets = [3, 6, 12, 40, 38, *range(100, 120, 4)]
    room = memoryview(bytearray(3 * len(offsets)))
    source.read_pieces([(offset, 3, 3 * n) for n, offset in enumerate(offsets)], room)
    assert bytes(room) == b"".join(CONTENT[offset : offset + 3] for offset in offsets)
    assert calls == [(3, 12), (40, 3), (38, 3), (100, 15), (116, 3)]
    files.close()


@pytest.mark.parametrize("kind", ["local", "remote", "computed"])
def test_truncated_source_is_damaged(tmp_path: Path, kind: str) -> None:
    files, source = opened(kind, tmp_path)
    (tmp_path / "in").write_bytes(b"short")
    if kind == "remote":
        source = files.open_source(MemoryFiles(b"short", tmp_path), "in")
    with pytest.raises(DamagedError, match="truncated"):
        source.read_into(0, [memoryview(bytearray(100))], 100)
    with pytest.raises(DamagedError, match="truncated"):
        source.read_pieces([(0, 100, 0)], memoryview(bytearray(100)))


def test_sinks_write_to_file_and_memory(tmp_path: Path) -> None:
    memory = bytearray(8)
    files = RunFiles(
        {}, lambda _: pytest.fail(), tmp_path, {"/memory/0": HostMemory(memoryview(memory))}
    )
    (tmp_path / "out").write_bytes(bytes(8))
    for name in ("out", "/memory/0"):
        sink = files.open_sink(name)
        sink.write(3, memoryview(b"abc"))
        assert sink.checksummed == (sink.descriptor is not None) == (name == "out")
        assert (sink.view_memory(0, 8) is None) == (name == "out")
    assert (tmp_path / "out").read_bytes() == memory == b"\0\0\0abc\0\0"
    files.close()


def test_closed_file_is_reopened_on_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MAX_OPEN_FILES", 2)
    files = LocalFiles(tmp_path)
    made = RunFiles({}, lambda _: files, tmp_path, {})
    room = memoryview(bytearray(1))
    for name in "abc":
        (tmp_path / name).write_text(name)
    for name in "abcabc":
        made.open_source(files, name).read_into(0, [room], 1)
        assert bytes(room).decode() == name
    made.close()
