"""A rename that replaces nothing, also where the system has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.storage import file_system


@pytest.mark.parametrize("supported", [True, False])
def test_move_never_replaces_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    def unsupported(*_: object) -> None:
        raise file_system.UnsupportedRenameError

    if not supported:
        monkeypatch.setattr(file_system, "rename_atomically", unsupported)
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    (tmp_path / "link").symlink_to("nowhere")
    for taken in ("two", "link"):
        with pytest.raises(FileExistsError):
            file_system.rename_without_replacing(tmp_path / "one", tmp_path / taken)
    assert (tmp_path / "two").read_text() == "2"
    file_system.rename_without_replacing(tmp_path / "one", tmp_path / "three")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "three", "two"]
