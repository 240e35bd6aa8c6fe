"""Files and folders, either local or remote.

Each command first converts its paths and URLs to :class:`TreePath` objects with
:func:`~ckptctl.storage.paths.parse_path`. A local path becomes a :class:`pathlib.Path`, and a URL
becomes a :class:`UrlPath`, which reads through a :class:`FileTree`. The tree also stores the
credentials of the URL, which the text of the path does not contain.
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
"""Suffixes of index files, which are uploaded after all other files."""


class TreePath(Protocol):
    """Protocol of a local or remote file or folder, with the methods for reading it."""

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
    """Directory entry of a remote file or folder.

    Attributes:
        name: Name in the listed folder, or an empty string if the listed path is a file.
        folder: Whether the entry is a folder.
        size: Size in bytes, or -1 if it is only known after opening the file.
        version: Version or ETag that changes with the content, or an empty string if unknown.
        mtime_ns: Modification time in nanoseconds since the epoch, or 0 if unknown.
        digest: SHA-256 of the content or SHA-1 of the git blob, or None if unknown.
    """

    name: str
    folder: bool
    size: int = 0
    version: str = ""
    mtime_ns: int = 0
    digest: str | None = None

    @property
    def version_number(self) -> int:
        """Integer derived from *version*, used as the inode number."""
        return derive_version_number(self.version)


def derive_version_number(version: str) -> int:
    """Derive an integer from *version*, for use as an inode number."""
    import hashlib  # only for URLs

    digest = hashlib.sha256(version.encode()).digest()
    return int.from_bytes(digest[:7], "big") if version else 0


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """Request to upload the files of one output.

    Attributes:
        names: Names of the output files, with the index file last.
        single: Name of the file if the output is a single file, or None if it is a folder.
        overwrite: Whether an existing checkpoint may be replaced.
        resume: Whether to keep files that an interrupted run uploaded, and to keep uploaded files
            if this upload fails.
        is_checkpoint: Function that checks if the existing files may be overwritten.
        noun: Name of this kind of output in messages, with an article.
        read: Names of the source files that the output is computed from, by folder.
    """

    names: Sequence[str]
    single: str | None = None
    overwrite: bool = False
    resume: bool = False
    is_checkpoint: Callable[[], bool] = lambda: False
    noun: str = "a checkpoint"
    read: Mapping[TreePath, Iterable[str]] = field(default_factory=dict)


class Upload(Protocol):
    """Upload of one output to a remote folder."""

    resumed: int
    """Number of bytes that an interrupted run had already uploaded."""

    def upload_file(self, name: str, path: Path) -> None:
        """Upload the complete local file *path* under the name *name*."""

    def require_complete(self) -> None:
        """Raise if an uploaded file of this output is missing or has changed."""

    def publish_files(self) -> None:
        """Publish the uploaded files, so that readers can see them."""

    def abandon_upload(self) -> str:
        """Remove the uploaded files if possible, and describe the files that remain."""

    def close(self) -> None:
        """Unlock the destination after a successful upload."""


class FileTree(Protocol):
    """Remote file system that threads can share. Trees with equal credentials are equal.

    URLs that are passed to its methods contain no credentials.

    Attributes:
        atomic: Whether all files of an upload become visible in one atomic step.
    """

    atomic: bool

    def resolve_url(self, url: str) -> str:
        """Return the canonical form of *url*, after listing the tree if it is not listed yet."""

    def find_entry(self, url: str) -> TreeEntry | None:
        """Return the entry of the file or folder at *url*, or None if it does not exist."""

    def get_file_entry(self, url: str) -> TreeEntry:
        """Return the entry of the file at *url*.

        Raises:
            SourceNotFoundError: No file exists at the URL.
            UnsupportedError: The URL is a folder.
        """

    def list_members(self, url: str) -> Iterable[str]:
        """Return the names of the members of a folder, or no names if it does not exist."""

    def read_range(self, url: str, offset: int, nbytes: int) -> bytearray:
        """Read *nbytes* bytes of a file from *offset*, or fewer bytes at the end of the file."""

    def prefetch_range(self, url: str, offset: int) -> None:
        """Fetch bytes around *offset* into the cache.

        A negative *offset* counts from the end of the file.
        """

    def mark_range_end(self, url: str, stop: int) -> None:
        """Announce that a sequential read of the file ends before byte offset *stop*."""

    def trim_cache(self) -> None:
        """Free most of the memory that cached data occupies."""

    def refresh_entries(self, url: str) -> None:
        """Discard cached listings, so that the next use lists the same commit again."""

    def forget_url(self, url: str) -> None:
        """Discard the cached listings of *url*, which was changed, its parents and its members."""

    def get_last_error(self, url: str) -> CkptError | None:
        """Return the last error of the server that hosts *url*, or None if no request failed."""

    def begin_upload(self, url: str, request: UploadRequest) -> Upload:
        """Start an upload to *url*, which is locked until the upload ends."""

    def add_credentials(self, url: str) -> str:
        """Return a copy of *url* that contains its credentials."""


@total_ordering
class UrlPath(os.PathLike[str]):
    """Path of a remote file or folder, with the interface of :class:`pathlib.Path`.

    Its text is the URL, which is not a valid local path. Code that passes it to Python's ``open``
    instead of :class:`~ckptctl.storage.files.SourceFiles` fails with "no such file".

    Attributes:
        tree: Remote file system that reads the URL.
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
        """Components of the URL, which are the scheme with its colon, the host, and all names."""
        scheme, _, rest = self.url.partition("//")
        return (scheme, *rest.split("/"))

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """Last component of the URL without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """Last suffix of the name, including the dot, or an empty string."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> UrlPath:
        """Parent folder, which for a URL that is only a host is the URL itself."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else UrlPath(self.tree, above)

    @property
    def parents(self) -> Sequence[UrlPath]:
        """All parent folders, starting with the immediate parent."""
        above = self.parent
        return () if above is self else (above, *above.parents)

    def __truediv__(self, name: str | PurePath) -> UrlPath:
        inner = PurePosixPath(name)
        return UrlPath(self.tree, f"{self.url}/{inner}") if inner.parts else self

    def with_name(self, name: str) -> UrlPath:
        """Return the path with its last component replaced by *name*."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> UrlPath:
        """Return the path with the suffix of its last component replaced by *suffix*."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def is_relative_to(self, other: str | os.PathLike[str]) -> bool:
        """Check if the path is equal to *other* or is inside the folder *other*."""
        return f"{self.url}/".startswith(f"{os.fspath(other)}/")

    def relative_to(self, other: str | os.PathLike[str]) -> PurePosixPath:
        """Return the part of the path that follows the folder *other*."""
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
        """Return False, because remote file systems have no symbolic links."""
        return False

    def readlink(self) -> UrlPath:
        """Raise OSError, because remote file systems have no symbolic links."""
        raise OSError(22, os.strerror(22), self.url)

    def stat(self) -> os.stat_result:
        """Return the size, the modification time, and a number for the version as the inode."""
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
        """Yield the members of the folder and of all nested folders that match *pattern*."""
        for item in self.iterdir():
            if fnmatchcase(item.name, pattern):
                yield item
            if item.is_dir():
                yield from item.rglob(pattern)

    def resolve(self) -> Self:
        """Return the path unchanged, because URL paths are always absolute."""
        return self

    absolute = expanduser = resolve

    def open(self, mode: str = "r", **options: Any) -> IO[Any]:
        """Open the file for reading. Only the bytes that are read are fetched."""
        if set(mode) - set("rbt"):
            raise OSError(30, os.strerror(30), self.url)
        file = io.BufferedReader(_RemoteFile(self))
        return file if "b" in mode else io.TextIOWrapper(file, **options)

    def read_bytes(self) -> bytes:
        """Read the complete file and return its bytes."""
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Read the complete file and return it as decoded text."""
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
    """Convert a URL to a path, without accessing the server.

    The module for URLs is only imported for the first URL, to keep start-up fast.
    """
    from importlib import import_module

    path: UrlPath = import_module(TREES_MODULE).open_url(url)
    return path


TREES_MODULE = "ckptctl.remote.trees"
"""Name of the module that opens URLs with fsspec or with the client of the Hugging Face Hub."""
