"""Progress in bytes on stderr: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptctl.cli.output import should_color
from ckptctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ckptctl.cli.output import Printer
    from ckptctl.storage.threads import Advance

QUIET_SECONDS = 0.5
"""Seconds before a bar appears. Shorter work shows no bar and does not import rich."""
LINE_SECONDS = 10.0
WINDOW_SECONDS = 15.0
"""Seconds over which speed is measured. Extended until there are `MIN_SAMPLES` samples."""
MIN_SAMPLES = 4
SAMPLE_SECONDS = 0.2
SETTLING_SECONDS = 1.0
"""Seconds at the start that the speed ignores, because existing bytes are counted then."""
NARROW_COLUMNS = 64
"""Terminal width in characters below which a bar shows only the percentage."""


@contextmanager
def show_progress(
    output: Printer,
    verb: str,
    total: int,
    ending: str | None = None,
    beginning: Callable[[], str] = str,
) -> Iterator[Advance | None]:
    """Show progress during the block, and yield a callback, or None if no progress is shown.

    The callback takes the number of bytes processed since its last call. It is thread-safe.

    Args:
        output: Printer that determines whether progress is shown.
        verb: Activity to show, such as ``copying``.
        ending: Activity after the last byte, such as ``syncing``, or None if there is none.
        beginning: Returns the activity before the first byte, such as ``loading torch``.
        total: Total number of bytes.
    """
    if not output.is_chatty or os.environ.get("CKPTCTL_NO_PROGRESS") or total <= 0:
        yield None
        return
    display_class = (
        _BarDisplay if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _LineDisplay
    )
    with display_class(output, verb, total, ending, beginning()) as display:
        yield display.advance


class _SpeedMeter:
    """Recent speed in bytes per second, from a sliding window of samples."""

    def __init__(self) -> None:
        self.first_seconds: float | None = None
        self.samples: deque[tuple[float, int]] = deque()

    def add_sample(self, now: float, done: int) -> None:
        """Add a sample of *done* bytes in total at the time *now* (seconds)."""
        self.first_seconds = now if self.first_seconds is None else self.first_seconds
        if now - self.first_seconds < SETTLING_SECONDS:
            self.samples.clear()
        elif now - self.samples[-1][0] < SAMPLE_SECONDS:
            return
        self.samples.append((now, done))
        while len(self.samples) > MIN_SAMPLES and now - self.samples[1][0] >= WINDOW_SECONDS:
            self.samples.popleft()

    def bytes_per_second(self, now: float, done: int) -> float:
        """Return the bytes per second since the oldest sample, or 0 if the speed is unknown yet."""
        start, before = self.samples[0] if self.samples else (now, done)
        return (done - before) / (now - start) if now - start >= SETTLING_SECONDS else 0.0


class _LineDisplay:
    """Display that prints progress as one line every `LINE_SECONDS`."""

    def __init__(
        self, output: Printer, verb: str, total: int, ending: str | None, beginning: str = ""
    ) -> None:
        self.output = output
        self.verb = verb
        self.ending = ending or verb
        self.beginning = beginning
        self.total = total
        self.done = 0
        self.start = time.monotonic()
        self.last_shown_seconds = self.start
        self.speed = _SpeedMeter()
        self.lock = threading.Lock()

    def __enter__(self) -> _LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def advance(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            now = time.monotonic()
            self.speed.add_sample(now, self.done)
            self.show_state(now)

    def show_state(self, now: float) -> None:
        if now - self.last_shown_seconds >= LINE_SECONDS:
            self.last_shown_seconds = now
            self.output.print_to_stderr(
                ": ".join(filter(None, (self.activity, ", ".join(self.list_facts(now)))))
            )

    @property
    def has_begun(self) -> bool:
        return bool(self.done or not self.beginning)

    @property
    def activity(self) -> str:
        if not self.has_begun:
            return self.beginning
        return self.ending if self.done >= self.total else self.verb

    @property
    def percent(self) -> str:
        return f"{100 * min(self.done, self.total) // self.total} %"

    @property
    def amount(self) -> str:
        return f"{format_bytes(self.done)} of {format_bytes(self.total)} ({self.percent})"

    def list_facts(self, now: float) -> tuple[str, ...]:
        """List the amount, speed and time left, or nothing before the first byte."""
        return (self.amount, *self.list_speed_facts(now)) if self.has_begun else ()

    def list_speed_facts(self, now: float) -> tuple[str, ...]:
        """List the speed and the time left, or nothing while they are unknown."""
        rate = self.speed.bytes_per_second(now, self.done)
        if rate < 1 or self.done >= self.total:
            return ()
        seconds = (self.total - self.done) / rate
        time_left = f"{math.ceil(seconds)} s" if seconds < 59.5 else format_seconds(seconds)
        return f"{format_bytes(int(rate))}/s", f"{time_left} left"


class _BarDisplay(_LineDisplay):
    """Display that shows progress as a bar, which is redrawn on a terminal."""

    bar: Progress | None = None
    task: TaskID
    is_over = False

    def __enter__(self) -> _BarDisplay:
        # The first step may take long, so a timer starts the bar.
        self.timer = threading.Timer(QUIET_SECONDS, self.start_if_late)
        self.timer.daemon = True
        self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        with self.lock:
            self.is_over = True
            if self.bar:
                self.bar.stop()

    def start_if_late(self) -> None:
        with self.lock:
            if self.bar is None and not self.is_over:
                self.start_bar()

    def show_state(self, now: float) -> None:
        if self.bar is None and now - self.start >= QUIET_SECONDS:
            self.start_bar()
        if self.bar:
            self.bar.update(
                self.task,
                total=self.total,
                completed=min(self.done, self.total),
                description=self.activity,
            )

    def format_status(self, columns: int) -> str:
        """Format the text next to the bar. This takes no lock, since it is called while drawing."""
        if columns < NARROW_COLUMNS:
            return self.percent if self.has_begun else ""
        return "  ".join(self.list_facts(time.monotonic()))

    def start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.table import Column
        from rich.text import Text

        console = Console(
            stderr=True, markup=False, highlight=False, no_color=not should_color(sys.stderr)
        )
        format_text = self.format_status

        class StatusColumn(ProgressColumn):
            def render(self, task: Task) -> Text:  # noqa: ARG002
                return Text(format_text(console.width))

        self.bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(20, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
            StatusColumn(Column(no_wrap=True)),
            console=console,
            transient=True,
        )
        self.bar.start()
        # Without a total, the bar pulses.
        total = self.total if self.has_begun else None
        self.task = self.bar.add_task(self.activity, total=total, completed=self.done)
