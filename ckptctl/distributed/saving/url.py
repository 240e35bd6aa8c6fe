"""Saves to a URL, for which ranks upload their files as streams and the metadata last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property

import torch

from ckptctl.distributed.saving.local_state import map_names_to_memory
from ckptctl.distributed.saving.save_options import WriterOptions
from ckptctl.errors import CkptError, RefusedError, StorageError, quote_names
from ckptctl.formats.dcp import METADATA
from ckptctl.planner.plan import Plan
from ckptctl.remote.lock import ConditionalObject, RemoteLock
from ckptctl.remote.objects import OutputObjects
from ckptctl.remote.store import FsspecStore
from ckptctl.remote.trees import open_store
from ckptctl.runs.health import check_health
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.urls import is_hub_repository
from ckptctl.storage.writing import (
    BUSY_MESSAGE,
    LOCK_NAME,
    OBJECTS_NAME,
    LockRecord,
    UploadedFile,
    encode_object_list,
)
from ckptctl.tree import UrlPath

DATA_FILE_PATTERN = re.compile(r"__\d+_\d+\.distcp")
"""Pattern of the names of data files that ranks write."""


class UrlTarget:
    """Folder in an object store or another remote file system.

    Rank 0 locks the folder during the save. Each file is only created if it does not exist, so late
    uploads of a dead run replace nothing. When all files exist, rank 0 records the identities of
    the objects, and then creates the metadata, also only if it does not exist.
    """

    _lock: RemoteLock

    def __init__(self, path: UrlPath, options: WriterOptions) -> None:
        self.target = path
        self._options = options
        self._sent_files: dict[str, UploadedFile] = {}
        self._stale_write: LockRecord | None = None
        self._has_begun = self._published = self._replaces_damaged = self._was_there = False

    def prepare_target(self, stack: ExitStack) -> None:
        """See :class:`SaveTarget`."""
        if is_hub_repository(self.target.url):
            raise RefusedError(
                "training cannot save to the Hub",
                where=str(self.target),
                hint="save to a disk or an object store, then run `ckptctl convert` to hf://",
            )
        existing = self._objects.list_files()
        self._was_there = self._store.is_folder()
        if self._options.overwrite and METADATA in existing:  # damaged ones are replaced
            self.target.tree.forget_url(self.target.url)
            self._replaces_damaged = check_health(self.target, model=False).torn
        self._require_no_checkpoint(existing)
        self._lock = RemoteLock(self._store, LOCK_NAME, [METADATA])
        self._stale_write = self._lock.acquire_lock()
        stack.callback(self._release)
        existing = self._objects.list_files()
        self._require_no_checkpoint(existing)  # another run may have just finished
        self._remove_stale_files(self._stale_write, existing)
        self._has_begun = True

    def write_files(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`SaveTarget`."""
        options = self._options
        execution_options = ExecutionOptions(1, options.memory, options.checksum, sync=False)
        options.stream(
            plan,
            self._store.create_file,
            execution_options,
            memory=map_names_to_memory(plan, pieces, execution_options),
        )

    def find_file_size(self, name: str) -> int:
        """See :class:`SaveTarget`."""
        sent = self._uploaded_files.get(name) or UploadedFile(self._store.read_file_size(name), "")
        self._sent_files[name] = sent
        return sent.size

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`SaveTarget`."""
        sidecars = self._options.collect_sidecars()
        objects = encode_object_list(str(self.target), self._sent_files)
        self._lock.record_files_to_write((*sidecars, OBJECTS_NAME))
        for name, content in {**sidecars, OBJECTS_NAME: objects}.items():
            self._store.write_file(name, content)
        self._lock.require_ours()
        with self._store.translate_errors(METADATA, "write"):
            created = ConditionalObject(self._store, METADATA).try_create(b"".join(metadata))
        if not created:
            why = f"`{METADATA}` exists, but is not from this run"
            raise StorageError(BUSY_MESSAGE, where=str(self.target), why=why)
        self._published = True

    @cached_property
    def _store(self) -> FsspecStore:
        return open_store(self.target)

    @cached_property
    def _objects(self) -> OutputObjects:
        return OutputObjects(self._store)

    @cached_property
    def _uploaded_files(self) -> Mapping[str, UploadedFile]:
        """Files that must exist when all ranks have finished writing."""
        return self._objects.list_files()

    def _require_no_checkpoint(self, existing: Mapping[str, UploadedFile]) -> None:
        """Raise if the target contains a checkpoint that the save must not replace."""
        if METADATA in existing and not self._replaces_damaged:
            raise RefusedError(
                "the destination exists",
                where=str(self.target),
                hint="save under a new name: objects cannot be replaced in one step",
            )

    def _remove_stale_files(
        self, stale_write: LockRecord | None, existing: Mapping[str, UploadedFile]
    ) -> None:
        """Remove files of a dead run, because the new save may not replace all of them."""
        data = [name for name in existing if DATA_FILE_PATTERN.fullmatch(name)]
        if self._replaces_damaged:
            metadata_names = [name for name in (METADATA, OBJECTS_NAME) if name in existing]
            self._objects.remove_files(
                [*metadata_names, *data], existing, self._lock.require_still_ours
            )
            data = []
        if stale_write is None and data:
            raise RefusedError(
                "the destination contains parts of another checkpoint",
                where=str(self.target),
                why=f"{quote_names(sorted(data))}: no lock identifies the save that wrote them",
                hint="save under another name, or remove them with `ckptctl prune "
                "--include-incomplete` if no save is running",
            )
        if stale_write is not None:
            other_names = {*stale_write.names, *stale_write.doomed} & existing.keys() - {*data}
            self._objects.remove_files(
                [*data, *sorted(other_names)], existing, self._lock.require_still_ours
            )
            self._objects.abort_multipart_uploads()

    def _release(self) -> None:
        """Remove the uploads if the save has failed, and then release the lock."""
        try:
            with suppress(CkptError):  # the next run removes the files and the lock
                if self._has_begun and not self._published:
                    self._remove_uploads()
                if self._stale_write and not self._has_begun:
                    self._lock.leave_for_next_run(self._stale_write)
                else:
                    self._objects.abort_multipart_uploads()
                    self._lock.release_lock()
                if not self._published and not self._was_there:
                    self._store.remove_folders()
        finally:
            self._lock.stop_heartbeat()

    def _remove_uploads(self) -> None:
        self._lock.require_ours()
        existing = self._objects.list_files()
        data = [name for name in existing if DATA_FILE_PATTERN.fullmatch(name)]
        metadata_names = [
            name for name in self._lock.file_names if name in existing
        ]  # the metadata first
        self._objects.remove_files(
            [*metadata_names, *data], existing, self._lock.require_still_ours
        )
