"""Where a save of all ranks goes: a directory that appears at once, or a folder behind a URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.rank_output import fill
from ckptctl.distributed.saving.streams import stream
from ckptctl.errors import CkptError, RefusedError
from ckptctl.formats.dcp.metadata import METADATA
from ckptctl.ops.destinations import replaceable
from ckptctl.planner.plan import Plan
from ckptctl.storage.destinations import destination
from ckptctl.storage.publish import Staging, data_directory, staging
from ckptctl.storage.remote import mounts
from ckptctl.storage.remote.lock import RemoteLock
from ckptctl.storage.remote.objects import Objects
from ckptctl.storage.remote.store import FsspecStore
from ckptctl.storage.remote.urls import HUB, is_url, scheme_of
from ckptctl.storage.remote.writing import NAME, Writing
from ckptctl.storage.sync import add_file

DATA = re.compile(r"__\d+_\d+\.distcp")
"""The files of ranks."""


class Place(Protocol):
    """A place for one checkpoint."""

    target: Path

    def make_room(self, stack: ExitStack) -> None:
        """Prepare the place, on rank 0; *stack* clears away what is not published."""

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """Write the files of one rank."""

    def size(self, name: str) -> int:
        """Return the size of a file as rank 0 sees it; -1: it does not."""

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Add the metadata, on rank 0: from then on there is a checkpoint."""


def place_at(path: Path, options: SaveOptions) -> Place:
    """Return the place at *path*, which may be a URL."""
    return Url(path, options) if is_url(path) else Folder(path, options)


class Folder:
    """A directory on a file system that all ranks see."""

    _stage: Staging

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.target = destination(path.expanduser().absolute())
        self._options = options

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`Place`."""
        room = staging(self.target, overwrite=self._options.overwrite, is_checkpoint=replaceable)
        self._stage = stack.enter_context(room)

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`Place`."""
        fill(plan, pieces, data_directory(self.target), self._options)

    def size(self, name: str) -> int:
        """See :class:`Place`."""
        return size_of(data_directory(self.target) / name)

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`Place`."""
        beside = self._options.beside() if self._options.beside else {}
        for name, content in beside.items():
            add_file(self._stage.data / name, [content], sync=self._options.sync)
        add_file(self._stage.data / METADATA, metadata, sync=self._options.sync)
        self._stage.publish()


def size_of(path: Path) -> int:
    """Return the size of a file; -1: there is none."""
    return path.stat().st_size if path.is_file() else -1


class Url:
    """A folder behind a URL: ranks upload their files as streams, the metadata is uploaded last.

    Rank 0 holds the lock of the folder meanwhile.
    """

    _lock: RemoteLock

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.target = path
        self._options = options
        self._url = mounts.secret_of(str(path))

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`Place`."""
        if scheme_of(self._url) == HUB:
            raise RefusedError(
                "training cannot save to the Hub",
                where=str(self.target),
                hint="save to a disk or an object store, and `ckptctl convert` to hf://",
            )
        self._require_none()
        self._lock = RemoteLock(self._store, NAME, [METADATA])
        left = self._lock.take()
        stack.callback(self._let_go)
        self._require_none()  # another run may have been at its end
        if left is not None:
            self._clear(left)

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`Place`."""
        stream(plan, pieces, self._store, checksum=self._options.checksum)

    def size(self, name: str) -> int:
        """See :class:`Place`."""
        return self._store.size(name)

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`Place`."""
        self._lock.require()
        self._store.write(METADATA, b"".join(metadata))

    @cached_property
    def _store(self) -> FsspecStore:
        return FsspecStore(self._url)

    def _require_none(self) -> None:
        """Refuse a place with a checkpoint.

        Raises:
            RefusedError: There is one.
        """
        if self._store.size(METADATA) >= 0:
            raise RefusedError(
                "the destination exists",
                where=str(self.target),
                hint="objects cannot be replaced in one step: save under a name of its own",
            )

    def _clear(self, left: Writing) -> None:
        """Remove what a dead run has left, of which the new ones would not replace everything."""
        place = Objects(self._store)
        found = place.look()
        data = [name for name in found if DATA.fullmatch(name)]
        if not left.is_all(found):
            data += [name for name in found if name in left.names]
        place.remove(data, found, self._lock.still)

    def _let_go(self) -> None:
        with suppress(CkptError):  # the next run removes a lock that nobody holds
            self._lock.drop()
