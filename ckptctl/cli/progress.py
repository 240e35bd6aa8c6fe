"""Bytes done, on stderr: a bar on a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from ckptctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ckptctl.cli.output import Output

QUIET_SECONDS = 0.5
"""What ends sooner needs no bar, and does not pay for importing one."""
LINE_SECONDS = 10.0
Advance = Callable[[int], None]


@contextmanager
def progress(
    output: Output, verb: str, total: int, ending: str | None = None
) -> Iterator[Advance | None]:
    """Yield the function to call with bytes done, from any thread; None: nobody is looking.

    Args:
        output: Decides whether anything is shown.
        verb: What is being done: ``copying``.
        ending: What is being done when all bytes are: ``syncing``; None: nothing more.
        total: Bytes in all.
    """
    if not output.chatty or os.environ.get("CKPTCTL_NO_PROGRESS") or total <= 0:
        yield None
        return
    kind = _Bar if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _Lines
    with kind(output, verb, total, ending) as shown:
        yield shown.advance


class _Lines:
    """One line now and then."""

    def __init__(self, output: Output, verb: str, total: int, ending: str | None) -> None:
        self.output = output
        self.verb = verb
        self.ending = ending or verb
        self.total = total
        self.done = 0
        self.start = time.monotonic()
        self.shown = self.start
        self.lock = threading.Lock()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def advance(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            now = time.monotonic()
            if now - self.shown >= LINE_SECONDS:
                self.shown = now
                self.output.report(self.text(now - self.start))

    def text(self, seconds: float) -> str:
        rate = self.done / seconds
        left = format_seconds(max(0, self.total - self.done) / rate) if rate else "unknown"
        return (
            f"{self.verb}: {format_bytes(self.done)} of {format_bytes(self.total)} "
            f"({100 * self.done // self.total} %), {format_bytes(int(rate))}/s, {left} left"
        )


class _Bar(_Lines):
    """A bar that redraws itself."""

    bar: Progress | None = None
    task: TaskID

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()

    def advance(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.bar is None and time.monotonic() - self.start >= QUIET_SECONDS:
                self.begin()
            if self.bar:
                verb = self.ending if self.done >= self.total else self.verb
                self.bar.update(self.task, completed=self.done, description=verb)

    def begin(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        plain = bool(os.environ.get("NO_COLOR"))
        console = Console(
            stderr=True, markup=False, highlight=False, color_system=None if plain else "auto"
        )
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.bar.start()
        self.task = self.bar.add_task(self.verb, total=self.total)
