"""Removal of checkpoints from a remote run folder.

Remote objects cannot be renamed. To remove a checkpoint, ckptctl first acquires its lock, which
records the removal and its objects; from then on ckptctl no longer treats it as a checkpoint. The
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
from ckptctl.remote.objects import Objects
from ckptctl.remote.trees import store_at
from ckptctl.storage.urls import HUB_SCHEME, WEB_SCHEMES, parse_scheme
from ckptctl.storage.writing import (
    LOCK_NAME,
    REMOVAL_NAME,
    UploadedFile,
    find_killed_removal,
    has_killed_save,
)
from ckptctl.tree import INDEX_SUFFIXES, UrlPath

LOCK = ".ckptctl-removing"
"""The lock of a run from which checkpoints are removed."""
BUSY = "another process is removing checkpoints here"


class RemoteRun:
    """See :class:`~ckptctl.runs.run_store.RunStore`."""

    def __init__(self, root: UrlPath) -> None:
        self.root = root

    def require_changeable(self) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        if parse_scheme(str(self.root)) in (HUB_SCHEME, *WEB_SCHEMES):
            raise RefusedError(
                "training runs are only supported on local disks and in object stores",
                where=str(self.root),
            )

    def refresh_listing(self) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        self.root.tree.forget_url(self.root.url)
        with suppress(SourceNotFoundError):
            self.root.tree.resolve_url(self.root.url)

    def is_free(self, name: str) -> bool:
        """See :class:`~ckptctl.runs.run_store.RunStore`.

        Taking the lock of an unfinished save shows whether it has a holder.
        """
        there = {item.name for item in (self.root / name).iterdir()}
        return (
            LOCK_NAME in there and not any(one.endswith(INDEX_SUFFIXES) for one in there)
        ) or not there

    def list_unfinished_saves(self) -> list[str]:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        return sorted(item.name for item in self.root.iterdir() if has_killed_save(item))

    def list_leftovers(self) -> list[str]:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        return sorted(self.half_removed())

    def half_removed(self) -> dict[str, Mapping[str, UploadedFile]]:
        """Map each checkpoint whose removal was interrupted to its recorded objects."""
        there = {item.name: find_killed_removal(item) for item in self.root.iterdir()}
        return {name: doomed for name, doomed in there.items() if doomed is not None}

    def remove_leftovers(self) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        if (self.root / LOCK).is_file():
            with suppress(CkptError), self.lock_for_deletion():
                pass

    def replace_file(self, name: str, content: bytes, *, sync: bool) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        del sync  # acknowledged writes are durable
        store_at(self.root).write(name, content)

    def create_file(self, name: str, content: bytes) -> None:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        store = store_at(self.root)
        with store.errors(name, "write"):
            ConditionalObject(store, name).create(content)

    @contextmanager
    def lock_for_deletion(self) -> Iterator[RemoteDeletion]:
        """See :class:`~ckptctl.runs.run_store.RunStore`."""
        lock = RemoteLock(store_at(self.root), LOCK, (), busy=BUSY)
        lock.take()
        try:
            deletion = RemoteDeletion(self, lock)
            deletion.sweep()
            yield deletion
        finally:
            with suppress(CkptError):  # the next run takes over a lock without a holder
                lock.drop()


class RemoteDeletion:
    """See :class:`~ckptctl.runs.run_store.Deletion`."""

    def __init__(self, run: RemoteRun, lock: RemoteLock) -> None:
        self.folder = run.root
        self._run, self._lock = run, lock

    def read_clock(self) -> float:
        """See :class:`~ckptctl.runs.run_store.Deletion`."""
        return self._lock.now()

    def list_undeleted(self) -> list[str]:
        """See :class:`~ckptctl.runs.run_store.Deletion`."""
        self._run.refresh_listing()
        return self._run.list_leftovers()

    def delete(
        self, name: str, identity: FileIdentity, recheck: Callable[[], None] = lambda: None
    ) -> None:
        """See :class:`~ckptctl.runs.run_store.Deletion`."""
        del identity  # remote folders have none; *still* compares their contents
        path = self._run.root / name
        self._lock.require()
        self._run.refresh_listing()
        if path.is_file():
            place = Objects(store_at(path.parent), name)
            found = place.look()
            recheck()
            place.remove(found, found, self._lock.still)
            return
        store = store_at(path)
        place = Objects(store)
        found = place.look()
        recheck()
        lock = RemoteLock(store, place.lock, (REMOVAL_NAME,), doomed=found)
        left = lock.take()
        try:
            if place.look() != found:
                lock.leave(left) if left else lock.drop()
                raise RefusedError("the checkpoint changed in the meantime", where=str(path))
            self._remove(place, lock, found)
            store.remove_folders()
        finally:
            lock.stop()
            self._run.refresh_listing()

    def sweep(self) -> None:
        """Finish interrupted removals as far as possible. :meth:`list_undeleted` lists the others."""
        for name, doomed in self._run.half_removed().items():
            store = store_at(self._run.root / name)
            place = Objects(store)
            lock = RemoteLock(store, place.lock, (REMOVAL_NAME,), doomed=doomed)
            try:
                lock.take()
                found = place.look()
                same = {n: one for n, one in doomed.items() if place.is_same(n, one, found)}
                self._remove(place, lock, same)
                store.remove_folders()
            except CkptError:
                continue
            finally:
                lock.stop()
        self._run.refresh_listing()

    def _remove(self, place: Objects, lock: RemoteLock, doomed: Mapping[str, UploadedFile]) -> None:
        """Remove *doomed*, the index first. After an error, the lock records the rest."""
        order = sorted(doomed, key=lambda name: not name.endswith(INDEX_SUFFIXES))
        place.remove(order, doomed, lock.still)
        if not place.look():
            place.drop_parts()
        lock.drop()
