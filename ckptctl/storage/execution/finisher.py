"""Finishing complete files: frames, syncs and uploads, in threads of their own.

So waiting for a disk or a network stops no copy. Files that are uploaded take disk space until they
are: new ones are begun only while few wait, so that a run needs the space of a few files, not that
of its output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from ckptctl.planner.plan import Plan
from ckptctl.storage.execution.journal import Done, Journal, Ledger
from ckptctl.storage.execution.run_files import LocalSink
from ckptctl.storage.file_system import begin_writeback
from ckptctl.storage.threads import Crew, Supervisor

THREADS = 3
WAITING = 2
"""Complete files that may wait, or be on their way, when another one is begun."""
KEPT = 10_000_000
"""Files up to this size stay on the disk until all is done."""

Put = Callable[[str, Path], None]
"""Takes a file's name in the output and where it is now."""
Task = Callable[[], None]


class Finisher:
    """Completes output files in the background.

    Attributes:
        crew: Its threads.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        ledger: Ledger,
        journal: Journal | None,
        supervisor: Supervisor,
        *,
        sync: bool,
        uploads: UploadQueue | None,
    ) -> None:
        self._files = {file.path: file for file in plan.files}
        self._root = root
        self._ledger = ledger
        self._journal = journal
        self._sync = sync
        self._uploads = uploads
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._appending = threading.Lock()
        self._syncing: set[str] = set()
        self._stopped = False
        self.crew = Crew(supervisor, self._work, min(THREADS, max(1, len(plan.files))))

    def finish(self, path: str) -> None:
        """Write the frame of a file whose records are complete, and sync it."""
        if self._uploads:
            self._uploads.announce(path)
        self._tasks.put(lambda: self._finish(path))

    def sync(self, path: str) -> None:
        """Let the disk begin with what a file holds so far."""
        if not self._sync:
            return
        with self._lock:
            if path in self._syncing:
                return
            self._syncing.add(path)
        self._tasks.put(lambda: self._begin_writeback(path))

    def record(self, units: Sequence[Done], paths: Sequence[str]) -> None:
        """Note *units* in the journal once the files at *paths* are on disk."""
        self._tasks.put(lambda: self._record(units, paths))

    def close(self) -> None:
        """Let the threads end when everything asked for is done."""
        for _ in range(len(self.crew)):
            self._tasks.put(None)

    def stop(self) -> None:
        """Let the threads end as soon as they can."""
        self._stopped = True
        self.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) and not self._stopped:
            task()

    def _finish(self, path: str) -> None:
        with closing(LocalSink(self._root, path)) as sink:
            for offset, data in self._files[path].frame(self._ledger.crc):
                sink.write(offset, memoryview(data))
            if self._sync:
                sink.sync()
        if self._uploads:
            self._uploads.take(path, self._root / path)

    def _begin_writeback(self, path: str) -> None:
        with closing(LocalSink(self._root, path)) as sink:
            begin_writeback(sink.descriptor)
        with self._lock:
            self._syncing.discard(path)

    def _record(self, units: Sequence[Done], paths: Sequence[str]) -> None:
        for path in paths:
            with closing(LocalSink(self._root, path)) as sink:
                sink.sync()
        if self._journal:
            with self._appending:
                self._journal.append(units)


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
