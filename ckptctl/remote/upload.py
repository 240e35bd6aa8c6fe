"""Upload outputs to object stores.

Object stores cannot rename many objects atomically. Therefore one run at a time writes
(:mod:`~ckptctl.remote.lock`), and the index, which makes the files a checkpoint, is uploaded last,
after a check of all other files. When a checkpoint is replaced, its index is removed first, then
its other files, before the first new file is uploaded. At any moment, the destination contains the
old checkpoint, the new one, or an incomplete one without an index. A single file is replaced
atomically. On the Hub, one commit publishes all files (:mod:`~ckptctl.remote.hub_upload`).
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from pathlib import Path

from ckptctl.errors import CkptError, RefusedError, StorageError, UsageError, format_option
from ckptctl.remote.lock import RemoteLock
from ckptctl.remote.objects import OccupiedError, OutputObjects
from ckptctl.remote.store import FsspecStore, open_file_system
from ckptctl.storage.writing import BUSY_MESSAGE, LockRecord, UploadedFile
from ckptctl.tree import INDEX_SUFFIXES, UploadRequest, UrlPath
from ckptctl.units import pluralize


def require_no_source_in_target(store: FsspecStore, request: UploadRequest) -> None:
    """Raise if the destination contains a source of the output, also if their URLs differ."""
    target = f"{store.url}/{request.single}" if request.single else store.url
    if ".." in target.split("/"):
        raise UsageError("a destination URL cannot contain `..`", where=target)
    path = store.resolve_path(request.single or "")
    for root, names in request.read.items():
        if not isinstance(root, UrlPath) or root.tree.atomic:  # Hub commits stay readable
            continue
        source_system, folder = open_file_system(root.tree.add_credentials(root.url))
        overlaps = (f"{folder}/{name}/".startswith(f"{path}/") for name in names)
        if source_system == store.system and any(overlaps):
            problem = "the source is inside the destination"
            raise RefusedError(problem, where=target, why=root.url)


class ObjectUpload:
    """Upload of a folder or a single file to an object store or another fsspec file system."""

    def __init__(self, store: FsspecStore, request: UploadRequest) -> None:
        require_no_source_in_target(store, request)
        self._request = request
        self._shown_url = f"{store.url}/{request.single}" if request.single else store.url
        self._objects = objects = OutputObjects(store, request.single)
        self._mutex = threading.Lock()
        self._uploaded: dict[str, UploadedFile] = {}
        self._started_names: list[str] = []
        self._committed = self._replaces = self._is_previous_lost = False
        self.resumed = 0
        self._lock = RemoteLock(store, objects.lock_name, request.names)
        if not request.overwrite and objects.list_files() and not objects.has_lock():
            raise self._exists_error()
        self._leftover = self._lock.acquire_lock()
        try:
            self._files_before = objects.list_files()
            self._reusable = self._find_reusable_files(self._leftover)
            self._require_replaceable()
            if self._leftover is not None:
                objects.abort_multipart_uploads(self._leftover.names)
        except BaseException:
            with suppress(CkptError):
                self._release_lock()
            raise
        self._old_names = (
            [] if request.single else [n for n in self._files_before if n not in self._reusable]
        )

    def upload_file(self, name: str, path: Path) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        digest = ""
        if self._request.resume:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        reusable = self._reusable.pop(name, None)
        if reusable is not None and reusable.digest == digest:
            self._uploaded[name] = reusable
            self.resumed += reusable.size
            return
        self._lock.require_ours()
        outdated: list[str] = []
        if reusable:  # an outdated version of *name* was uploaded, so the index is also outdated
            index = self._request.names[-1]
            outdated = [index, name] if self._reusable.pop(index, None) else [name]
        if self._remove_old_files(outdated):
            self._lock.require_ours()
        self._started_names.append(name)
        try:
            stored = self._objects.send_file(
                name, path, create=not (self._request.single and self._files_before)
            )
        except OccupiedError:
            self._started_names.remove(
                name
            )  # the existing file belongs to another run and must stay
            raise
        self._uploaded[name] = sent = UploadedFile(path.stat().st_size, stored.version, digest)
        if self._request.resume:
            self._lock.record_upload(name, sent)

    def require_complete(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        self._lock.require_ours()
        files = self._objects.list_files()
        foreign = files.keys() - self._uploaded.keys() - self._reusable.keys()
        if foreign:
            why = f"`{min(foreign)}` exists and does not belong to this run"
            raise StorageError(BUSY_MESSAGE, where=self._shown_url, why=why)
        for name, sent in self._uploaded.items():
            if not self._objects.is_unchanged(name, sent, files):
                size = files[name].size if name in files else 0
                why = f"{size:,} of {pluralize(sent.size, 'byte')} are stored"
                raise StorageError(
                    f"`{name}` differs from the uploaded file",
                    where=self._shown_url,
                    why=why if size != sent.size else "it was overwritten",
                )

    def publish_files(self) -> None:
        """Check all files. Uploading the index has already published the checkpoint."""
        self._committed = True
        self.require_complete()

    def abandon_upload(self) -> str:
        """See :class:`~ckptctl.tree.Upload`."""
        self._objects.cancel_uploads()
        try:
            return self._undo_upload()
        except CkptError as error:
            return f"uploaded files may remain ({error.what})"
        finally:
            self._lock.stop_heartbeat()

    def close(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        with suppress(CkptError):  # the next run takes over a lock without a holder
            self._lock.release_lock()

    def _undo_upload(self) -> str:
        """Remove the uploaded files, or keep them for ``--resume``, and return a message.

        If this raises, the lock file remains and records the uploaded files.
        """
        if not self._lock.is_ours():
            return "uploaded files remain, because another process now writes to this destination"
        self._objects.abort_multipart_uploads(self._started_names)
        if self._request.resume and not self._committed and (self._started_names or self._uploaded):
            self._lock.leave_for_next_run()
            return f"pass {format_option('--resume')} to resume the upload"
        self._remove_uploaded()
        self._release_lock()
        loss_note = "; the previous output is lost" if self._is_previous_lost else ""
        return f"uploaded files were deleted{loss_note}"

    def _require_replaceable(self) -> None:
        """Raise if the destination contains files that this run is not allowed to replace."""
        unfinished = self._leftover is not None and self._leftover.explains_files(
            self._files_before
        )
        if (
            not self._files_before
            or unfinished
            or self._reusable.keys() == self._files_before.keys()
        ):
            return
        if not self._request.overwrite:
            raise self._exists_error()
        if not self._request.is_checkpoint():
            raise RefusedError(
                f"the destination is not {self._request.noun} and is not overwritten",
                where=self._shown_url,
                hint="delete it yourself, or choose another destination",
            )
        self._replaces = True

    def _find_reusable_files(self, leftover: LockRecord | None) -> dict[str, UploadedFile]:
        """Return the unchanged files that an interrupted run uploaded, if resuming.

        *leftover* is the lock record of that run, or None.
        """
        if leftover is None or not self._request.resume:
            return {}
        return {
            name: sent
            for name, sent in leftover.sent.items()
            if name in self._request.names
            and self._objects.is_unchanged(name, sent, self._files_before)
        }

    def _remove_old_files(self, outdated: list[str]) -> bool:
        """Remove the files *outdated* and the files of the checkpoint that is being replaced.

        Returns whether any file was to be removed.
        """
        with self._mutex:
            if self._old_names:
                self._lock.record_removals(self._old_names)
                self._is_previous_lost = self._replaces
            order = sorted(self._old_names, key=lambda name: not name.endswith(INDEX_SUFFIXES))
            self._objects.remove_files(
                [*order, *outdated], self._files_before, self._lock.require_still_ours
            )
            self._old_names = []
        return bool(order or outdated)

    def _remove_uploaded(self) -> None:
        """Remove the files that this run uploaded, starting with the index.

        Files that another run has written since then are kept.
        """
        files = self._objects.list_files()
        previous = self._files_before if self._request.single else {}
        unchanged = {
            n for n, sent in previous.items() if self._objects.is_unchanged(n, sent, files)
        }
        foreign = {
            n
            for n, sent in self._uploaded.items()
            if not self._objects.is_unchanged(n, sent, files)
        }
        order = sorted(self._started_names, key=list(self._request.names).index, reverse=True)
        own_names = [name for name in order if name in files and name not in unchanged | foreign]
        self._objects.remove_files(own_names, files, self._lock.require_still_ours)
        self._is_previous_lost |= self._replaces and bool(self._started_names) and not unchanged

    def _release_lock(self) -> None:
        """Release the lock and remove its file.

        If nothing was uploaded and a dead run left files, keep the lock file with its record.
        """
        leftover = self._leftover
        if (
            leftover is not None
            and not self._started_names
            and leftover.explains_files(self._objects.list_files())
        ):
            self._lock.leave_for_next_run(leftover)
        else:
            self._lock.release_lock()

    def _exists_error(self) -> RefusedError:
        return RefusedError(
            "the destination exists",
            where=self._shown_url,
            hint=f"choose another destination, or pass {format_option('--overwrite')} to replace "
            f"{self._request.noun}",
        )
