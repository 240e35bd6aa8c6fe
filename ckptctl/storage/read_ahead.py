"""Several files, or several places of one, that are read in turn behind a URL.

A request takes 50 to 150 ms however little it asks for: what is known to be read next is asked for
while the one before is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from ckptctl.catalog import Blob, Extent
from ckptctl.errors import CkptError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.threads import thread_pool

AHEAD = 16
"""How many are asked for at a time."""
FileOffset = tuple[str, int]
"""A file, and a byte in it; from its end, where negative."""
T = TypeVar("T")


def ahead(
    files: SourceFiles, items: Iterable[T], places: Callable[[T], Iterable[FileOffset]]
) -> Iterator[T]:
    """Yield *items* while the next ones are being fetched; of local files nothing is.

    What cannot be fetched is an error where it is read.
    """
    if files.local:
        yield from items
        return
    waiting: deque[T] = deque()
    pool = thread_pool(AHEAD)
    try:
        for item in items:
            for name, offset in places(item):
                pool.submit(_fetch, files, name, offset)
            waiting.append(item)
            if len(waiting) > AHEAD:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def heads_ahead(files: SourceFiles, names: Iterable[str]) -> Iterator[str]:
    """Yield *names* of files that are read from the front, as safetensors are."""
    return ahead(files, names, lambda name: ((name, 0),))


def zips_ahead(files: SourceFiles, names: Iterable[str]) -> Iterator[str]:
    """Yield *names* of files of ``torch.save``: a directory ends them, the pickle begins them."""
    return ahead(files, names, zip_ends)


def zip_ends(name: str) -> tuple[FileOffset, ...]:
    """Return the places at which a file of ``torch.save`` is read."""
    return (name, -1), (name, 0)


def ends(part: Extent | Blob) -> Iterator[FileOffset]:
    """Yield the places at which an item that is a zip of its own is read."""
    if part.file is not None:
        yield part.file, part.offset
        yield part.file, part.offset + part.nbytes - 1


def _fetch(files: SourceFiles, name: str, offset: int) -> None:
    with suppress(CkptError):
        files.prefetch(name, offset)
