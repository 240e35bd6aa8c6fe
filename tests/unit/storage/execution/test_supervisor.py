"""Threads at work: whoever sees one gone sees what it failed of, too."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptctl.errors import StorageError
from ckptctl.storage import threads
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.execution.run_files import LocalSink
from ckptctl.storage.threads import Supervisor
from tests.unit.storage.execution.test_executor import Case


@pytest.fixture
def hesitating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads be interrupted before they say what they failed of."""
    ended = Supervisor.report_thread_end

    def later(self, error, *args):
        time.sleep(0.2 if error else 0)
        ended(self, error, *args)

    monkeypatch.setattr(Supervisor, "report_thread_end", later)
    monkeypatch.setattr(threads, "JOIN_SECONDS", 0)


@pytest.mark.usefixtures("hesitating")
def test_error_of_last_worker_is_raised(tmp_path, monkeypatch):
    case = Case(tmp_path)
    plan = case.everything()
    real, calls = os.pwrite, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EIO, "no")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StorageError, match="EIO"):
        case.run(plan, jobs=1)


@pytest.mark.usefixtures("hesitating")
def test_file_sync_failure_is_raised(tmp_path, monkeypatch):
    case = Case(tmp_path)
    plan = case.everything()
    real = os.fsync

    def failing(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="EIO"):
        case.run(plan)


@pytest.mark.parametrize("jobs", [1, 3])
def test_descriptor_close_failure_ends_run(tmp_path, monkeypatch, jobs):
    case = Case(tmp_path)
    plan = case.everything()
    close = os.close

    def failing(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        close(descriptor)
        if name == "all.bin" and sys._getframe(1).f_code is LocalSink.close.__code__:
            raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "close", failing)
    ended = threading.Event()

    def run():
        with pytest.raises(StorageError, match=r"close.*EIO"):
            execute_plan(plan, case.out, ExecutionOptions(jobs=jobs), lambda _: None)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(10)


def test_worker_error_is_set_before_worker_counts_as_ended():
    watcher = Supervisor()
    seen = []

    def leave():
        with pytest.raises(StorageError) as caught:
            watcher.watch_until(lambda: True, lambda: 0, seen.append)
        seen.append(caught.value)

    error = StorageError("injected")
    watcher.report_thread_end(error, leave)
    assert seen == [error]
    assert watcher.stop.is_set()
