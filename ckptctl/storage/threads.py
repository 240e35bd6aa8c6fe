"""Worker threads with progress reports, error propagation and handling of SIGTERM."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_WORKER_NAME = "ckptctl-worker"
Advance = Callable[[int], None]
"""Progress callback, called with the number of bytes processed since the last call."""


JOIN_SECONDS = 0.8
"""Maximum seconds to wait until all threads of a group have ended."""

MAX_DEFAULT_THREADS = 16
"""Maximum default number of threads per process, because more threads were not faster."""
LAUNCHER_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "SLURM_STEP_TASKS_PER_NODE",  # srun; like "4(x2)"
)
"""Environment variables in which launchers set the number of processes per host."""


def count_cores() -> int:
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_default_thread_count(processes: int = 1) -> int:
    """Return the default number of threads of a process that shares the cores of its host.

    All processes together get at most one thread per core, because more threads make saves slower.

    Args:
        processes: Number of processes on the host, used unless the launcher has set it in an
            environment variable.
    """
    for name in LAUNCHER_VARIABLES:
        digits = os.environ.get(name, "").partition("(")[0].partition(",")[0]
        if digits.isdecimal() and int(digits):
            processes = int(digits)
            break
    return max(1, min(MAX_DEFAULT_THREADS, count_cores() // processes))


class Supervisor:
    """Shared state of the threads of a run, which stops them if one fails and reports progress."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.changed = threading.Condition()
        self._errors: list[BaseException] = []
        self._reported = 0

    def report_thread_end(
        self, error: BaseException | None, deregister: Callable[[], None]
    ) -> None:
        """Register the end of a thread, and stop the other threads if it failed.

        Args:
            error: Exception that ended the thread, or None.
            deregister: Removes the thread from the active threads. Called under the same lock, so
                that all errors are known when no thread is active.
        """
        with self.changed:
            if error is not None:
                self._errors.append(error)
                self.stop.set()
            deregister()
            self.changed.notify_all()

    def watch_until(
        self, finished: Callable[[], bool], total: Callable[[], int], progress: Advance
    ) -> None:
        """Report progress until *finished* returns True, or raise the first error of a thread.

        Args:
            finished: Returns whether all work is done.
            total: Returns the number of bytes processed so far.
            progress: Called with the number of bytes processed since the last call.
        """
        while True:
            with self.changed:
                is_finished = finished()
                if not is_finished and not self._errors:
                    self.changed.wait(0.05)
            done = total()
            if done > self._reported:
                progress(done - self._reported)
                self._reported = done
            if self._errors:
                raise self._errors[0]
            if is_finished:
                return


class ThreadGroup:
    """Group of threads that run the same function.

    Args:
        supervisor: Shared state, which is notified when a thread ends.
        work: Function to run in each thread.
        count: Number of threads.
    """

    def __init__(self, supervisor: Supervisor, work: Callable[[], None], count: int) -> None:
        self._supervisor = supervisor
        self._work = work
        self._threads = [create_daemon(self._run_work) for _ in range(count)]
        self._active_count = count

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        """Start all threads of the group."""
        for thread in self._threads:
            thread.start()

    def is_done(self) -> bool:
        """Return whether all threads of the group have ended."""
        return not self._active_count

    def join(self) -> None:
        """Wait up to ``JOIN_SECONDS`` for the threads, because a thread may hang in the kernel."""
        end = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def _run_work(self) -> None:
        failure: BaseException | None = None
        try:
            self._work()
        except BaseException as error:
            failure = error
        self._supervisor.report_thread_end(failure, self._deregister_thread)

    def _deregister_thread(self) -> None:
        self._active_count -= 1


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector, which is slow while many objects are created."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM, which is handled like Ctrl-C."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise :class:`Terminated` in the block on SIGTERM, unless another handler is installed."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def raise_terminated(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is raise_terminated:  # not replaced meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def create_daemon(target: Callable[..., None], *args: object) -> threading.Thread:
    """Create a daemon thread that runs in a copy of the current context, but do not start it."""
    run = copy_context().run
    return threading.Thread(target=run, args=(target, *args), name=_WORKER_NAME, daemon=True)


def create_thread_pool(threads: int) -> ThreadPoolExecutor:
    """Create a thread pool whose threads use the current context variables.

    `concurrent.futures` is imported here because it imports `logging`, and most commands need
    neither.
    """
    from concurrent.futures import ThreadPoolExecutor

    context = copy_context()

    def set_context() -> None:
        for variable, value in context.items():
            variable.set(value)

    return ThreadPoolExecutor(threads, initializer=set_context)


def exit_if_daemons_run(code: int) -> None:
    """Exit with *code* immediately if a :func:`create_daemon` thread is still running.

    On a normal exit, the interpreter ends such a thread when the thread next acquires the GIL. If
    the thread is inside of torch, for example importing it, this aborts the process.
    """
    if all(thread.name != _WORKER_NAME for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


StartProgress = Callable[[int], AbstractContextManager[Advance | None]]
"""Starts a progress display for a total number of bytes.

The context manager yields the progress callback, or None if no progress is shown.
"""


def ignore_progress(_: int) -> AbstractContextManager[None]:
    """Return a context manager that yields no progress callback."""
    return nullcontext()


class ByteCounter:
    """Thread-safe counter of bytes that forwards them to a progress bar."""

    def __init__(self, advance: Advance | None = None) -> None:
        self.total = 0
        self._advance = advance
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Add *nbytes* to the total number of bytes and report them to the progress bar."""
        with self._lock:
            self.total += nbytes
        if self._advance:
            self._advance(nbytes)


@contextmanager
def report_part(advance: Advance | None, nbytes: int) -> Iterator[Advance]:
    """Yield a progress callback for a task of *nbytes* bytes.

    When the block ends, the bytes that it has not reported are reported to *advance*.
    """
    remaining = nbytes

    def report_done(done: int) -> None:
        nonlocal remaining
        done = min(done, remaining)
        remaining -= done
        if advance and done:
            advance(done)

    try:
        yield report_done
    finally:
        report_done(remaining)
