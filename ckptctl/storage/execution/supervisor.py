"""Threads at work: one that fails ends all, and the caller hears how far they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ckptctl.storage.advance import Advance

PATIENCE = 0.8
"""Seconds."""


class Supervisor:
    """What threads and the one that waits for them tell each other.

    Attributes:
        stop: Set when the threads are to end.
        changed: Guards what several threads change, re-entrant; notified when one of them ends.
    """

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
        """Wait until *finished*, and report what was done meanwhile.

        Args:
            finished: Whether the work is over, as *leave* of :meth:`ended` has it.
            total: Returns the bytes done so far.
            progress: Called with the bytes done since it was called last.

        Raises:
            BaseException: What went wrong first in a thread.
        """
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


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait a moment for *threads*; one that hangs in the kernel holds nothing but descriptors."""
    end = time.monotonic() + PATIENCE
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
