"""Taking things out of a folder: what was looked at alone, durably, nothing that lies elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptctl.errors import RefusedError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage import file_system, trash, two_phase_delete
from ckptctl.storage.trash import TRASH_FOLDER
from ckptctl.storage.two_phase_delete import list_trash_leftovers, lock_for_deletion


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "weights").write_text(name)
    return tmp_path / "root"


def identity(path: Path) -> FileIdentity:
    return FileIdentity.from_stat(path.lstat())


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_deleted_entry_and_trash_are_removed_at_exit(root: Path) -> None:
    with lock_for_deletion(root) as found:
        found.delete("one", identity(root / "one"))
        assert names(root) == [TRASH_FOLDER, "two"]
    assert names(root) == ["two"]


def test_delete_refuses_replaced_entry(root: Path) -> None:
    known = identity(root / "one")
    (root / "one").rename(root / "away")
    (root / "two").rename(root / "one")
    with lock_for_deletion(root) as found, pytest.raises(RefusedError, match="replaced"):
        found.delete("one", known)
    assert (root / "one" / "weights").read_text() == "two"


def test_delete_refuses_entry_with_new_mount(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody mounted a file system there after the plan was made."""
    mounted = root / "one" / "data"
    monkeypatch.setattr(two_phase_delete, "list_mounts_in", lambda path: [mounted])
    with lock_for_deletion(root) as found, pytest.raises(RefusedError, match="mounted") as caught:
        found.delete("one", identity(root / "one"))
    assert caught.value.where == str(mounted)
    assert (root / "one" / "weights").exists()


def test_trash_with_mount_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "older"):
        (root / TRASH_FOLDER / name).mkdir(parents=True)
    busy = root / TRASH_FOLDER / "old"
    monkeypatch.setattr(
        two_phase_delete, "list_mounts_in", lambda path: [busy] if path == busy else []
    )
    with lock_for_deletion(root) as found:
        assert found.list_left_in_trash() == ["old"]
    assert "old" in names(root / TRASH_FOLDER)


def test_old_trash_is_removed_first(root: Path) -> None:
    """It may be what fills the disk, and a run that fails later has still removed it."""
    (root / TRASH_FOLDER / "old" / "inner").mkdir(parents=True)
    with pytest.raises(KeyError), lock_for_deletion(root) as found:
        assert found.list_left_in_trash() == []
        raise KeyError
    assert names(root) == ["one", "two"]


@pytest.mark.parametrize("place", ["absent", "a file", "a link"])
def test_trash_path_without_folder_has_no_leftovers(root: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere" / "precious").mkdir(parents=True)
    if place == "a file":
        (root / TRASH_FOLDER).touch()
    elif place == "a link":
        (root / TRASH_FOLDER).symlink_to(tmp_path / "elsewhere")
    assert list_trash_leftovers(root) == []


def test_symlinked_trash_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "precious").mkdir(parents=True)
    (root / TRASH_FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="link"), lock_for_deletion(root):
        pass
    assert names(tmp_path / "elsewhere") == ["precious"]


def test_move_without_renameat2_never_replaces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise file_system.UnsupportedRenameError

    monkeypatch.setattr(file_system, "rename_atomically", unsupported)
    (root / "free").mkdir()
    with pytest.raises(FileExistsError):
        file_system.rename_without_replacing(root / "one", root / "free")
    assert names(root) == ["free", "one", "two"]
    file_system.rename_without_replacing(root / "one", root / "three")
    assert names(root) == ["free", "three", "two"]


def test_delete_syncs_move_before_removing_data(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could bring half a checkpoint back under its own name."""
    happened: list[str] = []
    sync, move, remove = os.fsync, file_system.rename_without_replacing, trash.delete_permanently

    def synced(descriptor: int) -> None:
        happened.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def moved(path: Path, target: Path) -> None:
        happened.append("move")
        move(path, target)

    def removed(path: Path) -> None:
        happened.append("remove" if path.exists() else "look")
        remove(path)

    with lock_for_deletion(root) as found:
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(file_system, "rename_without_replacing", moved)
        monkeypatch.setattr(trash, "delete_permanently", removed)
        found.delete("one", identity(root / "one"))
        monkeypatch.undo()
    assert happened[:2] == ["look", "move"] and happened[-1] == "remove"
    assert sorted(happened[2:-1]) == [f"sync {TRASH_FOLDER}", "sync root"]
