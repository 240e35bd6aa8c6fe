"""Saves to a URL: ranks upload their files as streams, and the metadata comes last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property

import torch

from ckptctl.distributed.saving.local_state import memory_of
from ckptctl.distributed.saving.save_options import WriterOptions
from ckptctl.errors import CkptError, RefusedError, StorageError, quote_names
from ckptctl.formats.dcp import METADATA
from ckptctl.planner.plan import Plan
from ckptctl.remote.lock import ConditionalObject, RemoteLock
from ckptctl.remote.objects import Objects
from ckptctl.remote.store import FsspecStore
from ckptctl.remote.trees import store_at
from ckptctl.runs.health import check_health
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.urls import HUB_SCHEME, parse_scheme
from ckptctl.storage.writing import (
    BUSY_MESSAGE,
    LOCK_NAME,
    OBJECTS_NAME,
    LockRecord,
    UploadedFile,
    encode_objects,
)
from ckptctl.tree import UrlPath

DATA = re.compile(r"__\d+_\d+\.distcp")
"""Names of the ranks' data files."""


class Url:
    """Folder in an object store or another remote file system.

    Rank 0 holds its lock during the save. Each file is only created if it does not exist, so late
    uploads of a dead run replace nothing. When all files exist, rank 0 records the identities of
    the objects, and then creates the metadata on the same condition.
    """

    _lock: RemoteLock

    def __init__(self, path: UrlPath, options: WriterOptions) -> None:
        self.target = path
        self._options = options
        self._own: dict[str, UploadedFile] = {}
        self._left: LockRecord | None = None
        self._begun = self._published = self._replaces = self._was_there = False

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`SaveTarget`."""
        if parse_scheme(self.target.url) == HUB_SCHEME:
            raise RefusedError(
                "training cannot save to the Hub",
                where=str(self.target),
                hint="save to a disk or an object store, then run `ckptctl convert` to hf://",
            )
        found = self._place.look()
        self._was_there = self._store.is_folder()
        if self._options.overwrite and METADATA in found:  # only a damaged one is replaced
            self.target.tree.forget_url(self.target.url)
            self._replaces = check_health(self.target, model=False).torn
        self._require_none(found)
        self._lock = RemoteLock(self._store, LOCK_NAME, [METADATA])
        self._left = self._lock.take()
        stack.callback(self._let_go)
        found = self._place.look()
        self._require_none(found)  # another run may have just finished
        self._clear(self._left, found)
        self._begun = True

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`SaveTarget`."""
        options = self._options
        how = ExecutionOptions(1, options.memory, options.checksum, sync=False)
        options.stream(plan, self._store.create, how, memory=memory_of(plan, pieces, how))

    def size(self, name: str) -> int:
        """See :class:`SaveTarget`."""
        found = self._uploaded.get(name) or UploadedFile(self._store.size(name), "")
        self._own[name] = found
        return found.size

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`SaveTarget`."""
        beside = self._options.files_beside()
        objects = encode_objects(str(self.target), self._own)
        self._lock.note_names((*beside, OBJECTS_NAME))
        for name, content in {**beside, OBJECTS_NAME: objects}.items():
            self._store.write(name, content)
        self._lock.require()
        with self._store.errors(METADATA, "write"):
            created = ConditionalObject(self._store, METADATA).create(b"".join(metadata))
        if not created:
            why = f"`{METADATA}` exists, but is not from this run"
            raise StorageError(BUSY_MESSAGE, where=str(self.target), why=why)
        self._published = True

    @cached_property
    def _store(self) -> FsspecStore:
        return store_at(self.target)

    @cached_property
    def _place(self) -> Objects:
        return Objects(self._store)

    @cached_property
    def _uploaded(self) -> Mapping[str, UploadedFile]:
        """Files that exist when all ranks are done."""
        return self._place.look()

    def _require_none(self, found: Mapping[str, UploadedFile]) -> None:
        """Raise if the target contains a checkpoint that is not replaced."""
        if METADATA in found and not self._replaces:
            raise RefusedError(
                "the destination exists",
                where=str(self.target),
                hint="save under a new name: objects cannot be replaced in one step",
            )

    def _clear(self, left: LockRecord | None, found: Mapping[str, UploadedFile]) -> None:
        """Remove files of a dead run, because the new ones may not replace all of them."""
        data = [name for name in found if DATA.fullmatch(name)]
        if self._replaces:
            known = [name for name in (METADATA, OBJECTS_NAME) if name in found]
            self._place.remove([*known, *data], found, self._lock.still)
            data = []
        if left is None and data:
            raise RefusedError(
                "the destination contains parts of another checkpoint",
                where=str(self.target),
                why=f"{quote_names(sorted(data))}: no lock identifies the save that wrote them",
                hint="save under another name, or remove them with `ckptctl prune "
                "--include-incomplete` if no save is running",
            )
        if left is not None:
            rest = {*left.names, *left.doomed} & found.keys() - {*data}
            self._place.remove([*data, *sorted(rest)], found, self._lock.still)
            self._place.drop_parts()

    def _let_go(self) -> None:
        """Release the lock, after removing the uploads of a failed save."""
        try:
            with suppress(CkptError):  # the next run removes the files and the lock
                if self._begun and not self._published:
                    self._take_back()
                if self._left and not self._begun:
                    self._lock.leave(self._left)
                else:
                    self._place.drop_parts()
                    self._lock.drop()
                if not self._published and not self._was_there:
                    self._store.remove_folders()
        finally:
            self._lock.stop()

    def _take_back(self) -> None:
        self._lock.require()
        found = self._place.look()
        data = [name for name in found if DATA.fullmatch(name)]
        named = [name for name in self._lock.names if name in found]  # the metadata first
        self._place.remove([*named, *data], found, self._lock.still)
