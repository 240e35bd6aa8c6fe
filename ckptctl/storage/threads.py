"""Threads at work: how many, how far they are, one that fails ends all, and SIGTERM does."""

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

_WORKER = "ckptctl-worker"
Advance = Callable[[int], None]
"""Called with the bytes done since its last call."""


PATIENCE = 0.8
"""Seconds."""

MOST = 16
"""Threads of a process by default: what has been measured to gain."""
LAUNCHERS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "SLURM_STEP_TASKS_PER_NODE",  # srun; like "4(x2)"
)
"""Where launchers say how many processes they start on each host."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processes_here() -> int | None:
    """Return the number of processes that the launcher started on this host; None: unknown."""
    for name in LAUNCHERS:
        digits = os.environ.get(name, "").partition("(")[0].partition(",")[0]
        if digits.isdecimal() and int(digits):
            return int(digits)
    return None


def default_threads(processes: int = 1) -> int:
    """Return the number of threads of one of several processes: its part of the cores.

    More threads than cores make a save of many ranks slower.
    """
    return max(1, min(MOST, cores() // (_processes_here() or processes)))


class Supervisor:
    """Stops all threads of a run when one fails, and reports progress to the thread that waits."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.changed = threading.Condition()
        self._errors: list[BaseException] = []
        self._reported = 0

    def ended(self, error: BaseException | None, leave: Callable[[], None]) -> None:
        """Take note that a thread ended, and stop the others if it failed.

        Args:
            error: What went wrong in it; None: nothing.
            leave: Takes the thread off those at work, in one step with that: to whoever finds the
                work over, every error is known.
        """
        with self.changed:
            if error is not None:
                self._errors.append(error)
                self.stop.set()
            leave()
            self.changed.notify_all()

    def watch(
        self, finished: Callable[[], bool], total: Callable[[], int], progress: Advance
    ) -> None:
        """Wait until *finished*, and report what was done meanwhile."""
        while True:
            with self.changed:
                over = finished()
                if not over and not self._errors:
                    self.changed.wait(0.05)
            done = total()
            if done > self._reported:
                progress(done - self._reported)
                self._reported = done
            if self._errors:
                raise self._errors[0]
            if over:
                return


class Crew:
    """Threads that do the same work.

    Args:
        supervisor: Learns of each thread that it ended, and how.
        work: What each of them calls.
        count: How many there are.
    """

    def __init__(self, supervisor: Supervisor, work: Callable[[], None], count: int) -> None:
        self._supervisor = supervisor
        self._work = work
        self._threads = [daemon(self._run) for _ in range(count)]
        self._working = count

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def is_done(self) -> bool:
        """Return whether all threads have ended."""
        return not self._working

    def join(self) -> None:
        """Wait a moment for the threads; one that hangs in the kernel holds only descriptors."""
        end = time.monotonic() + PATIENCE
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._work()
        except BaseException as error:
            failure = error
        self._supervisor.ended(failure, self._leave)

    def _leave(self) -> None:
        self._working -= 1


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the search for cycles: it walks all objects again and again while many are made."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; handled like Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless somebody else handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:  # nobody took it over meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def daemon(target: Callable[..., None], *args: object) -> threading.Thread:
    """Return a thread, not started, in this context, that does not keep the process alive."""
    run = copy_context().run
    return threading.Thread(target=run, args=(target, *args), name=_WORKER, daemon=True)


def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads in this context.

    Its module brings `logging`: most commands need neither.
    """
    from concurrent.futures import ThreadPoolExecutor

    context = copy_context()

    def enter() -> None:
        for variable, value in context.items():
            variable.set(value)

    return ThreadPoolExecutor(threads, initializer=enter)


def leave(code: int) -> None:
    """End the process with *code* at once if a :func:`daemon` is still at work, else do nothing.

    While the interpreter shuts down it ends such a thread where that next asks for it. Inside of
    torch, which may be just being imported, the whole process is aborted by that.
    """
    if all(thread.name != _WORKER for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


Watch = Callable[[int], AbstractContextManager[Advance | None]]
"""Takes the bytes in all; its context yields what is to be called with bytes done, or None."""


def unwatched(_: int) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


class ByteCount:
    """Counts the bytes that are done, from any thread, and passes them on to a progress bar."""

    def __init__(self, advance: Advance | None = None) -> None:
        self.total = 0
        self._advance = advance
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Add *nbytes*."""
        with self._lock:
            self.total += nbytes
        if self._advance:
            self._advance(nbytes)


@contextmanager
def one_of_many(advance: Advance | None, nbytes: int) -> Iterator[Advance]:
    """Yield what is to be called with the bytes of one part of the whole, as they are done."""
    left = nbytes

    def told(done: int) -> None:
        nonlocal left
        done = min(done, left)
        left -= done
        if advance and done:
            advance(done)

    try:
        yield told
    finally:
        told(left)
