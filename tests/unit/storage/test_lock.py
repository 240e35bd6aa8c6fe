"""The lock of a folder that whoever holds it may remove."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.storage import lock

DOING = "writing to this destination"


def held(folder: Path):
    return lock.hold_lock(folder, folder / "target", DOING)


def test_lock_is_exclusive(tmp_path: Path) -> None:
    with held(tmp_path / "stage"):
        assert lock.find_holder(tmp_path / "stage") == str(os.getpid())
        with pytest.raises(RefusedError, match=f"another process is {DOING} .PID {os.getpid()}"):
            held(tmp_path / "stage").__enter__()
    assert lock.find_holder(tmp_path / "stage") is None
    with held(tmp_path / "stage"):
        pass


def test_lock_works_on_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        held(tmp_path / "stage"),
        pytest.raises(RefusedError, match=f"PID {os.getpid()}"),
        held(tmp_path / "stage"),
    ):
        pass


def test_lock_in_missing_parent_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot create"):
        held(tmp_path / "gone" / "stage").__enter__()


def test_lock_is_released_when_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from ckptctl.storage import lock\n"
        "found = lock.hold_lock(Path(sys.argv[1]), Path('x'), 'at it')\n"
        "found.__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stage")], check=False)
    assert done.returncode == -9
    with held(tmp_path / "stage"):
        pass


def test_lock_file_removed_meanwhile_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the open and the lock its holder ended and took the folder along.

    Whoever then holds the file without a name and whoever makes a new one must not both go on.
    """
    real, calls = fcntl.flock, 0

    def flock(descriptor: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            (tmp_path / "stage" / lock.LOCK_FILE).unlink()
            if calls == 2:
                (tmp_path / "stage" / lock.LOCK_FILE).touch()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(tmp_path / "stage"):
        assert calls == 3, "gone, then another one, then ours"
        with pytest.raises(RefusedError):
            held(tmp_path / "stage").__enter__()


def test_symlink_at_lock_path_is_refused_unwritten(tmp_path: Path) -> None:
    (tmp_path / "stage").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "stage" / lock.LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(CkptError):
        held(tmp_path / "stage").__enter__()
    assert (tmp_path / "precious").read_text() == "precious"


def test_symlinked_lock_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "stage").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="link"):
        held(tmp_path / "stage").__enter__()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_lock_at_file_path_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"ENOTDIR|EEXIST"):
        held(tmp_path / "file").__enter__()
