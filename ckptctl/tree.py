"""Files and folders wherever they lie: paths of this machine, and those of a tree behind a URL.

A path or URL becomes a :class:`TreePath` once, where a command begins
(:func:`~ckptctl.storage.paths.named`), and is passed on as that. On this machine that is a
:class:`pathlib.Path`. A :class:`UrlPath` asks its :class:`FileTree`, which holds what is secret in
the URL; no text does.
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

READ_ONLY = 0o444
INDEXES = (".index.json", ".metadata")
"""What the files end with that make others a checkpoint; behind a URL they are written last."""


class TreePath(Protocol):
    """A file or folder, on this machine or behind a URL: what reading takes of ``pathlib.Path``."""

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
    """A file or folder behind a URL.

    Attributes:
        name: Its name in its folder; empty where what was to be listed is a file.
        folder: Whether it is a folder.
        size: Bytes; -1: only the file itself tells.
        version: What changes when its content does, as far as the place tells.
        mtime_ns: When it was written, in nanoseconds since the epoch; 0: unknown.
        digest: SHA-256 of its content, or git's SHA-1 of a blob, where the place tells.
    """

    name: str
    folder: bool
    size: int = 0
    version: str = ""
    mtime_ns: int = 0
    digest: str | None = None

    @property
    def number(self) -> int:
        """Return the version as a number, to stand where a local file has its inode."""
        return number_of(self.version)


def number_of(version: str) -> int:
    """Return a version as a number, to stand where a local file has its inode."""
    import hashlib  # which a start without URLs need not

    digest = hashlib.sha256(version.encode()).digest()
    return int.from_bytes(digest[:7], "big") if version else 0


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """What is asked of a place.

    Attributes:
        names: The files of the output, that which makes them one the last.
        single: The name of the only file; None: the output is a folder.
        overwrite: Whether a checkpoint there may be replaced.
        resume: Whether to go on with what an interrupted run uploaded, and to leave it after an
            error.
        is_checkpoint: Whether what is there may be overwritten.
        read: The files that the output is made of, by folder.
    """

    names: Sequence[str]
    single: str | None = None
    overwrite: bool = False
    resume: bool = False
    is_checkpoint: Callable[[], bool] = lambda: False
    read: Mapping[TreePath, Iterable[str]] = field(default_factory=dict)


class Upload(Protocol):
    """One output on its way to a folder behind a URL."""

    resumed: int
    """Bytes that were there already."""

    def put(self, name: str, path: Path) -> None:
        """Upload a complete file."""

    def require_whole(self) -> None:
        """Prove that all there is of this output is as it was uploaded."""

    def commit(self) -> None:
        """Make the files seen, all of which are uploaded."""

    def abandon(self) -> str:
        """Take back what can be, and say what is left."""

    def close(self) -> None:
        """Let go of the place: all is done."""


class FileTree(Protocol):
    """What lies behind a URL, for many threads; two are equal that have the same secrets.

    URLs are written as they may be shown.

    Attributes:
        atomic: Whether all files of an upload appear in one step.
    """

    atomic: bool

    def look(self, url: str) -> str:
        """Look behind *url* if that was not done, and return how the place spells it."""

    def find(self, url: str) -> TreeEntry | None:
        """Return the entry of a file or folder; None: there is nothing."""

    def file(self, url: str) -> TreeEntry:
        """Return the entry of a file.

        Raises:
            SourceNotFoundError: There is nothing.
            UnsupportedError: There is a folder.
        """

    def members(self, url: str) -> Iterable[str]:
        """Return the names in a folder; none where there is no such folder."""

    def read(self, url: str, offset: int, nbytes: int) -> bytearray:
        """Return a range of bytes of a file; fewer where it has no more."""

    def prefetch(self, url: str, offset: int) -> None:
        """Get the bytes around *offset* of a file into memory; from its end, where negative."""

    def end(self, url: str, stop: int) -> None:
        """Note that a range of a file that is read ends at byte *stop*."""

    def trim(self) -> None:
        """Let go of most of what was read."""

    def forget(self, url: str) -> None:
        """Ask again for what is listed, from now on, but of the same commit."""

    def drop(self, url: str) -> None:
        """Forget that *url*, all below and all above it was looked at: it has changed."""

    def failure(self, url: str) -> CkptError | None:
        """Return the last failure of the place to answer; None: there was none."""

    def begin_upload(self, url: str, request: UploadRequest) -> Upload:
        """Begin an upload to *url*, where nobody else writes until it ends."""

    def secret_of(self, url: str) -> str:
        """Return *url* with what is secret in it."""


@total_ordering
class UrlPath(os.PathLike[str]):
    """A file or folder behind a URL.

    Its text is the URL, which no system call understands: code that opens one by itself, past
    :class:`~ckptctl.storage.files.SourceFiles`, fails with "no such file". There is nothing on the
    disk that it could take for data.

    Attributes:
        tree: What it asks.
        url: Its URL, as it may be shown.
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
        return open_url, (self.tree.secret_of(self.url),)

    @property
    def parts(self) -> tuple[str, ...]:
        """The scheme with its colon, the host, and the names that follow."""
        scheme, _, rest = self.url.partition("//")
        return (scheme, *rest.split("/"))

    @property
    def name(self) -> str:
        """The last name."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """What the name ends with from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> UrlPath:
        """The folder that it lies in; a host is its own."""
        above = self.url.rpartition("/")[0]
        return self if above.endswith("/") else UrlPath(self.tree, above)

    @property
    def parents(self) -> Sequence[UrlPath]:
        """The folders that it lies in, the nearest first."""
        above = self.parent
        return () if above is self else (above, *above.parents)

    def __truediv__(self, name: str | PurePath) -> UrlPath:
        inner = PurePosixPath(name)
        return UrlPath(self.tree, f"{self.url}/{inner}") if inner.parts else self

    def with_name(self, name: str) -> UrlPath:
        """Return the path of a neighbor."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> UrlPath:
        """Return the path of a neighbor with another suffix."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def is_relative_to(self, other: str | os.PathLike[str]) -> bool:
        """Return whether it is *other*, or lies in it."""
        return f"{self.url}/".startswith(f"{os.fspath(other)}/")

    def relative_to(self, other: str | os.PathLike[str]) -> PurePosixPath:
        """Return the path below *other*."""
        if not self.is_relative_to(other):
            raise ValueError(f"{self} is not in {other}")
        return PurePosixPath(self.url[len(os.fspath(other)) + 1 :])

    def exists(self) -> bool:
        """Return whether there is anything."""
        return self.tree.find(self.url) is not None

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        entry = self.tree.find(self.url)
        return entry is not None and entry.folder

    def is_file(self) -> bool:
        """Return whether it is a file."""
        entry = self.tree.find(self.url)
        return entry is not None and not entry.folder

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def readlink(self) -> UrlPath:
        """Fail as what is no link does."""
        raise OSError(22, os.strerror(22), self.url)

    def stat(self) -> os.stat_result:
        """Return size, time and version (as the inode) of what is there."""
        entry = self.tree.find(self.url)
        if entry is None:
            raise FileNotFoundError(2, os.strerror(2), self.url)
        kind = stat.S_IFDIR if entry.folder else stat.S_IFREG
        seconds = entry.mtime_ns // 10**9
        times = {"st_atime_ns": 0, "st_mtime_ns": entry.mtime_ns, "st_ctime_ns": entry.mtime_ns}
        numbers = (kind | READ_ONLY, entry.number, 0, 1, 0, 0, entry.size, 0, seconds, seconds)
        return os.stat_result(numbers, times)

    lstat = stat

    def iterdir(self) -> Iterator[UrlPath]:
        """Yield the members of the folder."""
        if self.is_dir():
            for member in self.tree.members(self.url):
                yield self / member

    def glob(self, pattern: str) -> Iterator[UrlPath]:
        """Yield the members of the folder that match; *pattern* has no slash."""
        assert "/" not in pattern and "**" not in pattern
        return (item for item in self.iterdir() if fnmatchcase(item.name, pattern))

    def rglob(self, pattern: str) -> Iterator[UrlPath]:
        """Yield all that match in the folder and below it."""
        for item in self.iterdir():
            if fnmatchcase(item.name, pattern):
                yield item
            if item.is_dir():
                yield from item.rglob(pattern)

    def resolve(self) -> Self:
        """Return itself."""
        return self

    absolute = expanduser = resolve

    def open(self, mode: str = "r", **options: Any) -> IO[Any]:
        """Open it for reading; what is not read is not fetched."""
        if set(mode) - set("rbt"):
            raise OSError(30, os.strerror(30), self.url)
        file = io.BufferedReader(_Ranges(self))
        return file if "b" in mode else io.TextIOWrapper(file, **options)

    def read_bytes(self) -> bytes:
        """Return its content."""
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return its content as text."""
        with self.open(encoding=encoding, errors=errors) as file:
            return str(file.read())


class _Ranges(io.RawIOBase):
    """A remote file as Python's own files are."""

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
            data = self._path.tree.read(url, self._at, len(view))
        except SourceNotFoundError:
            raise FileNotFoundError(2, os.strerror(2), url) from None
        except CkptError as error:
            raise OSError(5, f"{error.what}: {error.why}", url) from error
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_url(url: str) -> UrlPath:
    """Return the path of a URL, behind which nothing is looked at yet.

    What opens URLs is imported with the first one: a start without them need not.
    """
    from importlib import import_module

    path: UrlPath = import_module(TREES).open_url(url)
    return path


TREES = "ckptctl.remote.trees"
"""The module that opens the trees behind URLs, all schemes of which fsspec or the Hub know."""
