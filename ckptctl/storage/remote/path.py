"""Paths behind URLs: what reads a checkpoint asks them what it asks the paths of this machine.

The text of such a path is its URL, which no system call understands: code that opens one by itself,
past :class:`~ckptctl.storage.files.SourceFiles`, fails with "no such file". There is nothing on
the disk that it could take for data.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import PosixPath
from typing import IO, Any, Self

from ckptctl.errors import CkptError, SourceNotFoundError
from ckptctl.storage.remote import mounts
from ckptctl.storage.remote.store import Stored

READ_ONLY = 0o444


class RemotePath(PosixPath):
    """A path behind a URL.

    Of what lies above the URL that was asked for, its folder alone is looked at.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the URL, as it may be shown."""
        scheme, *rest = self.parts or (".",)
        return f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else "/".join(self.parts)

    def __fspath__(self) -> str:
        return str(self)

    def found(self) -> Stored | None:
        """Return what is there; None: nothing."""
        mount, name = mounts.place(str(self))
        return mount.find(name) if mount else None

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size, time and version (as the inode) of what is there.

        Raises:
            FileNotFoundError: There is nothing.
        """
        found = self.found()
        if found is None:
            raise FileNotFoundError(2, os.strerror(2), str(self))
        kind = stat.S_IFDIR if found.folder else stat.S_IFREG
        seconds = found.mtime_ns // 10**9
        times = {"st_atime_ns": 0, "st_mtime_ns": found.mtime_ns, "st_ctime_ns": found.mtime_ns}
        numbers = (kind | READ_ONLY, found.number, 0, 1, 0, 0, found.size, 0, seconds, seconds)
        return os.stat_result(numbers, times)

    def lstat(self) -> os.stat_result:
        """Return the same as :meth:`stat`."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is anything."""
        return self.found() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        found = self.found()
        return found is not None and found.folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        found = self.found()
        return found is not None and not found.folder

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def is_mount(self) -> bool:
        """Return False."""
        return False

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield what is in the folder."""
        mount, name = mounts.place(str(self))
        if mount and self.is_dir():
            for one in mount.members(name):
                yield self / one

    def glob(self, pattern: str, **_: Any) -> Generator[Self, None, None]:
        """Yield what is directly in the folder and matches; *pattern* has no slash."""
        assert "/" not in pattern and "**" not in pattern
        for item in self.iterdir():
            if fnmatchcase(item.name, pattern):
                yield item

    def rglob(self, pattern: str, **_: Any) -> Generator[Self, None, None]:
        """Yield what matches in the folder and all below it."""
        for item in self.iterdir():
            if fnmatchcase(item.name, pattern):
                yield item
            if item.is_dir():
                yield from item.rglob(pattern)

    def resolve(self, strict: bool = False) -> Self:
        """Return itself."""
        return self

    def absolute(self) -> Self:
        """Return itself."""
        return self

    def expanduser(self) -> Self:
        """Return itself."""
        return self

    def open(self, mode: str = "r", *_: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        """Open it for reading; what is not read is not fetched."""
        if set(mode) - set("rbt"):
            raise OSError(30, os.strerror(30), str(self))
        file = io.BufferedReader(_Ranges(self))
        return file if "b" in mode else io.TextIOWrapper(file, **options)


class _Ranges(io.RawIOBase):
    """A remote file as Python's own files are."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        mount, name = mounts.place(str(self._path))
        try:
            found = mount.read(name, self._at, len(view)) if mount else b""
        except SourceNotFoundError:
            raise FileNotFoundError(2, os.strerror(2), str(self._path)) from None
        except CkptError as error:
            raise OSError(5, f"{error.what}: {error.why}", str(self._path)) from error
        view[: len(found)] = found
        self._at += len(found)
        return len(found)
