"""Files behind a URL written by many processes: each its own, from front to back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from ckptctl.errors import SourceNotFoundError
from ckptctl.storage.remote.store import make_folder, store_errors, system_of
from ckptctl.storage.remote.urls import is_url, scheme_of


def known(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a path, or a URL of a kind that fsspec knows."""
    if not is_url(path):
        return True
    import fsspec

    return scheme_of(os.fspath(path)) in fsspec.available_protocols()


def exists(url: str, name: str) -> bool:
    """Return whether there is a file *name* below *url*."""
    return size(url, name) >= 0


def size(url: str, name: str) -> int:
    """Return the size of the file *name* below *url*; -1: there is none.

    Raises:
        StorageError: The place cannot be reached, or does not let us look.
    """
    system, root = system_of(url)
    with suppress(SourceNotFoundError), store_errors(url, name, "look at"):
        system.invalidate_cache()
        return int(system.size(f"{root}/{name}"))
    return -1


def write(url: str, name: str, content: bytes) -> None:
    """Write a small file in one step.

    Args:
        url: A folder.
        name: The file, relative to it.
        content: All of its bytes.

    Raises:
        StorageError: It cannot be written.
    """
    system, root = system_of(url)
    with store_errors(url, name, "write"):
        make_folder(system, root)
        system.pipe_file(f"{root}/{name}", content)


@contextmanager
def create(url: str, name: str) -> Iterator[IO[bytes]]:
    """Write a file from front to back; after an error there is none.

    Args:
        url: A folder.
        name: The file, relative to it.

    Raises:
        StorageError: It cannot be written.
    """
    system, root = system_of(url)
    path = f"{root}/{name}"
    with store_errors(url, name, "write"):
        make_folder(system, root)
        target = system.open(path, "wb")
        try:
            yield cast(IO[bytes], target)
        except BaseException:
            _abandon(system, path, target)
            raise
        target.close()


def _abandon(system: Any, path: str, target: Any) -> None:
    """Make sure that there is no file where one was begun, whatever else fails."""
    from fsspec.spec import AbstractBufferedFile

    with suppress(Exception):
        if isinstance(target, AbstractBufferedFile):
            target.discard()
            target.closed = True  # closing it would upload what there is
        else:
            target.close()
    with suppress(Exception):
        system.rm_file(path)
