"""Files and folders on this machine or behind a URL.

A path or URL is converted to a :class:`TreePath` once, where a command begins
(:func:`~ckptctl.storage.paths.parse_path`). On this machine it is a :class:`pathlib.Path`. A
:class:`UrlPath` reads through its :class:`FileTree`, which also has the credentials of the URL. Its
text does not contain them.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import total_ordering
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, Protocol, Self

from ckptctl.errors import CkptError, SourceNotFoundError

READ_ONLY_MODE = 0o444
INDEX_SUFFIXES = (".index.json", ".metadata")
"""Suffixes of index files, which are uploaded last."""


class TreePath(Protocol):
    """File or folder on this machine or behind a URL, with the methods for reading."""

    # fmt: off
    # ruff: noqa: D102
    def __fspath__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def stem(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def parent(self) -> Self: ...
    @property
    def parents(self) -> Sequence[Self]: ...
    def __truediv__(self, name: str | PurePath, /) -> Self: ...
    def __lt__(self, other: Any, /) -> bool: ...
    def __hash__(self) -> int: ...
    def with_name(self, name: str) -> Self: ...
    def with_suffix(self, suffix: str) -> Self: ...
    def is_relative_to(self, other: str | os.PathLike[str], /) -> bool: ...
    def relative_to(self, other: str | os.PathLike[str], /) -> PurePath: ...
    def exists(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_file(self) -> bool: ...
    def is_symlink(self) -> bool: ...
    def readlink(self) -> Self: ...
    def stat(self) -> os.stat_result: ...
    def lstat(self) -> os.stat_result: ...
    def iterdir(self) -> Iterator[Self]: ...
    def glob(self, pattern: str, /) -> Iterator[Self]: ...
    def rglob(self, pattern: str, /) -> Iterator[Self]: ...
    def resolve(self) -> Self: ...
    def absolute(self) -> Self: ...
    def expanduser(self) -> Self: ...
    def open(self, mode: str, *, encoding: str | None = None) -> IO[Any]: ...
    def read_bytes(self) -> bytes: ...
    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str: ...
    # fmt: on


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """File or folder behind a URL.

    Attributes:
        name: Name in its folder; empty if the listed path itself is a file.
        folder: Whether the entry is a folder.
        size: Size in bytes, or -1 if it is only known after opening the file.
        version: Version or ETag that changes with the content; empty if the server has none.
        mtime_ns: Modification time in nanoseconds since the epoch, or 0 if unknown.
        digest: SHA-256 of the content, or git's SHA-1 of a blob, or None if the server has none.
    """

    name: str
    folder: bool
    size: int = 0
    version: str = ""
    mtime_ns: int = 0
    digest: str | None = None

    @property
    def version_number(self) -> int:
        """Number derived from the version, used as inode."""
        return derive_version_number(self.version)


def derive_version_number(version: str) -> int:
    """Return a number derived from a version, used as inode."""
    import hashlib  # only for URLs

    digest = hashlib.sha256(version.encode()).digest()
    return int.from_bytes(digest[:7], "big") if version else 0


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """Request for an upload.

    Attributes:
        names: Files of the output, the index last.
        single: Name of the only file, or None if the output is a folder.
        overwrite: Whether an existing checkpoint may be replaced.
        resume: Whether to keep the files that an interrupted run uploaded, and to leave uploaded
            files after an error.
        is_checkpoint: Function that checks if the existing files may be overwritten.
        read: Source files that the output is computed from, by folder.
    """

    names: Sequence[str]
    single: str | None = None
    overwrite: bool = False
    resume: bool = False
    is_checkpoint: Callable[[], bool] = lambda: False
    read: Mapping[TreePath, Iterable[str]] = field(default_factory=dict)


class Upload(Protocol):
    """Upload of one output to a folder behind a URL."""

    resumed: int
    """Bytes that an interrupted run had uploaded."""

    def upload_file(self, name: str, path: Path) -> None:
        """Upload a complete local file as *name*."""

    def require_complete(self) -> None:
        """Verify that all uploaded files of this output are unchanged."""

    def publish_files(self) -> None:
        """Make the uploaded files visible."""

    def abandon_upload(self) -> str:
        """Remove uploaded files if possible, and describe the remaining ones."""

    def close(self) -> None:
        """Release the destination after a successful upload."""


class FileTree(Protocol):
    """Tree of files behind URLs, shared by threads. Trees with equal credentials are equal.

    URLs in arguments contain no credentials.

    Attributes:
        atomic: Whether all files of an upload appear in one step.
    """

    atomic: bool

    def resolve_url(self, url: str) -> str:
        """List the tree at *url* unless that was done before, and return its canonical URL."""

    def find_entry(self, url: str) -> TreeEntry | None:
        """Return the entry of a file or folder, or None if there is none."""

    def get_file_entry(self, url: str) -> TreeEntry:
        """Return the entry of a file.

        Raises:
            SourceNotFoundError: There is no file at the URL.
            UnsupportedError: The URL is a folder.
        """

    def list_members(self, url: str) -> Iterable[str]:
        """Return the names in a folder. There are none if the folder does not exist."""

    def read_range(self, url: str, offset: int, nbytes: int) -> bytearray:
        """Return a byte range of a file. At the end of the file, fewer bytes are returned."""

    def prefetch_range(self, url: str, offset: int) -> None:
        """Fetch the bytes around *offset* into the cache. Negative offsets count from the end."""

    def mark_range_end(self, url: str, stop: int) -> None:
        """Tell the tree that a sequential read of a file ends before byte *stop*."""

    def trim_cache(self) -> None:
        """Release most of the cached data."""

    def refresh_entries(self, url: str) -> None:
        """Discard cached listings. The next use lists the tree again, at the same commit."""

    def forget_url(self, url: str) -> None:
        """Forget cached listings of *url*, which has changed, and of its parents and members."""

    def get_last_error(self, url: str) -> CkptError | None:
        """Return the last error of the server, or None if there was none."""

    def begin_upload(self, url: str, request: UploadRequest) -> Upload:
        """Begin an upload to *url*, and lock *url* until the upload ends."""

    def add_credentials(self, url: str) -> str:
        """Return *url* with its credentials."""


@total_ordering
class UrlPath(os.PathLike[str]):
    """File or folder behind a URL.

    Its text is the URL, which is not a valid local path. Code that opens it directly instead of
    with :class:`~ckptctl.storage.files.SourceFiles` fails with "no such file".

    Attributes:
        tree: Tree that reads the URL.
        url: URL without credentials.
    """

    __slots__ = ("tree", "url")

    def __init__(self, tree: FileTree, url: str) -> None:
        self.tree, self.url = tree, url

    def __str__(self) -> str:
        return self.url

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UrlPath):
            return NotImplemented
        return self.url == other.url and self.tree == other.tree

    def __lt__(self, other: UrlPath) -> bool:
        return self.parts < other.parts

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_url, (self.tree.add_credentials(self.url),)

    @property
    def parts(self) -> tuple[str, ...]:
        """Scheme with its colon, host, and the names that follow."""
        scheme, _, rest = self.url.partition("//")
        return (scheme, *rest.split("/"))

    @property
    def name(self) -> str:
        """Last name."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """Name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """Last suffix of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> UrlPath:
        """Parent folder. A host is its own parent."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else UrlPath(self.tree, above)

    @property
    def parents(self) -> Sequence[UrlPath]:
        """All parent folders, the nearest first."""
        above = self.parent
        return () if above is self else (above, *above.parents)

    def __truediv__(self, name: str | PurePath) -> UrlPath:
        inner = PurePosixPath(name)
        return UrlPath(self.tree, f"{self.url}/{inner}") if inner.parts else self

    def with_name(self, name: str) -> UrlPath:
        """Return a sibling called *name*."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> UrlPath:
        """Return a sibling with another suffix."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def is_relative_to(self, other: str | os.PathLike[str]) -> bool:
        """Check if the path is *other* or inside it."""
        return f"{self.url}/".startswith(f"{os.fspath(other)}/")

    def relative_to(self, other: str | os.PathLike[str]) -> PurePosixPath:
        """Return the path relative to *other*."""
        if not self.is_relative_to(other):
            raise ValueError(f"{self} is not in {other}")
        return PurePosixPath(self.url[len(os.fspath(other)) + 1 :])

    def exists(self) -> bool:
        """Check if the file or folder exists."""
        return self.tree.find_entry(self.url) is not None

    def is_dir(self) -> bool:
        """Check if the path is a folder."""
        entry = self.tree.find_entry(self.url)
        return entry is not None and entry.folder

    def is_file(self) -> bool:
        """Check if the path is a file."""
        entry = self.tree.find_entry(self.url)
        return entry is not None and not entry.folder

    def is_symlink(self) -> bool:
        """Return False, because there are no links behind URLs."""
        return False

    def readlink(self) -> UrlPath:
        """Raise OSError, because there are no links behind URLs."""
        raise OSError(22, os.strerror(22), self.url)

    def stat(self) -> os.stat_result:
        """Return size, time and version (as the inode)."""
        entry = self.tree.find_entry(self.url)
        if entry is None:
            raise FileNotFoundError(2, os.strerror(2), self.url)
        kind = stat.S_IFDIR if entry.folder else stat.S_IFREG
        seconds = entry.mtime_ns // 10**9
        times = {"st_atime_ns": 0, "st_mtime_ns": entry.mtime_ns, "st_ctime_ns": entry.mtime_ns}
        numbers = (
            kind | READ_ONLY_MODE,
            entry.version_number,
            0,
            1,
            0,
            0,
            entry.size,
            0,
            seconds,
            seconds,
        )
        return os.stat_result(numbers, times)

    lstat = stat

    def iterdir(self) -> Iterator[UrlPath]:
        """Yield the members of the folder."""
        if self.is_dir():
            for member in self.tree.list_members(self.url):
                yield self / member

    def glob(self, pattern: str) -> Iterator[UrlPath]:
        """Yield the members of the folder that match *pattern*, which has no slash."""
        assert "/" not in pattern and "**" not in pattern
        return (item for item in self.iterdir() if fnmatchcase(item.name, pattern))

    def rglob(self, pattern: str) -> Iterator[UrlPath]:
        """Yield all matching members of the folder and of folders below it."""
        for item in self.iterdir():
            if fnmatchcase(item.name, pattern):
                yield item
            if item.is_dir():
                yield from item.rglob(pattern)

    def resolve(self) -> Self:
        """Return the path unchanged."""
        return self

    absolute = expanduser = resolve

    def open(self, mode: str = "r", **options: Any) -> IO[Any]:
        """Open the file for reading. Only the bytes that are read are fetched."""
        if set(mode) - set("rbt"):
            raise OSError(30, os.strerror(30), self.url)
        file = io.BufferedReader(_RemoteFile(self))
        return file if "b" in mode else io.TextIOWrapper(file, **options)

    def read_bytes(self) -> bytes:
        """Return the content."""
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return the content as text."""
        with self.open(encoding=encoding, errors=errors) as file:
            return str(file.read())


class _RemoteFile(io.RawIOBase):
    """Raw file object that reads byte ranges from a URL."""

    def __init__(self, path: UrlPath) -> None:
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
        url = self._path.url
        try:
            data = self._path.tree.read_range(url, self._at, len(view))
        except SourceNotFoundError:
            raise FileNotFoundError(2, os.strerror(2), url) from None
        except CkptError as error:
            raise OSError(5, f"{error.what}: {error.why}", url) from error
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_url(url: str) -> UrlPath:
    """Return the path of a URL, without accessing it.

    The module for URLs is only imported for the first URL, to keep start-up fast.
    """
    from importlib import import_module

    path: UrlPath = import_module(TREES_MODULE).open_url(url)
    return path


TREES_MODULE = "ckptctl.remote.trees"
"""Module that opens URLs, with fsspec or the client of the Hub."""
