"""How much work something is, in lines of Python: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Effort:
    """What was run so far.

    Attributes:
        lines: Lines of Python, in all threads, whoever wrote them.
    """

    lines: int = 0


@contextmanager
def counted() -> Iterator[Effort]:
    """Count what is run meanwhile."""
    effort, before = Effort(), sys.gettrace()

    def trace(_: FrameType, event: str, __: Any) -> Any:
        effort.lines += event == "line"
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield effort
    finally:
        sys.settrace(before)
        threading.settrace(None)


def lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python *work* runs."""
    with counted() as effort:
        work()
    return effort.lines


def growth(work: Callable[[int], object], size: int) -> float:
    """Return how many times as much *work* is with twice the *size*, at the second go."""
    work(size)
    return lines(lambda: work(2 * size)) / lines(lambda: work(size))
