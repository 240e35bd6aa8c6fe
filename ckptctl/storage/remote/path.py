"""Paths behind URLs: what reads a checkpoint asks them what it asks the paths of this machine.

The text of such a path is its URL, which no system call understands: code that opens one by itself,
past :class:`~ckptctl.storage.files.SourceFiles`, fails with "no such file". There is nothing on
the disk that it could take for data.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Generator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import IO, Any, Self

from ckptctl.errors import CkptError, SourceNotFoundError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.files import SourceFiles, after
from ckptctl.storage.paths import contained
from ckptctl.storage.remote import trees
from ckptctl.storage.remote.blocks import SHARED
from ckptctl.storage.remote.store import RemoteEntry
from ckptctl.storage.urls import masked

READ_ONLY = 0o444
MOST = 4 << 20
"""Bytes of one request at most."""


class RemotePath(PosixPath):
    """A path behind a URL.

    Of what lies above the URL that was asked for, its folder alone is looked at.
    """

    __slots__ = ()

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> RemotePath:
        """Return the path of a URL as a user names it; nothing is looked at yet."""
        return path if isinstance(path, cls) else cls(trees.remember(os.fspath(path)))

    @classmethod
    def looked_at(cls, path: str | os.PathLike[str]) -> RemotePath:
        """Return the path of a URL, behind which is looked anew unless *path* comes from there."""
        named = cls.named(path)
        if named is path and trees.tree_at(str(named))[0]:
            return named
        return cls(trees.look(str(named)))

    def require_answers(self) -> None:
        """Raise the last failure of the place to answer, if there was one."""
        tree, _ = trees.tree_at(str(self))
        if tree is not None and tree.failure is not None:
            raise tree.failure

    def __str__(self) -> str:
        """Return the URL, as it may be shown."""
        scheme, *rest = self.parts or (".",)
        return f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else "/".join(self.parts)

    def __fspath__(self) -> str:
        return str(self)

    def entry(self) -> RemoteEntry | None:
        """Return the entry of the file or folder; None: there is nothing."""
        tree, name = trees.tree_at(str(self))
        return tree.find(name) if tree else None

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size, time and version (as the inode) of what is there."""
        entry = self.entry()
        if entry is None:
            raise FileNotFoundError(2, os.strerror(2), str(self))
        kind = stat.S_IFDIR if entry.folder else stat.S_IFREG
        seconds = entry.mtime_ns // 10**9
        times = {"st_atime_ns": 0, "st_mtime_ns": entry.mtime_ns, "st_ctime_ns": entry.mtime_ns}
        numbers = (kind | READ_ONLY, entry.number, 0, 1, 0, 0, entry.size, 0, seconds, seconds)
        return os.stat_result(numbers, times)

    def lstat(self) -> os.stat_result:
        """Return the same as :meth:`stat`."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is anything."""
        return self.entry() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        entry = self.entry()
        return entry is not None and entry.folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        entry = self.entry()
        return entry is not None and not entry.folder

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def is_mount(self) -> bool:
        """Return False."""
        return False

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield the members of the folder."""
        tree, name = trees.tree_at(str(self))
        if tree and self.is_dir():
            for member in tree.members(name):
                yield self / member

    def glob(self, pattern: str, **_: Any) -> Generator[Self, None, None]:
        """Yield the members of the folder that match; *pattern* has no slash."""
        assert "/" not in pattern and "**" not in pattern
        for item in self.iterdir():
            if fnmatchcase(item.name, pattern):
                yield item

    def rglob(self, pattern: str, **_: Any) -> Generator[Self, None, None]:
        """Yield all that match in the folder and below it."""
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
        tree, name = trees.tree_at(str(self._path))
        try:
            data = tree.read(name, self._at, len(view)) if tree else b""
        except SourceNotFoundError:
            raise FileNotFoundError(2, os.strerror(2), str(self._path)) from None
        except CkptError as error:
            raise OSError(5, f"{error.what}: {error.why}", str(self._path)) from error
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class RemoteFiles(SourceFiles):
    """The files below one URL; none of them has a descriptor."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        url = masked(os.fspath(root)).rstrip("/")
        tree, below = trees.tree_at(url)
        if tree is None:
            url = trees.look(os.fspath(root))
            tree, below = trees.tree_at(url)
        if tree is None:
            raise SourceNotFoundError("nothing was found at this URL", where=url)
        self.root = RemotePath(url)
        self._tree = tree
        self._below = below

    def close(self) -> None:
        """Let go of what was read."""
        SHARED.trim()

    def forget(self) -> None:
        """Look at the place anew from now on."""
        self._tree.forget()

    def path(self, name: str) -> Path:
        """See :meth:`~ckptctl.storage.files.SourceFiles.path`."""
        self._file(name)
        return self.root / name

    def identity(self, name: str) -> FileIdentity:
        """See :meth:`~ckptctl.storage.files.SourceFiles.identity`."""
        entry = self._file(name)
        return FileIdentity(entry.size, entry.mtime_ns, entry.mtime_ns, entry.number, 0)

    def digest(self, name: str) -> str | None:
        """See :meth:`~ckptctl.storage.files.SourceFiles.digest`."""
        return self._file(name).digest

    def read_some(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`~ckptctl.storage.files.SourceFiles.read_some`."""
        return bytes(self._tree.read(self._inner(name), offset, nbytes))

    def fill(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`~ckptctl.storage.files.SourceFiles.fill`."""
        inner = self._inner(name)
        left, done, wanted = list(views), 0, sum(map(len, views))
        while done < wanted:
            asked = min(MOST, wanted - done)
            data = memoryview(self._tree.read(inner, offset + done, asked))
            at = 0
            for view in left:
                part = data[at : at + len(view)]
                view[: len(part)] = part
                at += len(part)
                if at == len(data):
                    break
            left, done = after(left, at), done + at
            if at < asked:
                break
        return done

    def prefetch(self, name: str, offset: int) -> None:
        """See :meth:`~ckptctl.storage.files.SourceFiles.prefetch`."""
        inner = self._inner(name)
        size = self._tree.file(inner).size
        self._tree.prefetch(inner, offset if offset >= 0 else max(0, size + offset))

    def end(self, name: str, stop: int) -> None:
        """See :meth:`~ckptctl.storage.files.SourceFiles.end`."""
        self._tree.end(self._inner(name), stop)

    def _file(self, name: str) -> RemoteEntry:
        return self._tree.file(self._inner(name))

    def _inner(self, name: str) -> str:
        plain = contained(name, str(self.root))
        return f"{self._below}/{plain}" if self._below else plain
