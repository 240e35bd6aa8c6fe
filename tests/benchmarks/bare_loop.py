"""Copy a checkpoint with ``preadv``, ``zlib.crc32`` and ``pwrite`` and nothing else.

The limit for a program that copies and checksums on the way: no formats, no plan, no publish.
Run as ``python -m tests.benchmarks.bare_loop SRC DST``.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
import zlib
from pathlib import Path

Block = tuple[int, int, int, int]
"""Source descriptor, target descriptor, offset, bytes."""


def copy(source: Path, target: Path, threads: int, block: int, crc: bool, fsync: bool) -> None:
    """Copy every file below *source* to *target*, a new directory.

    Args:
        source: A directory or one file.
        target: Where to; must not exist.
        threads: How many.
        block: Bytes that a thread moves at a time, with one buffer each.
        crc: Whether to compute the CRC-32 of every block.
        fsync: Whether to sync every file.
    """
    target.mkdir(parents=True)
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    blocks: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
    descriptors = []
    for number, file in enumerate(files):
        size = file.stat().st_size
        read = os.open(file, os.O_RDONLY)
        write = os.open(target / f"{number:06d}-{file.name}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(write, size)
        descriptors += [read, write]
        for offset in range(0, size, block):
            blocks.put((read, write, offset, min(block, size - offset)))
    workers = [threading.Thread(target=_work, args=(blocks, block, crc)) for _ in range(threads)]
    for worker in workers:
        blocks.put(None)
        worker.start()
    for worker in workers:
        worker.join()
    for descriptor in descriptors:
        if fsync:
            os.fsync(descriptor)
        os.close(descriptor)


def _work(blocks: queue.SimpleQueue[Block | None], size: int, crc: bool) -> None:
    buffer = memoryview(bytearray(size))
    while (block := blocks.get()) is not None:
        read, write, offset, nbytes = block
        view = buffer[:nbytes]
        if os.preadv(read, [view], offset) != nbytes:
            os._exit(5)
        if crc:
            zlib.crc32(view)
        if os.pwrite(write, view, offset) != nbytes:
            os._exit(5)


def main() -> None:
    """Parse the arguments and copy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--no-crc", action="store_true")
    parser.add_argument("--fsync", action="store_true")
    given = parser.parse_args()
    copy(given.source, given.target, given.threads, given.block, not given.no_crc, given.fsync)


if __name__ == "__main__":
    main()
