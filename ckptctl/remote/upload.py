"""Uploads of outputs to object stores.

Object stores cannot rename many objects atomically. Therefore one run at a time writes
(:mod:`~ckptctl.remote.lock`), and the index, which makes the files a checkpoint, is uploaded last,
after a check of all other files. When a checkpoint is replaced, its index is removed first, then
its other files, before the first new file is uploaded. At any moment, the destination contains the
old checkpoint, the new one, or an incomplete one without an index. A single file is replaced
atomically. (On the Hub, one commit publishes everything: :mod:`~ckptctl.remote.hub_upload`.)
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from pathlib import Path

from ckptctl.errors import CkptError, RefusedError, StorageError, UsageError, spell_option
from ckptctl.remote.lock import RemoteLock
from ckptctl.remote.objects import Objects, OccupiedError
from ckptctl.remote.store import FsspecStore, system_of
from ckptctl.storage.writing import BUSY_MESSAGE, LockRecord, UploadedFile
from ckptctl.tree import INDEX_SUFFIXES, UploadRequest, UrlPath
from ckptctl.units import pluralize


def require_apart(store: FsspecStore, request: UploadRequest) -> None:
    """Raise if the destination contains a source of the output, by any URL of it."""
    target = f"{store.url}/{request.single}" if request.single else store.url
    if ".." in target.split("/"):
        raise UsageError("a destination URL cannot contain `..`", where=target)
    path = store.path(request.single or "")
    for root, names in request.read.items():
        if not isinstance(root, UrlPath) or root.tree.atomic:  # Hub commits stay readable
            continue
        other, folder = system_of(root.tree.add_secret(root.url))
        inside = (f"{folder}/{name}/".startswith(f"{path}/") for name in names)
        if other == store.system and any(inside):
            what = "the source is inside the destination"
            raise RefusedError(what, where=target, why=root.url)


class ObjectUpload:
    """An upload of a folder or single file to an object store or other fsspec file system."""

    def __init__(self, store: FsspecStore, asked: UploadRequest) -> None:
        require_apart(store, asked)
        self._asked = asked
        self._shown = f"{store.url}/{asked.single}" if asked.single else store.url
        self._objects = objects = Objects(store, asked.single)
        self._mutex = threading.Lock()
        self._sent: dict[str, UploadedFile] = {}
        self._begun: list[str] = []
        self._committed = self._replaces = self._ruined = False
        self.resumed = 0
        self._lock = RemoteLock(store, objects.lock, asked.names)
        if not asked.overwrite and objects.look() and not objects.has_lock():
            raise self._exists()
        self._left = self._lock.take()
        try:
            self._before = objects.look()
            self._kept = self._kept_of(self._left)
            self._admit()
            if self._left is not None:
                objects.drop_parts(self._left.names)
        except BaseException:
            with suppress(CkptError):
                self._let_go()
            raise
        self._doomed = [] if asked.single else [n for n in self._before if n not in self._kept]

    def upload_file(self, name: str, path: Path) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        digest = ""
        if self._asked.resume:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        kept = self._kept.pop(name, None)
        if kept is not None and kept.digest == digest:
            self._sent[name] = kept
            self.resumed += kept.size
            return
        self._lock.require()
        outdated: list[str] = []
        if kept:  # another version of *name* was uploaded: the index goes with it
            index = self._asked.names[-1]
            outdated = [index, name] if self._kept.pop(index, None) else [name]
        if self._make_room(outdated):
            self._lock.require()
        self._begun.append(name)
        try:
            found = self._objects.send(name, path, create=not (self._asked.single and self._before))
        except OccupiedError:
            self._begun.remove(name)  # it belongs to another run and must not be removed
            raise
        self._sent[name] = sent = UploadedFile(path.stat().st_size, found.version, digest)
        if self._asked.resume:
            self._lock.note(name, sent)

    def require_complete(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        self._lock.require()
        found = self._objects.look()
        others = found.keys() - self._sent.keys() - self._kept.keys()
        if others:
            why = f"`{min(others)}` exists and does not belong to this run"
            raise StorageError(BUSY_MESSAGE, where=self._shown, why=why)
        for name, sent in self._sent.items():
            if not self._objects.is_same(name, sent, found):
                size = found[name].size if name in found else 0
                why = f"{size:,} of {pluralize(sent.size, 'byte')} are stored"
                raise StorageError(
                    f"`{name}` differs from the uploaded file",
                    where=self._shown,
                    why=why if size != sent.size else "it was overwritten",
                )

    def publish_files(self) -> None:
        """Check all files. The upload of the index has already published the checkpoint."""
        self._committed = True
        self.require_complete()

    def abandon_upload(self) -> str:
        """See :class:`~ckptctl.tree.Upload`."""
        self._objects.stop()
        try:
            return self._undo()
        except CkptError as error:
            return f"uploaded files may remain ({error.what})"
        finally:
            self._lock.stop()

    def close(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        with suppress(CkptError):  # the next run takes over a lock without a holder
            self._lock.drop()

    def _undo(self) -> str:
        """Remove uploaded files or keep them for ``--resume``, and return a message about it.

        After an error, the lock stays and records the files.
        """
        if not self._lock.ours():
            return "uploaded files remain, because another process now writes to this destination"
        self._objects.drop_parts(self._begun)
        if self._asked.resume and not self._committed and (self._begun or self._sent):
            self._lock.leave()
            return f"pass {spell_option('--resume')} to resume the upload"
        self._take_back()
        self._let_go()
        gone = "; the previous checkpoint is lost" if self._ruined else ""
        return f"uploaded files were deleted{gone}"

    def _admit(self) -> None:
        """Raise if the destination contains files that must not be replaced."""
        unfinished = self._left is not None and self._left.explains_files(self._before)
        if not self._before or unfinished or self._kept.keys() == self._before.keys():
            return
        if not self._asked.overwrite:
            raise self._exists()
        if not self._asked.is_checkpoint():
            raise RefusedError(
                "the destination is not a checkpoint and is not overwritten",
                where=self._shown,
                hint="delete it yourself, or choose another destination",
            )
        self._replaces = True

    def _kept_of(self, left: LockRecord | None) -> dict[str, UploadedFile]:
        """Return the files that an earlier run uploaded and that have not changed since."""
        if left is None or not self._asked.resume:
            return {}
        return {
            name: one
            for name, one in left.sent.items()
            if name in self._asked.names and self._objects.is_same(name, one, self._before)
        }

    def _make_room(self, others: list[str]) -> bool:
        """Remove *others* and the remaining old files, and return whether any were removed."""
        with self._mutex:
            if self._doomed:
                self._lock.note_removal(self._doomed)
                self._ruined = self._replaces
            order = sorted(self._doomed, key=lambda name: not name.endswith(INDEX_SUFFIXES))
            self._objects.remove([*order, *others], self._before, self._lock.still)
            self._doomed = []
        return bool(order or others)

    def _take_back(self) -> None:
        """Remove the files that this run uploaded, the index first.

        Files that another run has written since are kept.
        """
        found = self._objects.look()
        single = self._before if self._asked.single else {}
        old = {n for n, one in single.items() if self._objects.is_same(n, one, found)}
        other = {n for n, one in self._sent.items() if not self._objects.is_same(n, one, found)}
        order = sorted(self._begun, key=list(self._asked.names).index, reverse=True)
        mine = [name for name in order if name in found and name not in old | other]
        self._objects.remove(mine, found, self._lock.still)
        self._ruined |= self._replaces and bool(self._begun) and not old

    def _let_go(self) -> None:
        """Restore the lock's previous record, or remove the lock."""
        left = self._left
        if left is not None and not self._begun and left.explains_files(self._objects.look()):
            self._lock.leave(left)
        else:
            self._lock.drop()

    def _exists(self) -> RefusedError:
        return RefusedError(
            "the destination exists",
            where=self._shown,
            hint=f"choose another destination, or pass {spell_option('--overwrite')} to replace a "
            "checkpoint",
        )
