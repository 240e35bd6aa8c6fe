"""Preemption notices, which all ranks observe at the same step.

A signal can arrive on one rank in the middle of a step. If that rank stopped there, the others
would wait forever. So a notice is only recorded, and the ranks exchange notices when all of them
poll.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from ckptctl import option_checks as checks
from ckptctl.distributed.background.async_save import AsyncSaver
from ckptctl.distributed.background.save_thread import SaveFuture
from ckptctl.distributed.group import all_reduce_max
from ckptctl.errors import CkptError, RefusedError, StorageError, UsageError
from ckptctl.options import Option, Options, option_group
from ckptctl.ranks.coordinator import Coordinator
from ckptctl.tree import TreePath

Source = signal.Signals | str | Path | Callable[[], object]
ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT)
"""Signals by which a process ends the ones that it has forked."""
_log = logging.getLogger("ckptctl")


def _sources(given: Any) -> tuple[Source, ...]:
    """Check the sources of notices, and convert names of signals."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(
            f"{given!r} is not a list",
            hint="pass a list, for example `preemption=[signal.SIGTERM]`",
        )
    return tuple(map(_source, given))


def _source(given: Any) -> Source:
    if isinstance(given, Path):
        return given
    if callable(given):
        function: Callable[[], object] = given
        return function
    with suppress(KeyError, ValueError, TypeError):
        return signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    raise UsageError(
        f"{given!r} is not a source of preemption notices",
        why="a source is a signal, a path that will appear, or a function that returns a bool",
        hint='for example: preemption=[signal.SIGTERM, "SIGUSR1", Path("stop"), notice]',
    )


@option_group
class PreemptionOptions(Options):
    """Options for preemption notices and the deadline of urgent saves."""

    preemption: Annotated[
        Sequence[Source],
        Option(
            "Sources that make :meth:`preempted` true, the same on every rank. Signals "
            '(``signal.SIGTERM``, ``"SIGUSR1"``) are handled until :meth:`close`. A path '
            "(``pathlib.Path``) is a notice as soon as it exists. Functions take no arguments and "
            "return true when the run must end.",
            check=_sources,
        ),
    ] = ()
    deadline: Annotated[
        float | None,
        Option(
            "Seconds within which an urgent save must be on disk, counted from the preemption "
            "notice, or from the call if there was none. A later save is an error. None sets no "
            "limit.",
            check=checks.check_factor,
        ),
    ] = None


class Notices:
    """Notices on this rank by signals, files and functions.

    Signal handlers record the notice, and call the previous handler if it is a function.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.since: float | None = None
        self.closed = False
        self._before: dict[int, Any] = {}
        self._asked = [one for one in sources if not isinstance(one, signal.Signals)]
        self._broken: set[Source] = set()
        signals = [one for one in sources if isinstance(one, signal.Signals)]
        if signals and threading.current_thread() is not threading.main_thread():
            raise RefusedError(
                "this thread cannot handle signals",
                why="Python handles signals only in the main thread",
                hint="create the manager there, or pass a path or a function as `preemption`",
            )
        try:
            for number in signals:
                self._handle(number)
        except BaseException:
            self.close()
            raise
        _all.add(self)

    def look(self) -> float | None:
        """Poll files and functions, and return the time of the first notice, or None without any.

        The time is that of `time.monotonic`, in seconds.
        """
        if self.since is None and any(map(self._says, self._asked)):
            self.since = time.monotonic()
        return self.since

    def close(self) -> None:
        """Restore the previous signal handlers, unless other code has replaced ours."""
        self.closed = True
        for number in self._before:
            self.give_back(number)

    def give_back(self, number: int) -> None:
        """Restore the previous handler of one signal, if ours is still installed."""
        before = _open(self._before[number], number)
        if signal.getsignal(number) == self._note:
            try:
                signal.signal(number, before)
            except ValueError:  # not the main thread, so ours stays and calls the previous one
                _log.warning(
                    "the handler of %s was not restored, because this is not the main thread",
                    signal.Signals(number).name,
                )

    def in_fork(self) -> None:
        """Restore the previous handlers of termination signals in a forked process."""
        for number in set(ENDS_CHILDREN) & self._before.keys():
            self.give_back(number)

    def before(self, number: int) -> Any:
        """Return the previous handler of a signal."""
        return self._before[number]

    def _handle(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if before is None:
            raise RefusedError(
                f"{number.name} has a handler that could not be restored",
                why="Python did not install it",
            )
        self._before.setdefault(number, before)  # first, because the signal may arrive at once
        try:
            signal.signal(number, self._note)
        except OSError as error:
            raise UsageError(f"{number.name} cannot be handled", where="preemption") from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.closed and self.since is None:
            self.since = time.monotonic()
        before = _open(self._before[number], number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _says(self, source: Source) -> bool:
        try:
            return source.exists() if isinstance(source, Path) else bool(source())  # type: ignore[operator]
        except Exception:
            if source not in self._broken:
                _log.exception("%s failed to report whether this run must end", source)
            self._broken.add(source)
            return False


def _open(handler: Any, number: int) -> Any:
    """Return *handler*, or the one before it if its notices are closed."""
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, Notices) and owner.closed:
        handler = owner.before(number)
        owner = getattr(handler, "__self__", None)
    return handler


_all: weakref.WeakSet[Notices] = weakref.WeakSet()


def _in_fork() -> None:
    for one in list(_all):
        one.in_fork()


os.register_at_fork(after_in_child=_in_fork)


class Preemption:
    """Preemption state of a run, exchanged so that all ranks learn of it in the same call."""

    def __init__(self, options: PreemptionOptions, ranks: Callable[[], Coordinator]) -> None:
        self.notices = Notices(options.preemption)
        self._sources = options.preemption
        self._deadline = options.deadline
        self._ranks = ranks
        self._calls = 0
        self._since: float | None = None  # first notice on any rank, by this rank's clock

    def noticed(self, every: int) -> bool:
        """Return whether any rank had a notice, exchanged at each *every*-th call."""
        self._calls += 1
        if self._since is not None or not self._sources or self._calls % every:
            return self._since is not None
        own, now = self.notices.look(), time.monotonic()
        age = -1 if own is None else round((now - own) * 1e6)
        (oldest,) = all_reduce_max(self._ranks(), [age])
        if oldest >= 0:
            self._since = now - oldest / 1e6
        if own is not None:
            _log.warning("this run must end: the preemption notice came %.1f s ago", now - own)
        return oldest >= 0

    def hurry(self, saver: AsyncSaver) -> Hurry:
        """Begin an urgent save with *saver*, whose deadline counts from the notice or from now."""
        start = time.monotonic() if self._since is None else self._since
        return Hurry(saver, start, self._deadline)


class Hurry:
    """Urgent save that waits until its deadline, with the same outcome on all ranks."""

    def __init__(self, saver: AsyncSaver, start: float, deadline: float | None) -> None:
        self._saver = saver
        self._start = start
        self._deadline = deadline

    def joined(self, path: TreePath) -> SaveFuture | None:
        """Wait for the last save, and return it if it saved to *path* and succeeded, or None.

        Raises:
            StorageError: It missed the deadline and continues. This is raised on every rank.
        """
        last = self._saver.last
        if last is None:
            return None
        same = last.path == path and not last.skipped
        self._wait(last, path, whole=not same)
        if same and not _failed(last):
            return last
        with suppress(CkptError):  # it was logged when it failed
            self._saver.wait()
        return None

    def durable(self, future: SaveFuture) -> SaveFuture:
        """Wait until the checkpoint is published, and return *future*.

        Raises:
            StorageError: It missed the deadline and continues. This is raised on every rank.
            CkptError: The save failed. It is raised on every rank.
        """
        self._wait(future, future.path)
        if _failed(future):
            self._saver.wait()
        return future

    def _wait(self, future: SaveFuture, path: TreePath, *, whole: bool = False) -> None:
        """Wait for the outcome of a save, and if *whole*, for its callbacks.

        A save ends on all ranks at about the same time, so one rank in time is enough.
        """

        def ended(seconds: float | None) -> bool:
            return bool(wait([future], seconds).done) if whole else future.decided.wait(seconds)

        if self._deadline is not None:
            own = ended(max(0.0, self._start + self._deadline - time.monotonic()))
            (any_rank,) = all_reduce_max(self._saver.groups()[0], [own])
            if not any_rank:
                other = future.path != path
                raise StorageError(
                    "an urgent save missed its deadline",
                    where=str(path),
                    why=f"`deadline` is {self._deadline:g} s after the notice"
                    + (f"; {future.path.name} was still being saved" if other else ""),
                    hint="request an earlier notice, for example with `sbatch --signal`, or save "
                    "more often; the save continues while the process is alive",
                )
        ended(None)


def _failed(future: SaveFuture) -> bool:
    return future.done() and future.exception() is not None
