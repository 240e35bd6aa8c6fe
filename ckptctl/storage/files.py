"""Reading the files of a checkpoint by position, and only the files of that checkpoint.

Files are opened ``O_RDONLY`` and read with ``preadv``: never through a memory map, because a file
that shrinks under one kills the process. Names that come from inside a checkpoint cannot leave it.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath

from ckptctl.errors import DamagedError, SourceNotFoundError, StorageError
from ckptctl.planner.plan import FileIdentity
from ckptctl.storage.urls import is_url

MAX_OPEN = 256
IOV_MAX = 1024
AT_ONCE = 1 << 16
MAX_OFFSET = (1 << 63) - 1 - AT_ONCE
SHARED_BLOB = re.compile(r"[0-9a-f]{64}")
Buffer = memoryview | bytearray


def contained(name: str, where: str) -> str:
    """Return *name* if it is a plain relative path below a checkpoint's root.

    Args:
        name: A path found inside a checkpoint (``weight_map``, ``relative_path``).
        where: The file that names it, for the error.

    Raises:
        DamagedError: The path is absolute, has a drive, a ``..`` or a NUL, or is empty.
    """
    pure = PureWindowsPath(name)
    parts = pure.parts
    if not parts or pure.drive or pure.root or ".." in parts or "\0" in name or "\\" in name:
        raise DamagedError(
            f"`{name}` is not a path inside the checkpoint",
            where=where,
            why="names in a checkpoint must be relative and must not contain `..`",
        )
    return "/".join(parts)


class SourceFiles:
    """The files below one root, opened on demand and kept open, for many threads.

    Below a URL they are :class:`~ckptctl.storage.remote_files.RemoteFiles`, read by ranges.

    Args:
        root: Directory, or URL of one, that names are relative to.

    Attributes:
        root: The same as a path.
        local: Whether they are files of this machine, which have descriptors.
    """

    local = True

    def __new__(cls, root: str | os.PathLike[str]) -> SourceFiles:
        """Return the files of this machine, or those behind a URL."""
        if cls is SourceFiles and is_url(root):
            from ckptctl.storage.remote_files import RemoteFiles

            return super().__new__(RemoteFiles)
        return super().__new__(cls)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = root if isinstance(root, Path) else Path(root)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[int, int] = {}

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Forget what was learnt of files that may change; of local ones nothing is kept."""

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def path(self, name: str) -> Path:
        """Return the path of *name* after checking that it stays inside the root.

        Symbolic links may leave the root only the way the Hugging Face cache uses them: from
        ``snapshots/<revision>/`` into the ``blobs/`` directory of the same repository, and on to
        the ``blobs/`` that all repositories share (huggingface_hub, ``utils/_shared_blobs.py``).

        Raises:
            DamagedError: It leads elsewhere or is not a regular file.
            SourceNotFoundError: There is no such file.
        """
        path = self.root / contained(name, str(self.root))
        root = self.root.resolve()
        real = path.resolve()
        if not real.is_relative_to(root) and not _in_hub_blobs(root, real):
            raise DamagedError(
                f"`{name}` leads outside the checkpoint", where=str(path), why=f"it is {real}"
            )
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise SourceNotFoundError(f"`{name}` is missing", where=str(self.root)) from None
        except OSError as error:
            raise StorageError.from_os_error(error, "look at", str(path)) from error
        if not stat.S_ISREG(mode):
            raise DamagedError(f"`{name}` is not a regular file", where=str(path))
        return path

    def identity(self, name: str) -> FileIdentity:
        """Return what must stay the same while *name* is being read."""
        with self._descriptor(name) as descriptor:
            found = os.fstat(descriptor)
        return FileIdentity(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)

    def size(self, name: str) -> int:
        """Return the size of *name* in bytes."""
        return self.identity(name).size

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return exactly *nbytes* bytes from *offset*.

        Raises:
            DamagedError: The file ends before that.
        """
        if 0 <= nbytes <= AT_ONCE and 0 <= offset <= MAX_OFFSET:
            found = self._pread(name, offset, nbytes)
            if len(found) == nbytes:
                return found
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size(name):
            raise _truncated(self.root / name, offset, nbytes, self.size(name))
        buffer = bytearray(nbytes)
        self.readv(name, [memoryview(buffer)], offset)
        return bytes(buffer)

    def _pread(self, name: str, offset: int, nbytes: int) -> bytes:
        descriptor = self._hold(name)
        try:
            return os.pread(descriptor, nbytes, offset)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(self.root / name)) from error
        finally:
            self._release(descriptor)

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* on.

        Args:
            name: The file.
            views: Writable byte views; any number of them.
            offset: First byte.

        Raises:
            DamagedError: The file ends before they are full.
            StorageError: The operating system failed the read.
        """
        with self._descriptor(name) as descriptor:
            for start in range(0, len(views), IOV_MAX):
                offset += self._fill(descriptor, name, views[start : start + IOV_MAX], offset)

    def descriptor(self, name: str) -> int:
        """Return an own, new descriptor of *name*; the caller closes it."""
        try:
            return os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError.from_os_error(error, "open", str(self.root / name)) from error

    def _fill(self, descriptor: int, name: str, views: Sequence[memoryview], offset: int) -> int:
        wanted = sum(len(view) for view in views)
        done = 0
        left = list(views)
        while done < wanted:
            try:
                count = os.preadv(descriptor, left, offset + done)
            except OSError as error:
                raise StorageError.from_os_error(error, "read", str(self.root / name)) from error
            if count == 0:
                size = os.fstat(descriptor).st_size
                raise _truncated(self.root / name, offset + done, wanted - done, size)
            done += count
            left = after(left, count) if done < wanted else []
        return wanted

    @contextmanager
    def _descriptor(self, name: str) -> Iterator[int]:
        descriptor = self._hold(name)
        try:
            yield descriptor
        finally:
            self._release(descriptor)

    def _hold(self, name: str) -> int:
        """Return the descriptor of *name*, which stays open until it is released."""
        with self._lock:
            descriptor = self._open.get(name)
            if descriptor is None:
                descriptor = self._open[name] = self.descriptor(name)
                self._shrink()
            else:
                self._open.move_to_end(name)
            self._users[descriptor] = self._users.get(descriptor, 0) + 1
            return descriptor

    def _release(self, descriptor: int) -> None:
        with self._lock:
            self._users[descriptor] -= 1

    def _shrink(self) -> None:
        for name, descriptor in list(self._open.items()):
            if len(self._open) <= MAX_OPEN:
                return
            if not self._users.get(descriptor):
                del self._open[name]
                self._users.pop(descriptor, None)
                os.close(descriptor)


def after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of *views* once their first *count* bytes are done."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def hub_repository(root: Path) -> Path | None:
    """Return the repository in a Hugging Face cache whose snapshot *root* is, or lies in."""
    found = (parent.parent for parent in root.parents if parent.name == "snapshots")
    return next(found, None)


def _in_hub_blobs(root: Path, real: Path) -> bool:
    repository = hub_repository(root)
    if repository is None:
        return False
    shared = real.parent.parent == repository.parent / "blobs"
    return real.parent == repository / "blobs" or (
        shared and SHARED_BLOB.fullmatch(real.name) is not None
    )


def _truncated(path: Path, offset: int, nbytes: int, size: int) -> DamagedError:
    return DamagedError(
        f"`{path.name}` is truncated",
        where=str(path),
        why=f"bytes {offset:,} to {offset + nbytes:,} are needed, the file has {size:,}",
    )
