"""Files of an output that go to another place as soon as they are complete.

What waits here takes disk: new files are begun only while few wait, so that a run needs the room of
a few files and not that of its output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

WAITING = 2
"""Complete files that may wait, or be on their way, when another one is begun."""
KEPT = 10_000_000
"""Files up to this size stay on the disk until all is done."""

Put = Callable[[str, Path], None]
"""Takes a file's name in the output and where it is now."""


class UploadQueue:
    """Between those who fill files and the place that they go to."""

    def __init__(self, put: Put, last: Collection[str]) -> None:
        self._put = put
        self._last = last
        self._changed = threading.Condition()
        self._waiting = 0

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Return once there is room for another file, or all is over."""
        with self._changed:
            while self._waiting >= WAITING and not stopped():
                self._changed.wait(0.1)

    def announce(self, name: str) -> None:
        """Count a file that is going to be complete at once."""
        if name not in self._last:
            with self._changed:
                self._waiting += 1

    def take(self, name: str, path: Path) -> None:
        """Bring a complete file to its place, and free its disk; the last ones wait for the end."""
        if name in self._last:
            return
        try:
            self._put(name, path)
            if path.stat().st_size > KEPT:
                os.truncate(path, 0)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def close(self, root: Path, ready: Callable[[], None]) -> None:
        """Bring the files that come last to their place, in their order."""
        for number, name in enumerate(self._last, 1):
            if number == len(self._last):
                ready()
            self._put(name, root / name)
