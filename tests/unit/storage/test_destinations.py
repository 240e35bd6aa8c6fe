"""Destinations that are refused, and what is said of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptctl.errors import RefusedError, StorageError, UsageError
from ckptctl.storage import file_system
from ckptctl.storage.destinations import Replaceable, check_target, require_local_path

PAGE = Replaceable(lambda path: path.suffix == ".html" and path.is_file(), "a page", is_file=True)
FOLDER = Replaceable(lambda path: (path / "model").exists())


def refused(target: Path, kind: Replaceable, overwrite: bool) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        check_target(target, overwrite=overwrite, is_checkpoint=kind)
    return caught.value


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("holds", [(), ("x.html",)])
def test_folder_destination_for_file_output_is_refused(
    tmp_path: Path, overwrite: bool, holds: tuple[str, ...]
) -> None:
    for name in holds:
        (tmp_path / name).touch()
    error = refused(tmp_path, PAGE, overwrite)
    assert error.what == "the destination is a folder, but the output is a file"
    assert error.hint and "--overwrite" not in error.hint


@pytest.mark.parametrize("overwrite", [False, True])
def test_empty_folder_destination_is_accepted_if_replaceable(
    tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new"
    target.mkdir()
    check_target(target, overwrite=overwrite, is_checkpoint=FOLDER)
    with monkeypatch.context() as patch:
        patch.chdir(target)
        error = refused(target, FOLDER, overwrite)
    assert error.what == "the destination is the working directory"
    assert error.hint == f"pass a folder in it, such as `{target}/converted`"
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda _: True)
        assert refused(target, FOLDER, overwrite).what.endswith("a mount point")
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path) != target)
    with pytest.raises(StorageError, match="cannot write to the destination"):
        check_target(target, overwrite=overwrite, is_checkpoint=FOLDER)


@pytest.mark.parametrize("empty", [False, True])
def test_bind_mount_destination_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    """It is on the same device as its parent; a rename to it fails when all work is done."""
    target, table = tmp_path / "a b", tmp_path / "mountinfo"
    target.mkdir()
    if not empty:
        (target / "model").touch()
    shown = str(target).replace(" ", "\\040")
    table.write_text(f"9 8 0:5 / {shown} rw shared:1 - ext4 /dev/x rw\n")
    check_target(target, overwrite=True, is_checkpoint=FOLDER)
    monkeypatch.setattr(file_system, "_MOUNTS", table)
    assert refused(target, FOLDER, True).what == "the destination is a mount point"


def test_empty_folder_is_accepted_from_deleted_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_target(tmp_path / "new", overwrite=False, is_checkpoint=FOLDER)


def test_refused_destination_error_explains_overwrite(tmp_path: Path) -> None:
    page, other = tmp_path / "a.html", tmp_path / "a.py"
    page.touch()
    other.touch()
    said = "choose another destination, or pass `--overwrite` to replace a page"
    assert refused(page, PAGE, False).hint == said
    assert "`--overwrite` only replaces" in (refused(other, PAGE, False).hint or "")
    assert refused(other, PAGE, True).what.startswith("the destination is not a page and")
    assert refused(other, FOLDER, True).what.startswith("the destination is not a checkpoint and")
    check_target(page, overwrite=True, is_checkpoint=PAGE)
    notes = tmp_path / "folder" / "notes.txt"
    notes.parent.mkdir()
    notes.touch()
    assert refused(notes.parent, FOLDER, True).why == "it contains `notes.txt`"


def test_url_destination_is_a_usage_error(tmp_path: Path) -> None:
    for good in (f"file://{tmp_path}/x", tmp_path / "x", "a:b/c"):
        require_local_path(good)
    with pytest.raises(UsageError, match="URLs are not supported here"):
        require_local_path("s3://bucket/x")
    with pytest.raises(UsageError, match="looks like a URL") as caught:
        require_local_path(Path("s3://bucket/x"))
    assert caught.value.where == "s3:/bucket/x"
