"""Block cache of remote files, with read-ahead for sequential reads.

A read at a new offset fetches one small block, so that reading a header transfers little. A read
that continues at the end of an earlier read doubles the number of fetched blocks, like the
read-ahead of an operating system. Nothing is read ahead beyond the end that a reader marked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

BLOCK_BYTES = 256 << 10
MAX_REQUEST_BLOCKS = 16
"""Maximum number of blocks fetched with one request, which is 4 MiB."""
CACHE_BYTES = 32 << 20
IDLE_CACHE_BYTES = 8 << 20
"""Number of bytes that stay cached when no reader is active."""
MAX_STREAMS = 256
HEAD_BYTES = 16
"""Number of bytes at the start of each file that stay cached, for file type detection."""
MAX_HEADS = 4096
"""Maximum number of files whose first bytes stay cached."""
TAIL_BYTES = 64 << 10

FetchRange = Callable[[int, int], bytes | bytearray]
"""Function that fetches the byte range [start, stop) of a file."""
BlockKey = tuple[Hashable, int]


class BlockCache:
    """Thread-safe cache of blocks of many files, with a limited size in bytes."""

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._cached_bytes = 0
        self._blocks: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._pending: dict[BlockKey, Future[bytes]] = {}
        self._read_ahead_counts: OrderedDict[BlockKey, int] = OrderedDict()
        self._read_ends: OrderedDict[BlockKey, None] = OrderedDict()
        self._heads: OrderedDict[Hashable, bytes] = OrderedDict()

    def read_range(
        self, file: Hashable, size: int, offset: int, nbytes: int, fetch: FetchRange
    ) -> bytearray:
        """Read *nbytes* of *file* at *offset*, calling *fetch* for blocks that are not cached.

        *size* is the file size in bytes. The result is shorter only if *fetch* returned less than
        requested.
        """
        end = offset + nbytes
        head = self._heads.get(file) if end <= HEAD_BYTES else None
        if head is not None:
            return bytearray(head[offset:end])
        data = bytearray()
        while offset < end:
            number = offset // BLOCK_BYTES
            block_count = -(-end // BLOCK_BYTES) - number
            block = self._get_block(file, size, number, block_count, fetch)
            part = block[offset - number * BLOCK_BYTES : end - number * BLOCK_BYTES]
            if not part:
                break
            data += part
            offset += len(part)
        return data

    def mark_read_end(self, file: Hashable, stop: int) -> None:
        """Mark the offset *stop* as the end of a sequential read, so read-ahead stops there."""
        with self._lock:
            self._read_ends[file, -(-stop // BLOCK_BYTES)] = None
            if len(self._read_ends) > MAX_STREAMS:
                self._read_ends.popitem(last=False)

    def trim_cache(self) -> None:
        """Drop the least recently used blocks until at most `IDLE_CACHE_BYTES` are cached."""
        with self._lock:
            self._shrink_to(min(IDLE_CACHE_BYTES, self._capacity_bytes))

    def _get_block(
        self, file: Hashable, size: int, number: int, block_count: int, fetch: FetchRange
    ) -> bytes:
        with self._lock:
            data = self._blocks.get((file, number))
            if data is not None:
                self._blocks.move_to_end((file, number))
                return data
            pending = self._pending.get((file, number))
            if pending is None:
                claimed = self._claim_blocks(file, size, number, block_count)
        if pending is not None:
            return pending.result()
        return self._fetch_blocks(file, size, claimed, fetch)[number - claimed.start]

    def _claim_blocks(self, file: Hashable, size: int, number: int, block_count: int) -> range:
        """Choose the blocks to fetch in one request with block *number*, and mark them pending."""
        read_ahead = min(
            MAX_REQUEST_BLOCKS, max(self._read_ahead_counts.pop((file, number), 1), block_count)
        )
        last = -(-size // BLOCK_BYTES)
        first = number
        if number == last - 1 and number and size - number * BLOCK_BYTES < TAIL_BYTES:
            first -= self._is_block_absent(file, number - 1)
        stop = number + 1
        while stop < min(number + read_ahead, last) and self._is_block_absent(file, stop):
            if stop >= number + block_count and (file, stop) in self._read_ends:
                break
            stop += 1
        for index in range(first, stop):
            self._pending[file, index] = Future()
        self._read_ahead_counts[file, stop] = min(MAX_REQUEST_BLOCKS, 2 * read_ahead)
        if len(self._read_ahead_counts) > MAX_STREAMS:
            self._read_ahead_counts.popitem(last=False)
        return range(first, stop)

    def _is_block_absent(self, file: Hashable, number: int) -> bool:
        return (file, number) not in self._blocks and (file, number) not in self._pending

    def _fetch_blocks(
        self, file: Hashable, size: int, claimed: range, fetch: FetchRange
    ) -> list[bytes]:
        start, stop = claimed.start * BLOCK_BYTES, min(size, claimed.stop * BLOCK_BYTES)
        try:
            data = memoryview(fetch(start, stop))
        except BaseException as error:
            with self._lock:
                for number in claimed:
                    self._pending.pop((file, number)).set_exception(error)
            raise
        parts = [bytes(data[at : at + BLOCK_BYTES]) for at in range(0, stop - start, BLOCK_BYTES)]
        with self._lock:
            for number, part in zip(claimed, parts, strict=True):
                self._blocks[file, number] = part
                self._cached_bytes += len(part)
                self._pending.pop((file, number)).set_result(part)
            if not claimed.start and len(parts[0]) >= min(size, HEAD_BYTES):
                self._heads[file] = parts[0][:HEAD_BYTES]
                if len(self._heads) > MAX_HEADS:
                    self._heads.popitem(last=False)
            self._shrink_to(self._capacity_bytes)
        return parts

    def _shrink_to(self, capacity_bytes: int) -> None:
        while self._cached_bytes > capacity_bytes:
            self._cached_bytes -= len(self._blocks.popitem(last=False)[1])


SHARED_BLOCKS = BlockCache()
"""The block cache of all remote files in this process."""
