"""Reading a byte range piece by piece."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from ckptctl.errors import DamagedError
from ckptctl.storage import crc
from ckptctl.storage.crc import WINDOW_BYTES, compute_crc, iterate_windows
from ckptctl.storage.files import SourceFiles, source_files

CONTENT = bytes(range(251)) * (3 * WINDOW_BYTES // 251)


@pytest.fixture
def files(tmp_path: Path) -> SourceFiles:
    (tmp_path / "f").write_bytes(CONTENT)
    return source_files(tmp_path)


@pytest.mark.parametrize("nbytes", [0, 1, WINDOW_BYTES, 2 * WINDOW_BYTES + 7])
def test_only_requested_range_is_read_in_windows(files: SourceFiles, nbytes: int) -> None:
    told: list[int] = []
    read = b"".join(bytes(view) for view in iterate_windows(files, "f", 5, nbytes, told.append))
    assert read == CONTENT[5 : 5 + nbytes]
    assert sum(told) == nbytes
    assert max(told, default=0) <= WINDOW_BYTES
    assert compute_crc(files, "f", 5, nbytes) == zlib.crc32(CONTENT[5 : 5 + nbytes])


def test_crc_of_truncated_file_is_damaged(files: SourceFiles) -> None:
    with pytest.raises(DamagedError, match="truncated"):
        compute_crc(files, "f", 5, len(CONTENT))


def test_windows_use_current_window_size(
    files: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compute_crc(files, "f", 0, 1000)
    monkeypatch.setattr(crc, "WINDOW_BYTES", 30)
    assert compute_crc(files, "f", 0, 1000) == whole
    assert max(map(len, iterate_windows(files, "f", 0, 1000))) == 30
