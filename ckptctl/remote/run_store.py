"""Remove checkpoints from a remote run folder.

Remote objects cannot be renamed. To remove a checkpoint, ckptctl first acquires its lock, which
records the removal and its objects. From then on ckptctl no longer treats it as a checkpoint. The
index, which makes it a checkpoint for other programs, is removed next, then all other objects and
finally the lock. An interrupted removal leaves a complete checkpoint, or one that the next run
finishes removing, except for objects written since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from ckptctl.errors import CkptError, RefusedError, SourceNotFoundError
from ckptctl.file_identity import FileIdentity
from ckptctl.remote.lock import ConditionalObject, RemoteLock
from ckptctl.remote.objects import OutputObjects
from ckptctl.remote.trees import open_store
from ckptctl.storage.urls import WEB_SCHEMES, is_hub_repository, parse_scheme
from ckptctl.storage.writing import (
    LOCK_NAME,
    REMOVAL_NAME,
    UploadedFile,
    find_interrupted_deletion,
    has_interrupted_save,
)
from ckptctl.tree import INDEX_SUFFIXES, UrlPath

REMOVAL_LOCK_NAME = ".ckptctl-removing"
"""Name of the lock file that a run folder has while checkpoints are removed from it."""
BUSY_MESSAGE = "another process is removing checkpoints here"


class RemoteRun:
    """See :class:`~ckptctl.runs.run_store.RunStore`."""

    def __init__(self, root: UrlPath) -> None:
        self.root = root

    def require_changeable(self) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        url = str(self.root)
        if is_hub_repository(url) or parse_scheme(url) in WEB_SCHEMES:
            raise RefusedError(
                "training runs are only supported on local disks and in object stores",
                where=str(self.root),
            )

    def refresh_listing(self) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        self.root.tree.forget_url(self.root.url)
        with suppress(SourceNotFoundError):
            self.root.tree.resolve_url(self.root.url)

    def is_name_free(self, name: str) -> bool:
        """See :class:`~ckptctl.runs.run_store.RunStore`.

        The name of an unfinished save with a lock counts as free, because acquiring that lock fails
        if another run holds it.
        """
        names = {item.name for item in (self.root / name).iterdir()}
        return (
            LOCK_NAME in names
            and not any(name_there.endswith(INDEX_SUFFIXES) for name_there in names)
        ) or not names

    def list_unfinished_saves(self) -> list[str]:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        return sorted(item.name for item in self.root.iterdir() if has_interrupted_save(item))

    def list_leftovers(self) -> list[str]:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        return sorted(self.find_interrupted_removals())

    def find_interrupted_removals(self) -> dict[str, Mapping[str, UploadedFile]]:
        """Return the checkpoints whose removal was interrupted, with the objects to remove."""
        removals = {item.name: find_interrupted_deletion(item) for item in self.root.iterdir()}
        return {name: doomed for name, doomed in removals.items() if doomed is not None}

    def remove_leftovers(self) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        if (self.root / REMOVAL_LOCK_NAME).is_file():
            with suppress(CkptError), self.lock_for_deletion():
                pass

    def replace_file(self, name: str, content: bytes, *, sync: bool) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        del sync  # acknowledged writes are durable
        open_store(self.root).write_file(name, content)

    def create_file(self, name: str, content: bytes) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        store = open_store(self.root)
        with store.translate_errors(name, "write"):
            ConditionalObject(store, name).try_create(content)

    @contextmanager
    def lock_for_deletion(self) -> Iterator[RemoteDeletion]:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        lock = RemoteLock(open_store(self.root), REMOVAL_LOCK_NAME, (), busy=BUSY_MESSAGE)
        lock.acquire_lock()
        try:
            deletion = RemoteDeletion(self, lock)
            deletion.finish_removals()
            yield deletion
        finally:
            with suppress(CkptError):  # the next run takes over a lock without a holder
                lock.release_lock()


class RemoteDeletion:
    """See :class:`~ckptctl.runs.run_store.Deletion`."""

    def __init__(self, run: RemoteRun, lock: RemoteLock) -> None:
        self.folder = run.root
        self._run, self._lock = run, lock

    def read_clock(self) -> float:
        """See :class:`~ckptctl.runs.run_store.Deletion`."""
        return self._lock.read_store_clock()

    def list_left_in_trash(self) -> list[str]:
        """See :class:`~ckptctl.runs.run_store.Deletion`."""
        self._run.refresh_listing()
        return self._run.list_leftovers()

    def delete(
        self, name: str, identity: FileIdentity, recheck: Callable[[], None] = lambda: None
    ) -> None:
        """See :class:`~ckptctl.runs.run_store.Deletion`."""
        del identity  # remote folders have none; *recheck* compares their contents
        path = self._run.root / name
        self._lock.require_ours()
        self._run.refresh_listing()
        if path.is_file():
            objects = OutputObjects(open_store(path.parent), name)
            files = objects.list_files()
            recheck()
            objects.remove_files(files, files, self._lock.require_still_ours)
            return
        store = open_store(path)
        objects = OutputObjects(store)
        files = objects.list_files()
        recheck()
        lock = RemoteLock(store, objects.lock_name, (REMOVAL_NAME,), doomed=files)
        leftover = lock.acquire_lock()
        try:
            if objects.list_files() != files:
                lock.leave_for_next_run(leftover) if leftover else lock.release_lock()
                raise RefusedError("the checkpoint changed in the meantime", where=str(path))
            self._remove_objects(objects, lock, files)
            store.remove_folders()
        finally:
            lock.stop_heartbeat()
            self._run.refresh_listing()

    def finish_removals(self) -> None:
        """Finish interrupted removals of checkpoints, skipping those that raise an error.

        :meth:`list_left_in_trash` lists the skipped checkpoints.
        """
        for name, doomed in self._run.find_interrupted_removals().items():
            store = open_store(self._run.root / name)
            objects = OutputObjects(store)
            lock = RemoteLock(store, objects.lock_name, (REMOVAL_NAME,), doomed=doomed)
            try:
                lock.acquire_lock()
                files = objects.list_files()
                unchanged = {
                    n: sent for n, sent in doomed.items() if objects.is_unchanged(n, sent, files)
                }
                self._remove_objects(objects, lock, unchanged)
                store.remove_folders()
            except CkptError:
                continue
            finally:
                lock.stop_heartbeat()
        self._run.refresh_listing()

    def _remove_objects(
        self, objects: OutputObjects, lock: RemoteLock, doomed: Mapping[str, UploadedFile]
    ) -> None:
        """Remove the objects *doomed*, starting with the index, and release *lock*.

        After an error, *lock* remains and records the objects to remove.
        """
        order = sorted(doomed, key=lambda name: not name.endswith(INDEX_SUFFIXES))
        objects.remove_files(order, doomed, lock.require_still_ours)
        if not objects.list_files():
            objects.abort_multipart_uploads()
        lock.release_lock()
