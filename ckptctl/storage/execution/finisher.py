"""Background threads that write the frames of complete files, sync them and upload them.

Copying therefore does not wait for a disk or a network. Files take disk space until they are
uploaded. A new file is only started while few files wait for their upload, so that a run needs disk
space for a few files instead of the complete output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from ckptctl.planner.plan import Plan
from ckptctl.storage.execution.journal import FinishedUnit, Journal, Ledger
from ckptctl.storage.execution.run_files import LocalSink
from ckptctl.storage.file_system import begin_writeback
from ckptctl.storage.threads import Supervisor, ThreadGroup

FINISHER_THREADS = 3
MAX_WAITING = 2
"""Maximum number of complete files that are not yet uploaded when a new file is started."""
MAX_KEPT_BYTES = 10_000_000
"""Maximum size in bytes of a file that is kept on disk after its upload."""

Upload = Callable[[str, Path], None]
"""Uploads a file, given its name in the output and its local path."""
Task = Callable[[], None]


class Finisher:
    """Background threads that write frames, sync output files and upload them.

    Attributes:
        crew: Group of the background threads.
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
        self.crew = ThreadGroup(
            supervisor, self._run_tasks, min(FINISHER_THREADS, max(1, len(plan.files)))
        )

    def queue_file(self, path: str) -> None:
        """Queue a file whose records are complete, to write its frame, sync it and upload it."""
        if self._uploads:
            self._uploads.announce_file(path)
        self._tasks.put(lambda: self._finish_file(path))

    def start_writeback(self, path: str) -> None:
        """Queue the writeback of a file's dirty pages."""
        if not self._sync:
            return
        with self._lock:
            if path in self._syncing:
                return
            self._syncing.add(path)
        self._tasks.put(lambda: self._begin_writeback(path))

    def queue_sync_and_journal(self, units: Sequence[FinishedUnit], paths: Sequence[str]) -> None:
        """Queue a task that syncs the files at *paths* and then adds *units* to the journal."""
        self._tasks.put(lambda: self._record_units(units, paths))

    def close(self) -> None:
        """Finish all queued tasks, and then end the threads."""
        for _ in range(len(self.crew)):
            self._tasks.put(None)

    def stop(self) -> None:
        """End the threads after their current tasks, and drop the queued tasks."""
        self._stopped = True
        self.close()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) and not self._stopped:
            task()

    def _finish_file(self, path: str) -> None:
        with closing(LocalSink(self._root, path)) as sink:
            for offset, data in self._files[path].frame(self._ledger.get_record_crc):
                sink.write(offset, memoryview(data))
            if self._sync:
                sink.sync()
        if self._uploads:
            self._uploads.upload_file(path, self._root / path)

    def _begin_writeback(self, path: str) -> None:
        with closing(LocalSink(self._root, path)) as sink:
            begin_writeback(sink.descriptor)
        with self._lock:
            self._syncing.discard(path)

    def _record_units(self, units: Sequence[FinishedUnit], paths: Sequence[str]) -> None:
        for path in paths:
            with closing(LocalSink(self._root, path)) as sink:
                sink.sync()
        if self._journal:
            with self._appending:
                self._journal.append_units(units)


class UploadQueue:
    """Uploader of complete files that limits how many files wait for their upload.

    Args:
        upload: Uploads a file.
        last_files: Files that are uploaded after all others, in this order.
    """

    def __init__(self, upload: Upload, last_files: Collection[str]) -> None:
        self._upload = upload
        self._last_files = last_files
        self._changed = threading.Condition()
        self._waiting = 0

    def wait_for_room(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until few enough files wait for their upload, or until *is_stopped* returns True."""
        with self._changed:
            while self._waiting >= MAX_WAITING and not is_stopped():
                self._changed.wait(0.1)

    def announce_file(self, name: str) -> None:
        """Count *name* as waiting for its upload, shortly before the file is complete."""
        if name not in self._last_files:
            with self._changed:
                self._waiting += 1

    def upload_file(self, name: str, path: Path) -> None:
        """Upload a complete file and free its disk space, unless it is one of *last_files*."""
        if name in self._last_files:
            return
        try:
            self._upload(name, path)
            if path.stat().st_size > MAX_KEPT_BYTES:
                os.truncate(path, 0)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def upload_last_files(self, root: Path, before_last: Callable[[], None]) -> None:
        """Upload *last_files* in order, and call *before_last* before the final upload."""
        for number, name in enumerate(self._last_files, 1):
            if number == len(self._last_files):
                before_last()
            self._upload(name, root / name)
