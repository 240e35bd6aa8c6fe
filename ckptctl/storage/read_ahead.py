"""Read-ahead for remote files, or for items of a file, that are read one after the other.

A request takes 50 to 150 ms regardless of its size, so the next items are requested while the
current item is processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from ckptctl.catalog import Blob, Extent
from ckptctl.errors import CkptError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.threads import create_thread_pool

PREFETCH_COUNT = 16
"""Number of items to prefetch ahead of the current item."""
FileOffset = tuple[str, int]
"""File name and byte offset, which is relative to the end of the file if it is negative."""
T = TypeVar("T")


def prefetch_items(
    files: SourceFiles, items: Iterable[T], list_offsets: Callable[[T], Iterable[FileOffset]]
) -> Iterator[T]:
    """Yield *items* while prefetching the next ones from remote files.

    *list_offsets* returns the file offsets at which an item will be read. If a prefetch fails, the
    error is raised only when the item is read.
    """
    if files.local:
        yield from items
        return
    waiting: deque[T] = deque()
    pool = create_thread_pool(PREFETCH_COUNT)
    try:
        for item in items:
            for name, offset in list_offsets(item):
                pool.submit(_try_prefetch, files, name, offset)
            waiting.append(item)
            if len(waiting) > PREFETCH_COUNT:
                yield waiting.popleft()
        yield from waiting
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def prefetch_heads(files: SourceFiles, names: Iterable[str]) -> Iterator[str]:
    """Yield *names* while prefetching the start of the next files, such as safetensors headers."""
    return prefetch_items(files, names, lambda name: ((name, 0),))


def prefetch_zips(files: SourceFiles, names: Iterable[str]) -> Iterator[str]:
    """Yield *names* of ``torch.save`` files while prefetching start and end of the next files."""
    return prefetch_items(files, names, list_zip_ends)


def list_zip_ends(name: str) -> tuple[FileOffset, ...]:
    """Return offsets of the end and the start of a ``torch.save`` file, which are read first."""
    return (name, -1), (name, 0)


def list_item_ends(item: Extent | Blob) -> Iterator[FileOffset]:
    """Yield the offsets of the first and the last byte of an item, which are read first."""
    if item.file is not None:
        yield item.file, item.offset
        yield item.file, item.offset + item.nbytes - 1


def _try_prefetch(files: SourceFiles, name: str, offset: int) -> None:
    with suppress(CkptError):
        files.prefetch(name, offset)
