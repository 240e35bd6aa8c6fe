"""Preemption notices, which all ranks observe at the same step.

A signal can arrive on one rank in the middle of a step. If that rank stopped there, the other ranks
would wait forever. So a signal handler only records the notice, and the ranks exchange their
notices when all of them poll.
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
from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.tree import TreePath

NoticeSource = signal.Signals | str | Path | Callable[[], object]
CHILD_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that a process sends to terminate the processes that it has forked."""
_log = logging.getLogger("ckptctl")


def check_sources(value: Any) -> tuple[NoticeSource, ...]:
    """Check the sources of preemption notices, and convert signal names to signals."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            f"{value!r} is not a list",
            hint="pass a list, for example `preemption=[signal.SIGTERM]`",
        )
    return tuple(map(_parse_source, value))


def _parse_source(value: Any) -> NoticeSource:
    if isinstance(value, Path):
        return value
    if callable(value):
        function: Callable[[], object] = value
        return function
    with suppress(KeyError, ValueError, TypeError):
        return signal.Signals[value] if isinstance(value, str) else signal.Signals(value)
    raise UsageError(
        f"{value!r} is not a source of preemption notices",
        why="a source is a signal, a path that will appear, or a function that returns a bool",
        hint='for example: preemption=[signal.SIGTERM, "SIGUSR1", Path("stop"), notice]',
    )


@option_group
class PreemptionOptions(Options):
    """Options for preemption notices and the deadline of urgent saves."""

    preemption: Annotated[
        Sequence[NoticeSource],
        Option(
            "Sources that make :meth:`preempted` true, the same on every rank. Signals "
            '(``signal.SIGTERM``, ``"SIGUSR1"``) are handled until :meth:`close`. A path '
            "(``pathlib.Path``) is a notice as soon as it exists. Functions take no arguments and "
            "return true when the run must end.",
            check=check_sources,
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


class PreemptionNotices:
    """Preemption notices that this rank receives from signals, files and functions.

    The signal handler records the notice, and then calls the previous handler if it is a function.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self.since: float | None = None
        self.is_closed = False
        self._previous_handlers: dict[int, Any] = {}
        self._polled_sources = [
            source for source in sources if not isinstance(source, signal.Signals)
        ]
        self._broken: set[NoticeSource] = set()
        signals = [source for source in sources if isinstance(source, signal.Signals)]
        if signals and threading.current_thread() is not threading.main_thread():
            raise RefusedError(
                "this thread cannot handle signals",
                why="Python handles signals only in the main thread",
                hint="create the manager there, or pass a path or a function as `preemption`",
            )
        try:
            for number in signals:
                self._install_handler(number)
        except BaseException:
            self.close()
            raise
        _all_notices.add(self)

    def poll_sources(self) -> float | None:
        """Poll files and functions, and return the time of the first notice on this rank.

        Returns:
            The time in seconds, as `time.monotonic` measures it, or None without a notice.
        """
        if self.since is None and any(map(self._is_announced, self._polled_sources)):
            self.since = time.monotonic()
        return self.since

    def close(self) -> None:
        """Restore the previous signal handlers, unless other code has replaced this handler."""
        self.is_closed = True
        for number in self._previous_handlers:
            self.restore_handler(number)

    def restore_handler(self, number: int) -> None:
        """Restore the previous handler of signal *number*, if this handler is still installed."""
        before = _resolve_handler(self._previous_handlers[number], number)
        if signal.getsignal(number) == self._handle_signal:
            try:
                signal.signal(number, before)
            except ValueError:  # not the main thread, so ours stays and calls the previous one
                _log.warning(
                    "the handler of %s was not restored, because this is not the main thread",
                    signal.Signals(number).name,
                )

    def restore_in_fork(self) -> None:
        """Restore the previous handlers of termination signals in a forked process."""
        for number in set(CHILD_END_SIGNALS) & self._previous_handlers.keys():
            self.restore_handler(number)

    def get_previous_handler(self, number: int) -> Any:
        """Return the handler of signal *number* that was installed before this one."""
        return self._previous_handlers[number]

    def _install_handler(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if before is None:
            raise RefusedError(
                f"{number.name} has a handler that could not be restored",
                why="Python did not install it",
            )
        self._previous_handlers.setdefault(
            number, before
        )  # first, because the signal may arrive at once
        try:
            signal.signal(number, self._handle_signal)
        except OSError as error:
            raise UsageError(f"{number.name} cannot be handled", where="preemption") from error

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.is_closed and self.since is None:
            self.since = time.monotonic()
        before = _resolve_handler(self._previous_handlers[number], number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _is_announced(self, source: NoticeSource) -> bool:
        try:
            return source.exists() if isinstance(source, Path) else bool(source())  # type: ignore[operator]
        except Exception:
            if source not in self._broken:
                _log.exception("%s failed to report whether this run must end", source)
            self._broken.add(source)
            return False


def _resolve_handler(handler: Any, number: int) -> Any:
    """Return *handler*, or the handler that it replaced if it belongs to closed notices."""
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, PreemptionNotices) and owner.is_closed:
        handler = owner.get_previous_handler(number)
        owner = getattr(handler, "__self__", None)
    return handler


_all_notices: weakref.WeakSet[PreemptionNotices] = weakref.WeakSet()


def _restore_all_in_fork() -> None:
    for notices in list(_all_notices):
        notices.restore_in_fork()


os.register_at_fork(after_in_child=_restore_all_in_fork)


class Preemption:
    """Preemption state of a run.

    The ranks exchange their notices, so that all learn of a preemption in the same call.
    """

    def __init__(self, options: PreemptionOptions, ranks: Callable[[], RankCollectives]) -> None:
        self.notices = PreemptionNotices(options.preemption)
        self._sources = options.preemption
        self._deadline = options.deadline
        self._ranks = ranks
        self._calls = 0
        self._since: float | None = None  # first notice on any rank, by this rank's clock

    def is_requested(self, every: int) -> bool:
        """Return whether any rank has received a notice.

        The ranks communicate only on every *every*-th call. Other calls return the last answer.
        """
        self._calls += 1
        if self._since is not None or not self._sources or self._calls % every:
            return self._since is not None
        own_notice, now = self.notices.poll_sources(), time.monotonic()
        age = -1 if own_notice is None else round((now - own_notice) * 1e6)
        (oldest,) = all_reduce_max(self._ranks(), [age])
        if oldest >= 0:
            self._since = now - oldest / 1e6
        if own_notice is not None:
            _log.warning(
                "this run must end: the preemption notice came %.1f s ago", now - own_notice
            )
        return oldest >= 0

    def start_urgent_save(self, saver: AsyncSaver) -> UrgentSave:
        """Begin an urgent save with *saver*.

        Its deadline is measured from the first notice, or from now without a notice.
        """
        start = time.monotonic() if self._since is None else self._since
        return UrgentSave(saver, start, self._deadline)


class UrgentSave:
    """Urgent save that waits until its deadline, with the same outcome on all ranks."""

    def __init__(self, saver: AsyncSaver, start: float, deadline: float | None) -> None:
        self._saver = saver
        self._start = start
        self._deadline = deadline

    def join_last_save(self, path: TreePath) -> SaveFuture | None:
        """Wait for the last save, and return it if it has saved *path*, or None otherwise.

        Raises:
            StorageError: The save missed the deadline and continues. All ranks raise this.
        """
        last = self._saver.last
        if last is None:
            return None
        is_same_save = last.path == path and not last.skipped
        self._wait_for_save(last, path, with_callbacks=not is_same_save)
        if is_same_save and not _has_failed(last):
            return last
        with suppress(CkptError):  # the failure was already logged
            self._saver.wait()
        return None

    def wait_until_durable(self, future: SaveFuture) -> SaveFuture:
        """Wait until the checkpoint is published, and return *future*.

        Raises:
            StorageError: The save missed the deadline and continues. All ranks raise this.
            CkptError: The save failed. It is raised on every rank.
        """
        self._wait_for_save(future, future.path)
        if _has_failed(future):
            self._saver.wait()
        return future

    def _wait_for_save(
        self, future: SaveFuture, path: TreePath, *, with_callbacks: bool = False
    ) -> None:
        """Wait until a save is published or has failed.

        If *with_callbacks* is set, also wait for the callbacks of the save. A save ends on all
        ranks at about the same time, so it meets the deadline if it ends in time on any rank.
        """

        def wait_for_end(seconds: float | None) -> bool:
            return (
                bool(wait([future], seconds).done)
                if with_callbacks
                else future.decided.wait(seconds)
            )

        if self._deadline is not None:
            has_ended = wait_for_end(max(0.0, self._start + self._deadline - time.monotonic()))
            (any_rank,) = all_reduce_max(self._saver.groups()[0], [has_ended])
            if not any_rank:
                is_other_save = future.path != path
                raise StorageError(
                    "an urgent save missed its deadline",
                    where=str(path),
                    why=f"`deadline` is {self._deadline:g} s after the notice"
                    + (f"; {future.path.name} was still being saved" if is_other_save else ""),
                    hint="request an earlier notice, for example with `sbatch --signal`, or save "
                    "more often; the save continues while the process is alive",
                )
        wait_for_end(None)


def _has_failed(future: SaveFuture) -> bool:
    return future.done() and future.exception() is not None
