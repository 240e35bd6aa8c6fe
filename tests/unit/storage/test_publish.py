"""Staging, publishing and removing: what is refused, what is left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckptctl.errors import RefusedError, StorageError
from ckptctl.storage import file_system, lock, publish, trash
from ckptctl.storage.destinations import require_space, require_writable
from ckptctl.storage.publish import stage_output
from ckptctl.storage.threads import Terminated
from ckptctl.storage.unfinished import UnfinishedWorkError
from tests import limits


def tree(path: Path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def fill(stage, text="new"):
    (stage.data / "model").write_text(text)


def make(target, text="new", **options):
    with stage_output(target, **options) as stage:
        fill(stage, text)
        return stage.publish()


def yes(_):
    return True


def test_published_directory_leaves_no_staging(tmp_path):
    assert make(tmp_path / "deep" / "out") == []
    assert tree(tmp_path) == ["deep", "deep/out", "deep/out/model"]


def test_single_file_is_published_and_overwritten(tmp_path):
    with stage_output(tmp_path / "out.pt", single_file=True) as stage:
        (stage.data / "out.pt").write_text("new")
        stage.publish()
    assert tree(tmp_path) == ["out.pt"]
    with stage_output(
        tmp_path / "out.pt", single_file=True, overwrite=True, is_checkpoint=yes
    ) as stage:
        (stage.data / "out.pt").write_text("newer")
        stage.publish()
    assert (tree(tmp_path), (tmp_path / "out.pt").read_text()) == (["out.pt"], "newer")


def test_unpublished_staging_leaves_nothing(tmp_path):
    with stage_output(tmp_path / "out") as stage:
        fill(stage)
    assert tree(tmp_path) == []


def test_existing_target_is_refused_before_work(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(RefusedError, match="exists"):
        make(tmp_path / "out")
    assert tree(tmp_path) == ["out", "out/mine"]


def test_overwrite_replaces_only_checkpoints_and_empty_directories(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    make(target, "a", overwrite=True)
    with pytest.raises(RefusedError, match="not a checkpoint"):
        make(target, "b", overwrite=True)
    assert (target / "model").read_text() == "a"
    (target / "old").write_text("")
    make(target, "b", overwrite=True, is_checkpoint=yes)
    assert (tree(tmp_path), (target / "model").read_text()) == (["out", "out/model"], "b")


def test_symlink_target_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    for name in ("out", "out/"):
        with pytest.raises(RefusedError, match="symbolic link"):
            make(Path(f"{tmp_path}/{name}"), overwrite=True, is_checkpoint=yes)


@pytest.mark.parametrize("name", ["/", ".", "..", "x/.."])
def test_target_without_name_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError, match="has no name"):
        make(Path(name))


def test_target_created_meanwhile_is_kept(tmp_path):
    with pytest.raises(RefusedError, match="exists"), stage_output(tmp_path / "out") as stage:
        fill(stage)
        (tmp_path / "out").mkdir()
        stage.publish()
    assert tree(tmp_path) == ["out"]


def test_output_published_before_lock_is_refused_before_work(tmp_path, monkeypatch):
    target, hold_lock = tmp_path / "out", publish.lock.hold_lock

    def publish_other(*arguments, **options):
        target.mkdir()
        (target / "file").touch()
        return hold_lock(*arguments, **options)

    monkeypatch.setattr(publish.lock, "hold_lock", publish_other)
    with (
        pytest.raises(RefusedError, match="the destination exists"),
        stage_output(target, resume=True, keep_on_error=True),
    ):
        pytest.fail("the output would be written in vain")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_kernel_rename_never_replaces_new_empty_directory(tmp_path, monkeypatch):
    """Even when the check sees nothing, an empty directory is not silently replaced."""
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    with pytest.raises(RefusedError, match="exists"), stage_output(tmp_path / "out") as stage:
        fill(stage)
        (tmp_path / "out").mkdir()
        stage.publish()
    assert tree(tmp_path) == ["out"]


@pytest.mark.parametrize("lacking", [False, True])
def test_target_created_after_check_is_kept(tmp_path, monkeypatch, lacking):
    """Without *overwrite* nothing is ever exchanged, nor replaced by a plain rename."""
    real = file_system.rename_atomically

    def unsupported(*args):
        if lacking:
            raise file_system.UnsupportedRenameError
        real(*args)

    monkeypatch.setattr(publish, "check_target", lambda *_, **__: None)
    monkeypatch.setattr(file_system, "rename_atomically", unsupported)
    target = tmp_path / "out.pt"
    with (
        pytest.raises(RefusedError, match="exists"),
        stage_output(target, single_file=True) as stage,
    ):
        (stage.data / "out.pt").write_text("new")
        target.write_text("somebody's")
        stage.publish()
    assert (tree(tmp_path), target.read_text()) == (["out.pt"], "somebody's")


def test_overwritten_target_is_rechecked_before_exchange(tmp_path, monkeypatch):
    target = tmp_path / "out"
    make(target, "old")
    real = publish.sync_directory

    def sync(path):
        (target / "model").rename(target / "thesis")
        monkeypatch.setattr(publish, "sync_directory", real)

    with (
        pytest.raises(RefusedError, match="not a checkpoint"),
        stage_output(
            target, overwrite=True, is_checkpoint=lambda path: (path / "model").exists()
        ) as stage,
    ):
        fill(stage)
        monkeypatch.setattr(publish, "sync_directory", sync)
        stage.publish()
    assert tree(tmp_path) == ["out", "out/thesis"]


def test_revert_deletes_output_or_restores_old(tmp_path):
    target = tmp_path / "out"
    with stage_output(target) as stage:
        fill(stage)
        stage.publish()
        assert "deleted" in stage.revert()
    assert tree(tmp_path) == []
    make(target, "old")
    with stage_output(target, overwrite=True, is_checkpoint=yes) as stage:
        fill(stage)
        stage.publish()
        assert "restored" in stage.revert()
    assert (tree(tmp_path), (target / "model").read_text()) == (["out", "out/model"], "old")


def test_revert_refuses_replaced_output(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RefusedError, match="replaced"), stage_output(target) as stage:
        fill(stage)
        stage.publish()
        target.rename(tmp_path / "moved")
        target.mkdir()
        stage.revert()
    assert tree(tmp_path) == ["moved", "moved/model", "out"]


def test_error_removes_staging_unless_keep_on_error(tmp_path):
    for keep, left in ((False, []), (True, ["data", "data/model", "journal", "lock"])):
        with (
            pytest.raises(KeyError),
            stage_output(tmp_path / "out", keep_on_error=keep) as stage,
        ):
            fill(stage)
            stage.journal.write_text("j")
            raise KeyError
        root = tmp_path / ".out.ckptctl-staging"
        assert (tree(root) if root.exists() else []) == left
    with stage_output(tmp_path / "out", resume=True) as stage:
        assert (stage.data / "model").read_text() == "new"
        assert stage.journal.exists()
        assert stage.count_allocated_bytes() > 0


def test_stale_staging_is_discarded_only_with_restart(tmp_path):
    with pytest.raises(KeyError), stage_output(tmp_path / "out", keep_on_error=True) as stage:
        fill(stage)
        stage.journal.write_text("j")
        raise KeyError
    with pytest.raises(UnfinishedWorkError), stage_output(tmp_path / "out"):
        pass
    with stage_output(tmp_path / "out", restart=True) as stage:
        assert tree(stage.root) == ["data", "lock"]
        stage.publish()
    assert tree(tmp_path) == ["out"]


def test_second_run_is_refused_with_pid_of_first(tmp_path):
    with stage_output(tmp_path / "out") as stage:
        with pytest.raises(RefusedError, match=str(os.getpid())):
            make(tmp_path / "out")
        fill(stage)
        stage.publish()
    assert tree(tmp_path) == ["out", "out/model"]


def test_killed_exchange_leaves_old_output_without_journal(tmp_path, monkeypatch):
    """A run killed right after the exchange leaves the old output in the staging directory."""
    target = tmp_path / "out"
    make(target, "old")
    real = file_system.rename_atomically

    def killed(*args):
        real(*args)
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(file_system, "rename_atomically", killed)
        patch.setattr(publish, "_remove_staging", lambda _: [])
        with stage_output(target, overwrite=True, is_checkpoint=yes) as stage:
            stage.journal.write_text("j")
            fill(stage)
            stage.publish()
    assert (stage.data / "model").read_text() == "old"
    assert not stage.journal.exists()
    with pytest.raises(RefusedError):
        make(target)
    assert tree(tmp_path) == ["out", "out/model"], "the litter is swept by the next run"


def test_missing_renameat2_allows_publish_but_not_overwrite(tmp_path, monkeypatch):
    def unsupported(*_):
        raise file_system.UnsupportedRenameError

    monkeypatch.setattr(file_system, "rename_atomically", unsupported)
    (note,) = make(tmp_path / "out", "a")
    assert "renameat2" in note
    with pytest.raises(RefusedError, match="atomically"):
        make(tmp_path / "out", "b", overwrite=True, is_checkpoint=yes)
    assert (tree(tmp_path), (tmp_path / "out/model").read_text()) == (["out", "out/model"], "a")


def test_sync_failure_is_a_storage_error(tmp_path, monkeypatch):
    with pytest.raises(StorageError), stage_output(tmp_path / "out") as stage:
        fill(stage)
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "EIO")))
        stage.publish()


def test_sync_failure_after_rename_reports_published_output(tmp_path, monkeypatch):
    renamed, sync = file_system.rename_atomically, os.fsync

    def rename(*paths):
        renamed(*paths)
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "EIO")))

    monkeypatch.setattr(file_system, "rename_atomically", rename)
    with (
        pytest.raises(StorageError, match="cannot sync") as caught,
        stage_output(tmp_path / "out") as s,
    ):
        fill(s)
        s.publish()
    monkeypatch.setattr(os, "fsync", sync)
    assert "the output was published" in caught.value.why
    assert tree(tmp_path) == ["out", "out/model"]


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_sigterm_while_creating_staging_leaves_nothing(tmp_path, call):
    """It arrives as the first call of its kind in the staging directory returns."""

    def work() -> str:
        made = getattr(os, call)

        def make_and_terminate(path, *args, **options):
            result = made(path, *args, **options)
            if ".ckptctl-staging" in str(path):
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        setattr(os, call, make_and_terminate)
        try:
            with stage_output(tmp_path / "out"):
                return "it went on"
        except Terminated:
            return "terminated"

    assert limits.run_limited(work).result == "terminated"
    assert tree(tmp_path) == []


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_sigterm_while_removing_staging_leaves_nothing(tmp_path, call, fails):
    """It arrives before the first call of its kind, after an error or after the publication."""

    def work() -> str:
        delete = getattr(os, call)

        def terminate_and_delete(*args, **options):
            setattr(os, call, delete)
            os.kill(os.getpid(), signal.SIGTERM)
            delete(*args, **options)

        try:
            with stage_output(tmp_path / "out") as stage:
                (stage.data / "model").write_bytes(b"weights")
                if not fails:
                    stage.publish()
                setattr(os, call, terminate_and_delete)
                if fails:
                    raise RefusedError("it fails")
        except Terminated:
            return "terminated"
        return "it went on"

    assert limits.run_limited(work).result == "terminated"
    assert tree(tmp_path) == ([] if fails else ["out", "out/model"])


def test_sigterm_after_removal_keeps_staging_directory_of_next_run(tmp_path, monkeypatch):
    """The next run begins between the last call that removes the directory, and the signal."""
    remove = trash.delete_permanently

    def remove_and_interrupt(path):
        remove(path)
        if path.name == ".out.ckptctl-staging":
            monkeypatch.setattr(trash, "delete_permanently", remove)
            stack.enter_context(lock.hold_lock(path, tmp_path / "out", "writing"))
            raise KeyboardInterrupt

    with ExitStack() as stack, pytest.raises(KeyboardInterrupt), stage_output(tmp_path / "out"):
        monkeypatch.setattr(trash, "delete_permanently", remove_and_interrupt)
    assert tree(tmp_path) == [".out.ckptctl-staging", ".out.ckptctl-staging/lock"]


def test_symlinked_staging_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").mkdir()
    (tmp_path / ".out.ckptctl-staging").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="link"):
        make(tmp_path / "out")
    assert tree(tmp_path / "elsewhere") == ["data"]


@pytest.mark.parametrize("files", [("notes",), ("data/notes",), ("journal",), ("lock", "notes")])
@pytest.mark.parametrize("there", [False, True])
def test_foreign_folder_at_staging_path_is_untouched(tmp_path, files, there):
    """It has the name of a staging directory, and something of a user's in it."""
    root = tmp_path / ".out.ckptctl-staging"
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("precious")
    if there:
        (tmp_path / "out").write_text("it is swept for the one that exists, too")
    before = tree(root)
    with pytest.raises(RefusedError, match="exists" if there else "ckptctl did not create"):
        make(tmp_path / "out")
    assert tree(root) == before


def test_sigterm_raises_terminated_and_removes_staging(tmp_path):
    with pytest.raises(Terminated), stage_output(tmp_path / "out") as stage:
        fill(stage)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert tree(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_missing_free_space_is_refused(tmp_path):
    require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(RefusedError, match="space"):
        require_space(tmp_path, 1 << 60)
    require_space(tmp_path, 1 << 60, allocated=1 << 60)


def test_trash_removal_never_follows_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    victim = tmp_path / "victim"
    (victim / "sub").mkdir(parents=True)
    (victim / "sub" / "link").symlink_to(outside)
    trash.delete_permanently(victim)
    trash.delete_permanently(victim)
    assert tree(tmp_path) == ["outside", "outside/precious"]
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(StorageError):
        trash.clear_folder(tmp_path / "link")
    trash.delete_permanently(tmp_path / "link")
    assert tree(tmp_path) == ["outside", "outside/precious"]


def test_trash_removal_refuses_mounted_file_system(tmp_path, monkeypatch):
    (tmp_path / "victim" / "mounted").mkdir(parents=True)
    real = os.stat

    def stat(path, **options):
        found = real(path, **options)
        if path != "mounted":
            return found
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(RefusedError, match="mounted"):
        trash.delete_permanently(tmp_path / "victim")


def test_concurrent_runs_have_exactly_one_winner(tmp_path):
    script = (
        "import sys, pathlib; from ckptctl.storage.publish import stage_output\n"
        "from ckptctl.errors import RefusedError\n"
        "try:\n"
        "    with stage_output(pathlib.Path(sys.argv[1])) as stage:\n"
        "        for name in 'ab': (stage.data / name).write_text(sys.argv[2])\n"
        "        stage.publish()\n"
        "except RefusedError: sys.exit(6)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out"), str(n)])
        for n in range(6)
    ]
    codes = sorted(run.wait() for run in runs)
    assert codes == [0, 6, 6, 6, 6, 6]
    assert tree(tmp_path) == ["out", "out/a", "out/b"]
    assert (tmp_path / "out/a").read_text() == (tmp_path / "out/b").read_text()


def test_unwritable_destination_is_a_storage_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    require_writable(tmp_path / "out")
    require_writable(tmp_path / "a" / "b" / "out")
    with pytest.raises(StorageError, match="ENOTDIR"):
        require_writable(tmp_path / "file" / "a" / "out")
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path) != tmp_path)
    with pytest.raises(StorageError, match="EACCES") as caught:
        require_writable(tmp_path / "a" / "out")
    assert caught.value.where == str(tmp_path)


def test_empty_target_folder_keeps_its_mode(tmp_path):
    target = tmp_path / "out"
    target.mkdir(mode=0o700)
    with stage_output(target) as stage:
        fill(stage)
        assert not any(target.iterdir())
        stage.publish()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert sorted(tree(tmp_path)) == ["out", "out/model"]


def test_file_added_to_empty_target_meanwhile_is_kept(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    rename = Path.rename

    def late(path, to):
        (target / "mine").touch()
        return rename(path, to)

    with pytest.raises(RefusedError, match="exists"), stage_output(target) as stage:
        fill(stage)
        monkeypatch.setattr(Path, "rename", late)
        stage.publish()
    assert sorted(tree(tmp_path)) == ["out", "out/mine"]


def test_revert_leaves_previously_empty_folder_empty(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with stage_output(target) as stage:
        fill(stage)
        stage.publish()
        stage.revert()
    assert sorted(tree(tmp_path)) == ["out"]
