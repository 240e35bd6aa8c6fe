"""Readers of byte ranges of the files of a checkpoint.

Local files are opened ``O_RDONLY`` and read with ``preadv``. They are never memory-mapped, because
truncating a mapped file kills the process. File names read from a checkpoint cannot refer to files
outside of the checkpoint.
"""

from __future__ import annotations

import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ckptctl.errors import (
    DamagedError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    wrap_os_errors,
)
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.paths import OutsideError, leads_outside, require_relative, resolve_links
from ckptctl.tree import TreePath, UrlPath

SMALL_READ_BYTES = 1 << 16
"""Maximum number of bytes to request before the file size has been checked."""
MAX_OFFSET = (1 << 63) - 1 - SMALL_READ_BYTES
"""Largest file offset to request before the file size has been checked (``off_t`` is signed)."""
MAX_OPEN_FILES = 256
MAX_REQUEST_BYTES = 4 << 20
"""Maximum number of bytes per request to a remote store."""
IOV_MAX = 1024


class Readable(Protocol):
    """Object that can read byte ranges of files by name."""

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views* in order with the bytes of the file *name* from *offset*."""


def source_files(root: TreePath) -> SourceFiles:
    """Create a reader of the files below *root*, a local or remote directory."""
    return UrlFiles(root) if isinstance(root, UrlPath) else LocalFiles(Path(root))


class SourceFiles(ABC):
    """Thread-safe reader of the files below one local or remote directory.

    Attributes:
        root: Root directory.
        local: Whether the files are local and have descriptors.

    Raises:
        OutsideError: A name refers to a file outside of the root.
        SourceNotFoundError: The file does not exist.
        UnsupportedError: A name does not refer to a regular file.
        StorageError: A read failed.
    """

    root: TreePath
    local = False

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """Close the file descriptors, or drop the cached data of remote files."""

    def drop_metadata(self) -> None:  # noqa: B027
        """Drop cached metadata of remote files, which may have changed."""

    @abstractmethod
    def path(self, name: str) -> TreePath:
        """Return the path of *name* after checking that it exists and is inside the root."""

    @abstractmethod
    def read_identity(self, name: str) -> FileIdentity:
        """Return the size, times and inode of *name*, to detect later changes of the file."""

    @abstractmethod
    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read *nbytes* bytes of *name* from *offset*, or fewer at the end of the file."""

    @abstractmethod
    def fill_views(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """Fill *views* with bytes of *name* from *offset*, and return the number of bytes read."""

    def size(self, name: str) -> int:
        """Return the size of *name* in bytes."""
        return self.read_identity(name).size

    def find_digest(self, name: str) -> str | None:  # noqa: ARG002
        """Return the digest of *name* if the remote store records one, as the Hub does.

        Returns:
            SHA-256 or git blob SHA-1 in hexadecimal, or None if the store does not record one.
        """
        return None

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read exactly *nbytes* bytes of *name* from *offset*.

        Raises:
            DamagedError: The file ends before the last byte.
        """
        if 0 <= nbytes <= SMALL_READ_BYTES and 0 <= offset <= MAX_OFFSET:
            content = self.read_up_to(name, offset, nbytes)
            if len(content) == nbytes:
                return content
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size(name):
            raise self._truncated_error(name, offset, nbytes)
        buffer = bytearray(nbytes)
        self.readv(name, [memoryview(buffer)], offset)
        return bytes(buffer)

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views* in order with the bytes from *offset*.

        Args:
            name: File name relative to the root.
            views: Any number of writable byte views.
            offset: First byte.

        Raises:
            DamagedError: The file ends before *views* are full.
            StorageError: The read failed.
        """
        filled = self.fill_views(name, views, offset)
        requested = sum(map(len, views))
        if filled < requested:
            raise self._truncated_error(name, offset + filled, requested - filled)

    def prefetch(self, name: str, offset: int) -> None:  # noqa: B027
        """Fetch the bytes around *offset* of a remote file into memory.

        Args:
            name: File name relative to the root.
            offset: Byte position, relative to the end if negative.

        Raises:
            CkptError: The fetch failed. A later read of the bytes raises the error again.
        """

    def limit_read_ahead(self, name: str, stop: int) -> None:  # noqa: B027
        """Limit read-ahead of *name* to the bytes before *stop*.

        Args:
            name: File name relative to the root.
            stop: Offset of the first byte after the range that is being read.
        """

    def open_descriptor(self, name: str) -> int:
        """Open a new file descriptor of *name*, which the caller must close.

        Raises:
            StorageError: The file cannot be opened, or is remote (see :attr:`local`).
        """
        raise StorageError(
            f"`{name}` is remote and cannot be opened as a local file", where=str(self.root)
        )

    def _truncated_error(self, name: str, offset: int, nbytes: int) -> DamagedError:
        return DamagedError(
            f"`{Path(name).name}` is truncated",
            where=str(self.root / name),
            why=f"bytes {offset:,} to {offset + nbytes:,} are needed, "
            f"but the file has {self.size(name):,}",
        )


class LocalFiles(SourceFiles):
    """Files below a local directory, which are opened on first use and stay open."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root: Path = root
        self._lock = threading.Lock()
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._users: dict[int, int] = {}

    def close(self) -> None:
        """Close the descriptors of all open files."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def path(self, name: str) -> Path:
        """Return the path of *name* after checking that it exists inside the root."""
        path = self.root / require_relative(name, str(self.root))
        if leads_outside(path, self.root):
            why = f"it resolves to {resolve_links(path)}"
            raise OutsideError(f"`{name}` points outside the checkpoint", where=str(path), why=why)
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise SourceNotFoundError(f"`{name}` is missing", where=str(self.root)) from None
        except OSError as error:
            raise StorageError.from_os_error(error, "access", str(path)) from error
        if not stat.S_ISREG(mode):
            raise UnsupportedError(f"`{name}` is not a regular file", where=str(path))
        return path

    def read_identity(self, name: str) -> FileIdentity:
        """See :meth:`SourceFiles.read_identity`."""
        with self._hold_descriptor(name) as descriptor:
            return FileIdentity.from_stat(os.fstat(descriptor))

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`SourceFiles.read_up_to`."""
        descriptor = self._acquire_descriptor(name)
        try:
            return os.pread(descriptor, nbytes, offset)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(self.root / name)) from error
        finally:
            self._release_descriptor(descriptor)

    def fill_views(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`SourceFiles.fill_views`."""
        filled = 0
        with self._hold_descriptor(name) as descriptor:
            for start in range(0, len(views), IOV_MAX):
                batch = views[start : start + IOV_MAX]
                count = self._read_fully(descriptor, name, batch, offset + filled)
                filled += count
                if count < sum(map(len, batch)):
                    break
        return filled

    def open_descriptor(self, name: str) -> int:
        """See :meth:`SourceFiles.open_descriptor`."""
        path = self.path(name)
        with wrap_os_errors("open", path):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _read_fully(
        self, descriptor: int, name: str, views: Sequence[memoryview], offset: int
    ) -> int:
        requested = sum(len(view) for view in views)
        filled = 0
        remaining = list(views)
        while filled < requested:
            try:
                count = os.preadv(descriptor, remaining, offset + filled)
            except OSError as error:
                raise StorageError.from_os_error(error, "read", str(self.root / name)) from error
            if count == 0:
                break
            filled += count
            remaining = skip_bytes(remaining, count) if filled < requested else []
        return filled

    @contextmanager
    def _hold_descriptor(self, name: str) -> Iterator[int]:
        descriptor = self._acquire_descriptor(name)
        try:
            yield descriptor
        finally:
            self._release_descriptor(descriptor)

    def _acquire_descriptor(self, name: str) -> int:
        """Return the shared descriptor of *name*, which stays open until the caller releases it."""
        with self._lock:
            descriptor = self._descriptors.get(name)
            if descriptor is None:
                descriptor = self._descriptors[name] = self.open_descriptor(name)
            else:
                self._descriptors.move_to_end(name)
            self._users[descriptor] = self._users.get(descriptor, 0) + 1
            if len(self._descriptors) > MAX_OPEN_FILES:
                self._close_idle()
            return descriptor

    def _release_descriptor(self, descriptor: int) -> None:
        with self._lock:
            self._users[descriptor] -= 1

    def _close_idle(self) -> None:
        """Close unused descriptors, least recently used first, while too many files are open."""
        for name, descriptor in list(self._descriptors.items()):
            if len(self._descriptors) <= MAX_OPEN_FILES:
                return
            if not self._users.get(descriptor):
                del self._descriptors[name]
                self._users.pop(descriptor, None)
                os.close(descriptor)


class UrlFiles(SourceFiles):
    """Files below a URL, which have no file descriptors."""

    def __init__(self, root: UrlPath) -> None:
        self._tree = root.tree
        self.root: UrlPath = UrlPath(root.tree, root.tree.resolve_url(root.url))

    def close(self) -> None:
        """Drop the cached data of the files below the URL."""
        self._tree.trim_cache()

    def drop_metadata(self) -> None:
        """Drop the cached metadata and directory listings below the URL."""
        self._tree.refresh_entries(self.root.url)

    def path(self, name: str) -> UrlPath:
        """See :meth:`SourceFiles.path`."""
        self._tree.get_file_entry(self._build_url(name))
        return self.root / name

    def read_identity(self, name: str) -> FileIdentity:
        """See :meth:`SourceFiles.read_identity`."""
        entry = self._tree.get_file_entry(self._build_url(name))
        return FileIdentity(entry.size, entry.mtime_ns, entry.mtime_ns, entry.version_number, 0)

    def find_digest(self, name: str) -> str | None:
        """See :meth:`SourceFiles.find_digest`."""
        return self._tree.get_file_entry(self._build_url(name)).digest

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`SourceFiles.read_up_to`."""
        return bytes(self._tree.read_range(self._build_url(name), offset, nbytes))

    def fill_views(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`SourceFiles.fill_views`."""
        url = self._build_url(name)
        remaining, filled, requested = list(views), 0, sum(map(len, views))
        while filled < requested:
            request_bytes = min(MAX_REQUEST_BYTES, requested - filled)
            data = memoryview(self._tree.read_range(url, offset + filled, request_bytes))
            copied = 0
            for view in remaining:
                part = data[copied : copied + len(view)]
                view[: len(part)] = part
                copied += len(part)
                if copied == len(data):
                    break
            remaining, filled = skip_bytes(remaining, copied), filled + copied
            if copied < request_bytes:
                break
        return filled

    def prefetch(self, name: str, offset: int) -> None:
        """See :meth:`SourceFiles.prefetch`."""
        self._tree.prefetch_range(self._build_url(name), offset)

    def limit_read_ahead(self, name: str, stop: int) -> None:
        """See :meth:`SourceFiles.limit_read_ahead`."""
        self._tree.mark_range_end(self._build_url(name), stop)

    def _build_url(self, name: str) -> str:
        return f"{self.root.url}/{require_relative(name, self.root.url)}"


def skip_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return *views* without their first *count* bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


class MemoryFiles(SourceFiles):
    """Single file in memory, which is read regardless of the given name."""

    def __init__(self, content: bytes, root: TreePath) -> None:
        self.root = root
        self._content = content

    def path(self, name: str) -> TreePath:
        """Return the path that messages show for the file in memory."""
        return self.root / name

    def read_identity(self, name: str) -> FileIdentity:  # noqa: ARG002
        """Return an identity in which only the size is set."""
        return FileIdentity(len(self._content), 0, 0, 0, 0)

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:  # noqa: ARG002
        """See :meth:`~ckptctl.storage.files.SourceFiles.read_up_to`."""
        return self._content[offset : offset + nbytes]

    def fill_views(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`~ckptctl.storage.files.SourceFiles.fill_views`."""
        start = offset
        for view in views:
            part = self.read_up_to(name, offset, len(view))
            view[: len(part)] = part
            offset += len(part)
        return offset - start
