"""What announces the end of a run, handlers that are put back, and saves that have a deadline."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.background import async_save
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.distributed.saving.save import write_collectively
from ckptctl.errors import CkptError, RefusedError, StorageError, UsageError
from ckptctl.storage.threads import raise_on_sigterm
from ckptctl.tree import TreePath

STATE = {"w": torch.ones(2)}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Nobody handles these signals before; whoever did does afterwards."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    left = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert left == [signal.SIG_DFL, signal.SIG_DFL]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signals_announce_preemption(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, preemption=[signal.SIGTERM, "SIGUSR1"]) as manager:
        assert not manager.preempted()
        send(signal.SIGUSR1)
        assert manager.preempted() and manager.preempted(), "it stays so"
        send(signal.SIGTERM)
    with CheckpointManager(tmp_path) as manager:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not manager.preempted()


def test_signal_during_handler_setup_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_handler = signal.signal

    def setting(number: int, handler: Any) -> Any:
        before = set_handler(number, handler)
        if before is signal.SIG_DFL:
            send(number)
        return before

    monkeypatch.setattr(signal, "signal", setting)
    with CheckpointManager(tmp_path, preemption=[signal.SIGTERM]) as manager:
        assert manager.preempted()


def test_function_is_asked_every_n_calls(tmp_path: Path) -> None:
    asked: list[int] = []

    def notice() -> bool:
        asked.append(1)
        return len(asked) == 2

    with CheckpointManager(tmp_path, preemption=[notice]) as manager:
        assert [manager.preempted(every=3) for _ in range(7)] == [False] * 5 + [True] * 2
    assert len(asked) == 2


def test_existing_path_announces_preemption(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", preemption=[tmp_path / "stop"]) as manager:
        assert not manager.preempted()
        (tmp_path / "stop").touch()
        assert manager.preempted()


def test_failing_function_does_not_announce_preemption(tmp_path: Path) -> None:
    def broken() -> bool:
        raise OSError("no metadata service")

    with CheckpointManager(tmp_path, preemption=[broken, tmp_path / "stop"]) as manager:
        assert not manager.preempted()
        (tmp_path / "stop").touch()
        assert manager.preempted(), "the others are heard"


@pytest.mark.parametrize("given", ["SIGTERM", ["SIGNONE"], [1000], [None], [signal.SIGKILL]])
def test_invalid_preemption_sources_are_usage_errors(tmp_path: Path, given: Any) -> None:
    with pytest.raises(UsageError) as caught:
        CheckpointManager(tmp_path, preemption=given)
    assert caught.value.where == "preemption"


def test_signals_outside_main_thread_are_refused(tmp_path: Path) -> None:
    raised: list[RefusedError] = []

    def make() -> None:
        try:
            CheckpointManager(tmp_path, preemption=[signal.SIGTERM])
        except RefusedError as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0].why)


def test_earlier_handlers_are_called_and_restored(tmp_path: Path) -> None:
    heard: list[int] = []
    before: Callable[..., None] = lambda number, _: heard.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, before)
    with CheckpointManager(tmp_path, preemption=[signal.SIGTERM]) as manager:
        send(signal.SIGTERM)
        assert manager.preempted() and heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_managers_may_close_in_creation_order(tmp_path: Path) -> None:
    one = CheckpointManager(tmp_path / "1", preemption=[signal.SIGTERM])
    two = CheckpointManager(tmp_path / "2", preemption=[signal.SIGTERM])
    one.close()
    send(signal.SIGTERM)
    assert two.preempted()
    two.close()


def test_handler_set_later_is_kept_on_close(tmp_path: Path) -> None:
    later: Callable[..., None] = lambda *_: None  # noqa: E731
    with CheckpointManager(tmp_path, preemption=[signal.SIGTERM]):
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with raise_on_sigterm():
        manager = CheckpointManager(tmp_path, preemption=[signal.SIGTERM])
        manager.close()
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_forked_process_resets_only_sigterm(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, preemption=[signal.SIGTERM, signal.SIGUSR1]) as manager:
        manager._preemption.notices.restore_in_fork()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "not with others"


class Gate:
    """Holds writing back until it is opened; counts the saves that came to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.came: list[str] = []
        self.fail: set[str] = set()

        def held(state: Any, path: Path, *more: Any) -> TreePath:
            self.came.append(path.name)
            self.open.wait(60)
            if path.name in self.fail:
                raise CkptError("the disk is gone")
            return write_collectively(state, path, *more)

        monkeypatch.setattr(async_save, "write_collectively", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def test_urgent_save_joins_save_of_same_step(tmp_path: Path, gate: Gate) -> None:
    with CheckpointManager(tmp_path, sync=False) as manager:
        begun = manager.save(1, STATE)
        threading.Timer(0.05, gate.open.set).start()
        assert manager.save(1, STATE, urgent=True) is begun
        assert (tmp_path / "step-1" / ".metadata").exists()
        assert manager.save(1, STATE, urgent=True) is begun, "nor is it saved again afterwards"
    assert gate.came == ["step-1"]


def test_urgent_save_waits_even_for_failing_save(tmp_path: Path, gate: Gate) -> None:
    gate.fail = {"step-1"}
    with CheckpointManager(tmp_path, sync=False, when_busy="skip") as manager:
        manager.save(1, STATE)
        threading.Timer(0.05, gate.open.set).start()
        assert manager.save(2, STATE, urgent=True).path.name == "step-2"
        assert (tmp_path / "step-2" / ".metadata").exists()
        gate.fail = {"step-3"}
        with pytest.raises(CkptError, match="the disk is gone"):
            manager.save(3, STATE, urgent=True)
        gate.fail = set()
        manager.save(3, STATE, urgent=True)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_urgent_save_after_deadline_is_an_error(tmp_path: Path, gate: Gate) -> None:
    """An error, and the save goes on; hooks of the new one do not count."""
    slow = threading.Event()
    hooks = [lambda _: slow.wait(60)]
    with CheckpointManager(tmp_path, sync=False, deadline=0.05, on_published=hooks) as manager:
        for step in (1, 2):
            with pytest.raises(StorageError, match="missed its deadline") as caught:
                manager.save(step, STATE, urgent=True)
            assert caught.value.where == str(tmp_path / f"step-{step}")
        assert "step-1 was still being saved" in str(caught.value.why)
        gate.open.set()
        assert manager._saver and manager._saver.last
        manager._saver.last.decided.wait(60)
        assert manager.save(1, STATE, urgent=True).path.name == "step-1"
        slow.set()
    assert os.listdir(tmp_path) == ["step-1"]


def test_writer_process_survives_signal_to_all(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "process", "sync": False}
    with CheckpointManager(tmp_path, preemption=[signal.SIGTERM], **options) as manager:
        manager.save(1, STATE, urgent=True)
        child = manager._saver and manager._saver._writer._child
        assert child
        for pid in (child.pid, os.getpid()):
            os.kill(pid, signal.SIGTERM)
        assert manager.preempted()
        manager.save(2, STATE, urgent=True)
        assert child.poll() is None
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
