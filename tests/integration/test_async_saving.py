"""Saving in the background: what is saved is what was there at the call, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ckptctl.distributed.background import host_memory
from ckptctl.distributed.background.async_save import AsyncSaver, Mode, async_save
from ckptctl.distributed.background.host_memory import RECENT_SAVES
from ckptctl.distributed.saving import save as collective_save
from ckptctl.errors import RefusedError, StorageError, UsageError
from ckptctl.storage.destinations import get_staging_directory
from ckptctl.tree import TreePath
from tests.gloo import REPOSITORY, RankFailure, run_on_ranks
from tests.integration.async_ranks import (
    fail_alike,
    group_destroyed,
    no_thread_starts,
    prepare_too_much,
    rank_killed,
    replicated,
    save_while_training,
    skip_alike,
    two_savers,
    without_collectives,
)
from tests.integration.dcp_ranks import check_on_ranks
from tests.integration.training_ranks import load_everywhere, state


@pytest.mark.slow
def test_async_save_ignores_updates_after_snapshot(tmp_path: Path) -> None:
    run_on_ranks(save_while_training, (1, 3, 4), tmp_path)
    expected = {f"model.{name}": tensor for name, tensor in state().items()}
    expected |= {"step": 5, "seen.steps": [5]}
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2 * (1 + 2 + 3)
    check_on_ranks([(folder, expected) for folder in folders], (2,))


@pytest.mark.slow
def test_busy_rank_makes_all_ranks_skip(tmp_path: Path) -> None:
    run_on_ranks(skip_alike, (2,), tmp_path)


@pytest.mark.slow
def test_failures_are_raised_on_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(fail_alike, (2,), tmp_path)


@pytest.mark.slow
def test_concurrent_savers_save_independently(tmp_path: Path) -> None:
    run_on_ranks(two_savers, (4,), tmp_path)
    names = {f"{name}-{step}" for name in ("half0", "half1", "whole") for step in range(4)}
    assert {path.name for path in tmp_path.iterdir()} == names
    check_on_ranks(
        [(tmp_path / f"half{half}-3", {"a": torch.full((1000,), float(half))}) for half in (0, 1)],
        (2,),
    )


def test_destroyed_process_group_leaves_no_partial_save(tmp_path: Path) -> None:
    run_on_ranks(group_destroyed, (2,), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"good", "late"}


def test_killed_rank_publishes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(RankFailure):
        run_on_ranks(rank_killed, (3,), root)
    assert [path.name for path in root.iterdir()] == ["step-1"]


@pytest.mark.slow
def test_replicated_tensors_are_staged_only_by_writing_rank(tmp_path: Path) -> None:
    run_on_ranks(replicated, (3,), tmp_path)
    expected = [
        {f"l{index}": torch.full((2000, 10), float(step)) for index in range(6)}
        | {"own2": torch.full((6, 10), float(step)), "step": step}
        for step in range(5)
    ]
    check_on_ranks([(tmp_path / f"{step}", expected[step]) for step in range(5)], (1,))


@pytest.mark.slow
def test_async_save_without_collectives_loads_on_other_ranks(tmp_path: Path) -> None:
    run_on_ranks(without_collectives, (2,), tmp_path)
    run_on_ranks(load_everywhere, (3,), tmp_path)


def test_callbacks_run_when_staged_and_published(tmp_path: Path) -> None:
    seen: list[tuple[str, TreePath]] = []
    future = async_save(
        {"a": torch.ones(3)},
        tmp_path / "a",
        on_staged=lambda path: seen.append(("staged", path)),
        on_published=lambda path: seen.append((f"published {path.is_dir()}", path)),
    )
    assert future.result() == tmp_path / "a"
    assert seen == [("staged", tmp_path / "a"), ("published True", tmp_path / "a")]


def test_callback_errors_are_reported_without_failing_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Path) -> None:
        raise ValueError("no upload")

    future = async_save({"a": torch.ones(3)}, tmp_path / "a", on_staged=fails, on_published=fails)
    assert future.result() == tmp_path / "a"
    assert [str(error) for error in future.callback_errors] == ["no upload"] * 2
    assert "on_published" in capsys.readouterr().err

    def exits(_: Path) -> None:
        raise SystemExit(3)

    future = async_save({"a": torch.ones(3)}, tmp_path / "b", on_staged=exits, on_published=exits)
    assert future.result(timeout=60) and len(future.callback_errors) == 2
    assert async_save({"a": torch.ones(3)}, tmp_path / "c").result()


def test_callback_saving_on_its_saver_is_refused(tmp_path: Path) -> None:
    with AsyncSaver() as saver:

        def again(_: Path) -> None:
            saver.save({"a": torch.ones(3)}, tmp_path / "b")

        future = saver.save({"a": torch.ones(3)}, tmp_path / "a", on_published=again)
        future.result()
    assert isinstance(future.callback_errors[0], RefusedError)


def test_wait_raises_failure_and_saver_stays_usable(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        saver.save({"a": torch.ones(3)}, tmp_path / "a")
        saver.save({"a": torch.ones(3)}, tmp_path / "a")
        with pytest.raises(RefusedError):
            saver.wait()
        saver.save({"a": torch.ones(3)}, tmp_path / "b")
    assert (tmp_path / "b").is_dir()


def test_thread_start_failure_fails_save_and_frees_memory(tmp_path: Path) -> None:
    state = {"a": torch.ones(1000)}
    with AsyncSaver() as saver:
        for after in (False, True):
            if after:
                saver.save(state, tmp_path / "a").result()
            with no_thread_starts(), pytest.raises(StorageError, match="cannot start a thread"):
                saver.save(state, tmp_path / "b")
            saver.wait()
            assert not saver._pool._used
        assert saver.save(state, tmp_path / "b").result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_writer_process_frees_unused_staging_memory(tmp_path: Path) -> None:
    with AsyncSaver(mode="process") as saver:
        for step, size in enumerate([1 << 24, *[1 << 20] * (RECENT_SAVES + 1)]):
            saver.save({"a": torch.ones(size)}, tmp_path / f"{step}", sync=False).result()
        assert saver._pool.nbytes < 1 << 23
        assert saver._writer._child
        maps = Path(f"/proc/{saver._writer._child.pid}/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps if "memfd:ckptctl" in line]
        assert sum(int(end, 16) - int(start, 16) for start, end in spans) < 1 << 23


def test_close_raises_failure_of_last_save(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    saver = AsyncSaver()
    saver.save({"a": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(RefusedError):
        saver.close()


def test_unknown_async_save_options_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="fiber") as caught:
        async_save({}, "x", mode="fiber")  # type: ignore[arg-type]
    assert caught.value.where == "mode"
    with pytest.raises(UsageError, match="never") as caught:
        async_save({}, "x", when_busy="never")  # type: ignore[arg-type]
    assert caught.value.where == "when_busy"
    with pytest.raises(UsageError, match="mode"):
        AsyncSaver(mode="fiber")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_prepared_memory_is_used_by_first_save(tmp_path: Path, mode: Mode) -> None:
    state = {"a": torch.arange(5000), "b": torch.ones(3, 3).t(), "step": 1}
    with AsyncSaver(mode=mode) as saver:
        saver.prepare({"step": 1})
        for _ in range(3):
            ready = saver.prepare(state)
        ready.result()
        (region,) = saver._pool._free
        child = saver._writer._child
        assert (child is not None) == (mode == "process")
        future = saver.save(state, tmp_path / "a", sync=False)
        assert saver._pool.nbytes == region.nbytes
        assert future.result() == tmp_path / "a"
        assert saver._writer._child is child
        saver.prepare(state)
    assert saver._pool.nbytes == 0
    with pytest.raises(RefusedError, match="is closed"):
        saver.prepare(state)
    with pytest.raises(UsageError, match="not a state dict"):
        AsyncSaver().prepare([])  # type: ignore[arg-type]


def test_save_during_prepare_reuses_prepared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = host_memory.populate_pages, threading.Event()

    def slow(address: int, nbytes: int) -> None:
        begun.set()
        time.sleep(0.2)
        real(address, nbytes)

    monkeypatch.setattr(host_memory, "populate_pages", slow)
    with AsyncSaver() as saver:
        saver.prepare({"a": torch.ones(5000)})
        begun.wait()
        saver.save({"a": torch.ones(5000)}, tmp_path / "a", sync=False).result()
        assert len(saver._pool._free) == 1


def test_close_waits_for_prepare() -> None:
    saver = AsyncSaver(mode="process")
    ready = saver.prepare({"a": torch.ones(5000)})
    saver.close()
    assert ready.done()
    assert saver._writer._child is None and saver._pool.nbytes == 0


def test_prepare_over_memory_limit_fails_next_save(tmp_path: Path) -> None:
    run_on_ranks(prepare_too_much, (2,), tmp_path)


def test_killed_writer_process_fails_one_save(tmp_path: Path) -> None:
    with AsyncSaver(mode="process") as saver:
        tensor = torch.ones(1000)
        saver.save({"a": tensor}, tmp_path / "a").result()

        def kill(_: Path) -> None:
            assert saver._writer._child
            os.kill(saver._writer._child.pid, signal.SIGKILL)

        future = saver.save({"a": tensor}, tmp_path / "b", on_staged=kill)
        assert isinstance(future.exception(), StorageError)
        with pytest.raises(StorageError, match="exited before"):
            saver.save({"a": tensor}, tmp_path / "c")
        assert saver.save({"a": tensor}, tmp_path / "c").result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_writer_process_start_failure_fails_only_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncSaver(mode="process") as saver:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "none"))
            future = saver.save({"a": torch.ones(1000)}, tmp_path / "a")
            assert isinstance(error := future.exception(), StorageError)
        with pytest.raises(StorageError, match=r"cannot start: .*ENOENT"):
            saver.wait()
        assert error.where == str(tmp_path / "none")
        assert saver.save({"a": torch.ones(1000)}, tmp_path / "a").result()


def test_write_failure_in_writer_process_publishes_nothing(tmp_path: Path) -> None:
    def crowd(run: collective_save.CollectiveSave) -> collective_save.CollectiveSave:
        """Take the name of the data file before the other process makes it."""
        data = get_staging_directory(tmp_path / "b") / "data"
        (data / "__0_0.distcp").symlink_to("elsewhere")
        return run

    with AsyncSaver(mode="process") as saver:
        saver.save({"a": torch.ones(1000)}, tmp_path / "a").result()
        with pytest.MonkeyPatch.context() as patch:
            inside = collective_save.CollectiveSave.write_and_publish
            patch.setattr(
                collective_save.CollectiveSave,
                "write_and_publish",
                lambda run, files: inside(crowd(run), files),
            )
            future = saver.save({"a": torch.ones(1000)}, tmp_path / "b")
            assert isinstance(future.exception(), StorageError)
        with pytest.raises(StorageError):
            saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


TRAINER = """
    import os, sys, threading, time, torch
    from pathlib import Path
    from ckptctl.distributed.background.async_save import async_save
    root, mode = Path(sys.argv[1]), sys.argv[2]
    tensor = torch.ones(1 << 20)
    async_save({"a": tensor}, root / "step-1", mode=mode).result()
"""


def trainer(script: str, root: Path, mode: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(TRAINER) + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(root), mode],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "end"),
    [
        pytest.param("process", "", marks=pytest.mark.slow),
        pytest.param("thread", "1 / 0", marks=pytest.mark.slow),
        ("thread", ""),
        pytest.param("process", "1 / 0", marks=pytest.mark.slow),
        pytest.param("thread", "sys.exit(3)", marks=pytest.mark.slow),
        pytest.param("thread", "raise SystemExit(3)", marks=pytest.mark.slow),
    ],
)
def test_interpreter_exit_waits_for_async_save(tmp_path: Path, mode: str, end: str) -> None:
    child = trainer(
        f"""
        wait = lambda _: time.sleep(0.5)
        async_save({{"a": tensor}}, root / "step-2", mode=mode, on_staged=wait)
        {end}
        """,
        tmp_path,
        mode,
    )
    child.communicate(timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert FileSystemReader(tmp_path / "step-2").read_metadata()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        pytest.param("process", "written", marks=pytest.mark.slow),
        pytest.param("process", "staged", marks=pytest.mark.slow),
        ("thread", "written"),
        pytest.param("thread", "staged", marks=pytest.mark.slow),
    ],
)
def test_killed_trainer_keeps_last_checkpoint(tmp_path: Path, mode: str, moment: str) -> None:
    """Killed while sixteen threads write, or when they are done."""
    child = trainer(
        """
        from ckptctl.distributed.saving import save as collective_save
        publish = collective_save.CollectiveSave._publish_metadata
        def late(self, written):
            print("written", flush=True)
            time.sleep(60)
            return publish(self, written)
        collective_save.CollectiveSave._publish_metadata = late
        state = {str(number): torch.ones(1 << 19) for number in range(48)}
        staged = lambda _: print("staged", flush=True)
        how = {"mode": mode, "overwrite": True, "on_staged": staged, "jobs": 16, "files": 7}
        async_save(state, root / "step-2", **how)
        """,
        tmp_path,
        mode,
    )
    try:
        assert child.stdout
        assert f"{moment}\n" in child.stdout
        before = sorted(file.name for file in (tmp_path / "step-1").iterdir())
        children = _children(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert len(children) == (mode == "process")
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == ["step-1"]
    assert sorted(file.name for file in (tmp_path / "step-1").iterdir()) == before
    for pid in children:
        _wait_gone(pid)
    assert async_save({"a": torch.ones(3)}, tmp_path / "step-2").result()


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(one)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for one in (task / "children").read_text().split()
    ]


def _wait_gone(pid: int) -> None:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.slow
def test_forked_child_cannot_save_and_parent_finishes(tmp_path: Path) -> None:
    child = trainer(
        """
        from ckptctl.distributed.background.async_save import AsyncSaver
        from ckptctl.errors import RefusedError
        saver = AsyncSaver(mode=mode)
        hold = threading.Event()
        future = saver.save({"a": tensor}, root / "step-2", on_staged=lambda _: hold.wait())
        pid = os.fork()
        if pid == 0:
            try:
                saver.save({"a": tensor}, root / "fork")
            except RefusedError:
                print("refused", flush=True)
            saver.close()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        hold.set()
        print(future.result().name)
        """,
        tmp_path,
        "process",
    )
    output, _ = child.communicate(timeout=60)
    assert output.split() == ["refused", "step-2"]
    assert child.returncode == 0


def test_close_stops_threads_and_writer_process(tmp_path: Path) -> None:
    before = threading.active_count()
    with AsyncSaver(mode="process") as saver:
        saver.save({"a": torch.ones(1 << 20)}, tmp_path / "a")
        child = saver._writer
    assert threading.active_count() == before
    assert child._child is None
