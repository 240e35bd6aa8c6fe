"""Files below a URL, through fsspec: read by ranges, written as streams."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from ckptctl.errors import CkptError, DamagedError, SourceNotFoundError, StorageError, UsageError
from ckptctl.storage.files import SourceFiles, contained

BLOCK = 1 << 20
BLOCKS = 32
LOCAL = "file://"


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Return *path* if it is a URL that is no path of this machine."""
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text and not text.startswith(LOCAL) else None


def local_path(path: str | os.PathLike[str]) -> str:
    """Return *path* without the scheme of local files."""
    return os.fspath(path).removeprefix(LOCAL)


def known(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a path, or a URL of a kind that fsspec knows."""
    url = url_of(path)
    if url is None:
        return True
    import fsspec  # type: ignore[import-untyped]

    return url.partition("://")[0] in fsspec.available_protocols()


def exists(url: str, name: str) -> bool:
    """Return whether there is a file *name* below *url*."""
    system, root = _system(url)
    with _told(url, name, "look at"):
        return bool(system.exists(f"{root}/{name}"))


def size(url: str, name: str) -> int:
    """Return the size of *name* below *url*; -1: there is none."""
    system, root = _system(url)
    with _told(url, name, "look at"):
        path = f"{root}/{name}"
        return int(system.size(path)) if system.exists(path) else -1


def write(url: str, name: str, content: bytes) -> None:
    """Write a small file in one step."""
    system, root = _system(url)
    with _told(url, name, "write"):
        system.pipe_file(f"{root}/{name}", content)


@contextmanager
def create(url: str, name: str) -> Iterator[IO[bytes]]:
    """Write a file from front to back; after an error there is none."""
    system, root = _system(url)
    path = f"{root}/{name}"
    with _told(url, name, "write"):
        system.makedirs(root, exist_ok=True)
        target = system.open(path, "wb")
        try:
            yield cast(IO[bytes], target)
        except BaseException:
            _abandon(system, path, target)
            raise
        target.close()


class RemoteFiles(SourceFiles):
    """The files below a URL, read by ranges.

    Args:
        url: The directory.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url
        self._system, self._root = _system(url)
        self._sizes: dict[str, int] = {}

    def size(self, name: str) -> int:
        """Return the size of *name* in bytes.

        Raises:
            SourceNotFoundError: There is no such file.
        """
        if name not in self._sizes:
            with _told(self.url, name, "look at"):
                self._sizes[name] = int(self._system.size(self._path(name)))
        return self._sizes[name]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return exactly *nbytes* bytes from *offset*.

        Raises:
            DamagedError: The file ends before that.
        """
        if not nbytes:
            return b""
        with _told(self.url, name, "read"):
            found = self._system.cat_file(self._path(name), offset, offset + nbytes)
        if len(found) != nbytes:
            raise DamagedError(
                f"`{name}` is truncated",
                where=self.url,
                why=f"{offset + nbytes:,} bytes are needed, it has {offset + len(found):,}",
            )
        return bytes(found)

    def version(self, name: str) -> object:
        """Return what changes when *name* does."""
        with _told(self.url, name, "look at"):
            self._system.invalidate_cache()
            return self._system.ukey(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{contained(name, self.url)}"


class RemoteMemory:
    """A file below a URL as a plan's memory: slices of it are read when they are asked for.

    What is asked for in small parts is read in blocks, a few of which are kept.

    Args:
        files: The files below the URL.
        name: The file.
    """

    def __init__(self, files: RemoteFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def __getitem__(self, part: slice) -> memoryview:
        """Return a range of bytes."""
        start, stop = part.start, part.stop
        if stop - start >= BLOCK:
            return memoryview(bytearray(self._files.read(self._name, start, stop - start)))
        found = bytearray()
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            found += self._block(number)[max(start - first, 0) : stop - first]
        return memoryview(found)

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.pop(number, None)
            if block is None:
                first = number * BLOCK
                length = min(BLOCK, self._files.size(self._name) - first)
                block = self._files.read(self._name, first, length)
            self._blocks[number] = block
            if len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
            return block


def _system(url: str) -> tuple[Any, str]:
    """Return the file system of *url*, and the path of it there."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"there is no file system for `{url.partition('://')[0]}://`",
            where=url,
            why=str(error),
            hint="install the fsspec package for it, such as s3fs or gcsfs",
        ) from error
    return system, str(root).rstrip("/")


def _abandon(system: Any, path: str, target: Any) -> None:
    """Make sure that there is no file where one was begun, whatever else fails."""
    from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

    with suppress(Exception):
        if isinstance(target, AbstractBufferedFile):
            target.discard()
            target.closed = True  # closing it would upload what there is
        else:
            target.close()
    with suppress(Exception):
        system.rm_file(path)


@contextmanager
def _told(url: str, name: str, what: str) -> Iterator[None]:
    """Turn what file systems raise into errors of ours."""
    try:
        yield
    except CkptError:
        raise
    except FileNotFoundError:
        raise SourceNotFoundError(f"`{name}` is missing", where=url) from None
    except OSError as error:
        raise StorageError(
            f"cannot {what} `{name}`", where=url, why=f"{type(error).__name__}: {error}"
        ) from error
