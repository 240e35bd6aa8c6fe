"""The files of a checkpoint behind a URL, read by ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptctl.errors import SourceNotFoundError, StorageError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.contained import contained
from ckptctl.storage.remote import mounts
from ckptctl.storage.remote.blocks import SHARED
from ckptctl.storage.remote.path import RemotePath
from ckptctl.storage.remote.store import Stored
from ckptctl.storage.remote.urls import masked

MOST = 4 << 20
"""Bytes of one request at most."""


class RemoteFiles:
    """The files below one URL; none of them has a descriptor.

    Args:
        root: The folder.

    Attributes:
        root: The same, as it may be shown.
        local: False.
    """

    local = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        url = masked(os.fspath(root)).rstrip("/")
        mount, below = mounts.place(url)
        if mount is None:
            url = mounts.mount(os.fspath(root))
            mount, below = mounts.place(url)
        if mount is None:
            raise SourceNotFoundError("there is nothing at this URL", where=url)
        self.root: Path = RemotePath(url)
        self._mount = mount
        self._below = below

    def close(self) -> None:
        """Let go of what was read."""
        SHARED.trim()

    def forget(self) -> None:
        """Look at the place anew from now on."""
        self._mount.forget()

    def path(self, name: str) -> Path:
        """See :meth:`~ckptctl.storage.files.Access.path`."""
        self._file(name)
        return self.root / name

    def identity(self, name: str) -> FileIdentity:
        """See :meth:`~ckptctl.storage.files.Access.identity`."""
        found = self._file(name)
        return FileIdentity(found.size, found.mtime_ns, found.mtime_ns, found.number, 0)

    def digest(self, name: str) -> str | None:
        """See :meth:`~ckptctl.storage.files.Access.digest`."""
        return self._file(name).digest

    def read_some(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`~ckptctl.storage.files.Access.read_some`."""
        return bytes(self._mount.read(self._inner(name), offset, nbytes))

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`~ckptctl.storage.files.Access.readv`."""
        inner = self._inner(name)
        done = 0
        for some in _grouped(views):
            wanted = sum(map(len, some))
            found = memoryview(self._mount.read(inner, offset + done, wanted))
            at = 0
            for view in some:
                part = found[at : at + len(view)]
                view[: len(part)] = part
                at += len(part)
            done += at
            if at < wanted:
                break
        return done

    def prefetch(self, name: str, offset: int) -> None:
        """See :meth:`~ckptctl.storage.files.Access.prefetch`."""
        inner = self._inner(name)
        size = self._mount.file(inner).size
        self._mount.prefetch(inner, offset if offset >= 0 else max(0, size + offset))

    def descriptor(self, name: str) -> int:
        """Raise an error: who wants a descriptor has to ask :attr:`local` first."""
        raise StorageError(f"`{name}` is behind a URL and cannot be opened", where=str(self.root))

    def _file(self, name: str) -> Stored:
        return self._mount.file(self._inner(name))

    def _inner(self, name: str) -> str:
        plain = contained(name, str(self.root))
        return f"{self._below}/{plain}" if self._below else plain


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
