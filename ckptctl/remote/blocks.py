"""Block cache of remote files, with read-ahead for sequential reads.

A read at a new offset fetches one small block, so that reading a header transfers little. A read
that continues where an earlier one ended doubles the number of fetched blocks, like the read-ahead
of kernels, up to the end that the reader declared.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

BLOCK = 256 << 10
MOST = 16
"""Most blocks of one request (4 MiB)."""
ROOM = 32 << 20
KEPT = 8 << 20
"""Bytes that stay cached when no reader is active."""
STREAMS = 256
HEAD = 16
"""Bytes at the beginning of a file that stay cached, for repeated checks of its type."""
HEADS = 4096
"""Most files whose beginning stays cached."""
TAIL = 64 << 10

Fetch = Callable[[int, int], bytes | bytearray]
"""Function that returns the bytes between two offsets."""
Key = tuple[Hashable, int]


class Blocks:
    """A bounded, thread-safe cache of blocks of many files."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._held = 0
        self._blocks: OrderedDict[Key, bytes] = OrderedDict()
        self._coming: dict[Key, Future[bytes]] = {}
        self._next: OrderedDict[Key, int] = OrderedDict()
        self._ends: OrderedDict[Key, None] = OrderedDict()
        self._heads: OrderedDict[Hashable, bytes] = OrderedDict()

    def read(self, file: Hashable, size: int, offset: int, nbytes: int, fetch: Fetch) -> bytearray:
        """Read a byte range of *file*, shorter only if the store returned less than requested."""
        end = offset + nbytes
        head = self._heads.get(file) if end <= HEAD else None
        if head is not None:
            return bytearray(head[offset:end])
        found = bytearray()
        while offset < end:
            number = offset // BLOCK
            wanted = -(-end // BLOCK) - number
            block = self._block(file, size, number, wanted, fetch)
            part = block[offset - number * BLOCK : end - number * BLOCK]
            if not part:
                break
            found += part
            offset += len(part)
        return found

    def end(self, file: Hashable, stop: int) -> None:
        """Mark *stop* as the end of a sequential read, beyond which nothing is read ahead."""
        with self._lock:
            self._ends[file, -(-stop // BLOCK)] = None
            if len(self._ends) > STREAMS:
                self._ends.popitem(last=False)

    def trim(self) -> None:
        """Drop all but `KEPT` bytes of cached blocks."""
        with self._lock:
            self._shrink(min(KEPT, self._room))

    def _block(self, file: Hashable, size: int, number: int, wanted: int, fetch: Fetch) -> bytes:
        with self._lock:
            found = self._blocks.get((file, number))
            if found is not None:
                self._blocks.move_to_end((file, number))
                return found
            coming = self._coming.get((file, number))
            if coming is None:
                claimed = self._claim(file, size, number, wanted)
        if coming is not None:
            return coming.result()
        return self._fetch(file, size, claimed, fetch)[number - claimed.start]

    def _claim(self, file: Hashable, size: int, number: int, wanted: int) -> range:
        """Choose the blocks to fetch together with block *number*, and mark them as pending."""
        ahead = min(MOST, max(self._next.pop((file, number), 1), wanted))
        last = -(-size // BLOCK)
        first = number
        if number == last - 1 and number and size - number * BLOCK < TAIL:
            first -= self._absent(file, number - 1)
        stop = number + 1
        while stop < min(number + ahead, last) and self._absent(file, stop):
            if stop >= number + wanted and (file, stop) in self._ends:
                break
            stop += 1
        for one in range(first, stop):
            self._coming[file, one] = Future()
        self._next[file, stop] = min(MOST, 2 * ahead)
        if len(self._next) > STREAMS:
            self._next.popitem(last=False)
        return range(first, stop)

    def _absent(self, file: Hashable, number: int) -> bool:
        return (file, number) not in self._blocks and (file, number) not in self._coming

    def _fetch(self, file: Hashable, size: int, claimed: range, fetch: Fetch) -> list[bytes]:
        start, stop = claimed.start * BLOCK, min(size, claimed.stop * BLOCK)
        try:
            data = memoryview(fetch(start, stop))
        except BaseException as error:
            with self._lock:
                for number in claimed:
                    self._coming.pop((file, number)).set_exception(error)
            raise
        parts = [bytes(data[at : at + BLOCK]) for at in range(0, stop - start, BLOCK)]
        with self._lock:
            for number, part in zip(claimed, parts, strict=True):
                self._blocks[file, number] = part
                self._held += len(part)
                self._coming.pop((file, number)).set_result(part)
            if not claimed.start and len(parts[0]) >= min(size, HEAD):
                self._heads[file] = parts[0][:HEAD]
                if len(self._heads) > HEADS:
                    self._heads.popitem(last=False)
            self._shrink(self._room)
        return parts

    def _shrink(self, room: int) -> None:
        while self._held > room:
            self._held -= len(self._blocks.popitem(last=False)[1])


SHARED = Blocks()
"""The block cache of all remote files in this process."""
