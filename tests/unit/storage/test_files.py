"""Descriptors of source files: few are open, and none that somebody reads from is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.storage import files as source_files
from ckptctl.storage.files import LocalFiles


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFiles:
    monkeypatch.setattr(source_files, "MAX_OPEN_FILES", 2)
    for name in "abcd":
        (tmp_path / name).write_text(name)
    return LocalFiles(tmp_path)


def is_open(descriptor: int, path: Path) -> bool:
    link = Path(f"/proc/self/fd/{descriptor}")
    return link.is_symlink() and link.readlink() == path


def test_least_recently_used_descriptor_is_closed(files: LocalFiles) -> None:
    held = {}
    for name in "abac":
        with files._hold_descriptor(name) as held[name]:
            pass
    assert [name for name in held if is_open(held[name], files.root / name)] == ["a", "c"]
    assert files.read_up_to("b", 0, 9) == b"b"


def test_descriptors_in_use_stay_open_beyond_limit(files: LocalFiles) -> None:
    with files._hold_descriptor("a") as a, files._hold_descriptor("b") as b:
        with files._hold_descriptor("c") as c:
            assert all(
                is_open(one, files.root / name) for name, one in zip("abc", (a, b, c), strict=True)
            )
        with files._hold_descriptor("d") as d:
            assert is_open(d, files.root / "d")
            assert not is_open(c, files.root / "c")
