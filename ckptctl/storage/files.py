"""Reading the files of a checkpoint by position, and only the files of that checkpoint.

Names that come from inside a checkpoint cannot leave it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ckptctl.errors import DamagedError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.local_files import LocalFiles
from ckptctl.storage.remote.urls import is_url

AT_ONCE = 1 << 16
"""Bytes that are asked for without looking first whether the file has so many."""
MAX_OFFSET = (1 << 63) - 1 - AT_ONCE
"""The last byte from which so many can be asked for: ``off_t`` is signed."""


class Access(Protocol):
    """The files below one root, on this machine or behind a URL.

    Names are relative to the root, and must not lead out of it.

    Raises:
        DamagedError: By all that take a name: it leads elsewhere, or is no regular file.
        SourceNotFoundError: By all that take a name: there is no such file.
        StorageError: By all that read: the read failed.
    """

    @property
    def root(self) -> Path:
        """The root, as a path."""

    @property
    def local(self) -> bool:
        """Whether they are files of this machine, which have descriptors."""

    def close(self) -> None:
        """Let go of what is open."""

    def forget(self) -> None:
        """Forget what was learnt of files that may change."""

    def path(self, name: str) -> Path:
        """Return the path of *name*, which is there."""

    def identity(self, name: str) -> FileIdentity:
        """Return what must stay the same while *name* is being read."""

    def digest(self, name: str) -> str | None:
        """Return the digest of the content, where the place tells it."""

    def read_some(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return a range of bytes; fewer where the file ends."""

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """Fill *views*, and return how many bytes there were for them."""

    def prefetch(self, name: str, offset: int) -> None:
        """Get the bytes around *offset* where that takes a while."""

    def descriptor(self, name: str) -> int:
        """Return an own, new descriptor of *name*."""


class SourceFiles:
    """The files below one root, for many threads.

    Args:
        root: Directory, or URL of one, that names are relative to.

    Attributes:
        root: The same as a path.
        local: Whether they are files of this machine, which have descriptors.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._access = _access(root)
        self.root = self._access.root
        self.local = self._access.local

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of descriptors, and of what was kept of remote files."""
        self._access.close()

    def forget(self) -> None:
        """Forget what was learnt of files that may change; of local ones nothing is kept."""
        self._access.forget()

    def path(self, name: str) -> Path:
        """Return the path of *name* after checking that it stays inside the root.

        Raises:
            DamagedError: It leads elsewhere or is not a regular file.
            SourceNotFoundError: There is no such file.
        """
        return self._access.path(name)

    def identity(self, name: str) -> FileIdentity:
        """Return what must stay the same while *name* is being read."""
        return self._access.identity(name)

    def size(self, name: str) -> int:
        """Return the size of *name* in bytes."""
        return self._access.identity(name).size

    def digest(self, name: str) -> str | None:
        """Return the digest of the content of *name* where its place tells it, as the Hub does.

        Returns:
            SHA-256, or git's SHA-1 of a blob, in hexadecimal; None: only reading it would tell.
        """
        return self._access.digest(name)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return exactly *nbytes* bytes from *offset*.

        Raises:
            DamagedError: The file ends before that.
        """
        if 0 <= nbytes <= AT_ONCE and 0 <= offset <= MAX_OFFSET:
            found = self._access.read_some(name, offset, nbytes)
            if len(found) == nbytes:
                return found
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size(name):
            raise self._truncated(name, offset, nbytes)
        buffer = bytearray(nbytes)
        self.readv(name, [memoryview(buffer)], offset)
        return bytes(buffer)

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* on.

        Args:
            name: The file.
            views: Writable byte views; any number of them.
            offset: First byte.

        Raises:
            DamagedError: The file ends before they are full.
            StorageError: The read failed.
        """
        done = self._access.readv(name, views, offset)
        wanted = sum(map(len, views))
        if done < wanted:
            raise self._truncated(name, offset + done, wanted - done)

    def prefetch(self, name: str, offset: int) -> None:
        """Get the bytes around *offset* into memory, where it takes a while to get them.

        Args:
            name: The file.
            offset: A byte; from the end, where negative.

        Raises:
            CkptError: There are none; whoever reads them is told again.
        """
        self._access.prefetch(name, offset)

    def descriptor(self, name: str) -> int:
        """Return an own, new descriptor of *name*; the caller closes it.

        Raises:
            StorageError: It cannot be opened, or is not :attr:`local`.
        """
        return self._access.descriptor(name)

    def _truncated(self, name: str, offset: int, nbytes: int) -> DamagedError:
        return DamagedError(
            f"`{Path(name).name}` is truncated",
            where=str(self.root / name),
            why=f"bytes {offset:,} to {offset + nbytes:,} are needed, "
            f"the file has {self.size(name):,}",
        )


def _access(root: str | os.PathLike[str]) -> Access:
    if not is_url(root):
        return LocalFiles(root if isinstance(root, Path) else Path(root))
    from ckptctl.storage.remote.files import RemoteFiles

    return RemoteFiles(root)
