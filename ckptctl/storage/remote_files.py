"""The files of a checkpoint behind a URL, read by ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptctl.errors import DamagedError, SourceNotFoundError, StorageError
from ckptctl.planner.plan import FileIdentity
from ckptctl.storage import remote_mounts
from ckptctl.storage.files import SourceFiles, contained
from ckptctl.storage.remote_blocks import SHARED
from ckptctl.storage.remote_path import RemotePath
from ckptctl.storage.remote_store import Stored
from ckptctl.storage.urls import masked

MOST = 4 << 20
"""Bytes of one request at most."""


class RemoteFiles(SourceFiles):
    """The files below one URL; none of them has a descriptor.

    Args:
        root: The folder.
    """

    local = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        url = masked(os.fspath(root)).rstrip("/")
        mount, below = remote_mounts.place(url)
        if mount is None:
            url = remote_mounts.mount(os.fspath(root))
            mount, below = remote_mounts.place(url)
        if mount is None:
            raise SourceNotFoundError("there is nothing at this URL", where=url)
        super().__init__(RemotePath(url))
        self._mount = mount
        self._below = below

    def close(self) -> None:
        """Let go of what was read."""
        SHARED.trim()

    def path(self, name: str) -> Path:
        """See :meth:`SourceFiles.path`."""
        self._file(name)
        return self.root / name

    def identity(self, name: str) -> FileIdentity:
        """Return what must stay the same while *name* is being read."""
        found = self._file(name)
        return FileIdentity(found.size, found.mtime_ns, found.number, 0)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`SourceFiles.read`."""
        buffer = bytearray(nbytes if 0 <= offset <= offset + nbytes <= self.size(name) else 0)
        if len(buffer) != nbytes:
            raise self._short(name, offset, nbytes)
        self.readv(name, [memoryview(buffer)], offset)
        return bytes(buffer)

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """See :meth:`SourceFiles.readv`."""
        inner = self._inner(name)
        for some in _grouped(views):
            wanted = sum(map(len, some))
            found = memoryview(self._mount.read(inner, offset, wanted))
            if len(found) != wanted:
                raise self._short(name, offset, wanted)
            at = 0
            for view in some:
                view[:] = found[at : at + len(view)]
                at += len(view)
            offset += wanted

    def descriptor(self, name: str) -> int:
        """Raise an error: who wants a descriptor has to ask :attr:`local` first."""
        raise StorageError(f"`{name}` is behind a URL and cannot be opened", where=str(self.root))

    def forget(self) -> None:
        """Look at the place anew from now on."""
        self._mount.forget()

    def _file(self, name: str) -> Stored:
        return self._mount.file(self._inner(name))

    def _inner(self, name: str) -> str:
        plain = contained(name, str(self.root))
        return f"{self._below}/{plain}" if self._below else plain

    def _short(self, name: str, offset: int, nbytes: int) -> DamagedError:
        return DamagedError(
            f"`{Path(name).name}` is truncated",
            where=str(self.root / name),
            why=f"bytes {offset:,} to {offset + nbytes:,} are needed, "
            f"the file has {self.size(name):,}",
        )


def _grouped(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield *views*, long ones in parts, in groups of at most :data:`MOST` bytes."""
    group: list[memoryview] = []
    room = MOST
    for view in views:
        while len(view) > room:
            yield [*group, view[:room]]
            group, view, room = [], view[room:], MOST
        group.append(view)
        room -= len(view)
    yield group
