"""What stays beside a destination: what can be resumed, and nothing else."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import RefusedError, StorageError
from ckptctl.storage import lock, trash
from ckptctl.storage.destinations import get_staging_directory
from ckptctl.storage.publish import clean_up_if_refused, remove_stale_staging, stage_output

Hold = Callable[[pytest.MonkeyPatch, threading.Event], None]
SOURCE = Path(__file__).parents[2] / "data" / "tiny-llama3-hf"


def interrupted(target: Path) -> Path:
    """Leave a run for *target* half-way, so that it can be resumed; return its folder."""
    with pytest.raises(KeyError), stage_output(target, keep_on_error=True) as stage:
        (stage.data / "model").write_text("half")
        stage.journal.write_text("j")
        raise KeyError
    return get_staging_directory(target)


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_error_after_publish_leaves_nothing_to_resume(tmp_path: Path) -> None:
    """After an exchange the staging folder holds the old output, which must not be resumed."""
    target = tmp_path / "out"
    with (
        pytest.raises(KeyError),
        stage_output(target, keep_on_error=True, resume=True) as stage,
    ):
        (stage.data / "model").write_text("new")
        stage.publish()
        raise KeyError
    assert names(tmp_path) == ["out"]


def test_sync_failure_after_rename_keeps_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptctl.storage import publish

    def sync(path: Path) -> None:
        if path == tmp_path and (tmp_path / "out").exists():
            raise StorageError("cannot sync: Input/output error (EIO)", where=str(path))

    with pytest.raises(StorageError), stage_output(tmp_path / "out", keep_on_error=True) as stage:
        (stage.data / "model").write_text("new")
        monkeypatch.setattr(publish, "sync_directory", sync)
        stage.publish()
    assert names(tmp_path) == ["out"]


def test_resumable_staging_survives_refusal(tmp_path: Path) -> None:
    """Somebody put another checkpoint there; the work of hours is not thrown away for that."""
    target = tmp_path / "out"
    left = interrupted(target)
    (target / "other").mkdir(parents=True)
    with pytest.raises(RefusedError, match="exists"), stage_output(target):
        pass
    assert names(left) == ["data", "journal", "lock"]


def test_resume_does_not_write_through_symlink(tmp_path: Path) -> None:
    target, precious = tmp_path / "out", tmp_path / "precious"
    left = interrupted(target)
    (left / "data").rename(precious)
    (left / "data").symlink_to(precious)
    with stage_output(target, resume=True) as stage:
        assert not stage.data.is_symlink()
        (stage.data / "model").write_text("whole")
        stage.publish()
    assert (precious / "model").read_text() == "half"
    assert (target / "model").read_text() == "whole"


def killed_after_it_had_published(folder: Path) -> tuple[Path, Path]:
    """Return a destination that is there, and what the run left beside it."""
    target = folder / "out"
    ckptctl.convert(SOURCE, target, to="hf")
    left = get_staging_directory(target)
    left.mkdir()
    (left / "lock").write_text("12345\n")
    return target, left


@pytest.mark.parametrize("words", [("convert",), ("consolidate",)])
def test_repeated_command_is_refused_and_removes_leftovers(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    target, left = killed_after_it_had_published(tmp_path)
    command = [*words, str(SOURCE), str(target), "--to", "hf"]
    assert CliRunner().invoke(app, [*command, "--dry-run"]).exit_code == 6
    assert names(left) == ["lock"], "a dry run removes nothing"
    assert CliRunner().invoke(app, command).exit_code == 6
    assert names(tmp_path) == ["out"]


def test_repeated_convert_call_is_refused_and_removes_leftovers(tmp_path: Path) -> None:
    target, _ = killed_after_it_had_published(tmp_path)
    with pytest.raises(RefusedError, match="exists"):
        ckptctl.convert(SOURCE, target, to="hf")
    assert names(tmp_path) == ["out"]


def test_locked_leftovers_are_not_swept(tmp_path: Path) -> None:
    target, left = killed_after_it_had_published(tmp_path)
    with (
        lock.hold_lock(left, target, "writing to this destination"),
        pytest.raises(RefusedError),
        clean_up_if_refused(target),
    ):
        raise RefusedError("no")
    assert names(left) == ["lock"]


def test_leftovers_without_output_are_not_swept(tmp_path: Path) -> None:
    """What lies there may be all that there is of a run that was interrupted."""
    target, left = killed_after_it_had_published(tmp_path)
    target.rename(tmp_path / "elsewhere")
    with pytest.raises(RefusedError), clean_up_if_refused(target):
        raise RefusedError("no")
    assert names(left) == ["lock"]


def old_leftover(target: Path) -> Path:
    """Leave what a run for *target* that was killed an hour ago left, without a journal."""
    folder = get_staging_directory(target)
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "model").write_text("half")
    (folder / lock.LOCK_FILE).write_text("999999999\n")
    for item in (folder / "data" / "model", folder / "data", folder / lock.LOCK_FILE, folder):
        os.utime(item, (time.time() - 3600,) * 2)
    return folder


def save(target: Path) -> None:
    with stage_output(target, restart=True) as stage:
        (stage.data / "model").write_text("new")
        stage.publish()


def race_with_sweep(target: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold) -> bool:
    """Save to *target* while a sweep, if it locks, locks between the saver's open and its flock.

    Args:
        target: The destination.
        monkeypatch: Puts the two in order.
        hold: Lets the sweep wait somewhere until the event: the saver has found the lock taken.

    Returns:
        Whether the sweep removed something.
    """
    real, saver = fcntl.flock, threading.get_ident()
    swept: list[bool] = []
    locked, refused = threading.Event(), threading.Event()
    sweeper = threading.Thread(target=lambda: swept.append(remove_stale_staging(target, 60.0)))

    def flock(descriptor: int, how: int) -> None:
        if threading.get_ident() != saver:
            real(descriptor, how)
            locked.set()
        else:
            if not sweeper.ident:
                sweeper.start()
                while sweeper.is_alive() and not locked.wait(0.01):
                    pass
            try:
                real(descriptor, how)
            except BlockingIOError:
                refused.set()
                raise

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        hold(patch, refused)
        save(target)
        sweeper.join(60)
    assert (target / "model").read_text() == "new"
    assert names(target.parent) == [target.name]
    return swept[0]


def wait_in(where: object, name: str) -> Hold:
    """Let the sweep wait before its call of a function."""
    saver, real = threading.get_ident(), getattr(where, name)

    def hold(patch: pytest.MonkeyPatch, refused: threading.Event) -> None:
        def waiting(*arguments: object) -> object:
            if threading.get_ident() != saver:
                refused.wait(10)
            return real(*arguments)

        patch.setattr(where, name, waiting)

    return hold


def test_sweep_does_not_lock_newly_begun_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not race_with_sweep(tmp_path / "out", monkeypatch, wait_in(os, "ftruncate"))


@pytest.mark.parametrize("call", ["trash.delete_permanently", "os.ftruncate"])
def test_save_waits_for_running_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The sweep has locked an old leftover: it removes it, or has not yet written who it is."""
    old_leftover(tmp_path / "out")
    where, _, name = call.partition(".")
    hold = wait_in({"trash": trash, "os": os}[where], name)
    assert race_with_sweep(tmp_path / "out", monkeypatch, hold)


def test_concurrent_save_is_refused_immediately(tmp_path: Path) -> None:
    with stage_output(tmp_path / "out"):
        began = time.monotonic()
        with pytest.raises(RefusedError, match=f"PID {os.getpid()}"):
            save(tmp_path / "out")
        assert time.monotonic() - began < lock._UNNAMED_SECONDS
        assert not remove_stale_staging(tmp_path / "out", 60.0)
