"""Copies that several ranks have of one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.storage.compare import WINDOW_BYTES
from ckptctl.storage.files import source_files


def tensor(file: str, nbytes: int, crc32: int | None = None) -> TensorEntry:
    extent = Extent(Box.whole((nbytes,)), file, 0, nbytes, crc32=crc32)
    return TensorEntry("w", "uint8", (nbytes,), (extent,), ("w",))


@pytest.mark.parametrize(
    ("crcs", "same", "noted"),
    [
        ((1, 1), True, "recorded"),
        ((1, 2), False, ""),
        ((None, 1), False, ""),
        ((3, None), False, ""),
    ],
)
def test_copies_compare_by_recorded_checksums_or_bytes(
    tmp_path: Path, crcs: tuple[int | None, int | None], same: bool, noted: str
) -> None:
    (tmp_path / "a").write_bytes(b"one.")
    (tmp_path / "b").write_bytes(b"two.")
    with source_files(tmp_path) as files:
        found = CopyComparison(files)
        assert found.is_same(tensor("a", 4, crcs[0]), tensor("b", 4, crcs[1]), "w") is same
    assert found.differing == ([] if same else ["w"])
    assert found.compared_by_checksum == (["w"] if noted else [])


def test_large_copies_are_read_only_on_request(tmp_path: Path) -> None:
    size = WINDOW_BYTES + 1
    (tmp_path / "a").write_bytes(bytes(size))
    (tmp_path / "b").write_bytes(bytes(WINDOW_BYTES) + b"\1")
    with source_files(tmp_path) as files:
        found = CopyComparison(files)
        assert found.is_same(tensor("a", size), tensor("b", size), "w")
        assert found.uncompared == ["w"] and "w" in next(found.list_notes())
        assert not found.is_same(tensor("a", size), tensor("b", size), "w", of_any_size=True)
        deferred = CopyComparison(files, deferred=True)
        assert deferred.is_same(tensor("a", size), tensor("b", size), "w")
    assert not list(deferred.list_notes())
