"""What a machine can do: loops of ``preadv``, CRC-32 and ``pwrite`` and nothing else.

The limit for a program that copies and checksums on the way: no formats, no plan, no publish, and
nothing that threads share. Each has one contiguous part of the work and a file of its own.
"""

from __future__ import annotations

import argparse
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from isal import isal_zlib

BLOCK = 1 << 20
T = TypeVar("T")
Crc = Callable[[memoryview], int]
CRCS: Mapping[str, Crc | None] = {"isal": isal_zlib.crc32, "zlib": zlib.crc32, "none": None}


class Block(NamedTuple):
    """A range of a file.

    Attributes:
        file: Its descriptor.
        offset: Where it begins.
        nbytes: How long it is.
        at: Where it begins in all files, one behind the other.
    """

    file: int
    offset: int
    nbytes: int
    at: int


@contextmanager
def opened(source: Path, size: int = BLOCK, flags: int = 0) -> Iterator[list[Block]]:
    """Yield the blocks of a file, or of all files below a directory."""
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    blocks, descriptors, at = list[Block](), list[int](), 0
    try:
        for path in files:
            descriptors.append(os.open(path, os.O_RDONLY | flags))
            end = os.fstat(descriptors[-1]).st_size
            for offset in range(0, end, size):
                nbytes = min(size, end - offset)
                blocks.append(Block(descriptors[-1], offset, nbytes, at))
                at += nbytes
        yield blocks
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def side_by_side(work: Callable[[int, Sequence[T]], None], items: Sequence[T], jobs: int) -> None:
    """Call *work* with its number and a contiguous part of *items* in so many threads."""
    ends = [len(items) * number // jobs for number in range(jobs + 1)]
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number, items[ends[number] : ends[number + 1]])
        except BaseException as failure:
            failures.append(failure)

    if jobs == 1:
        work(0, items)
        return
    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def part_file(target: Path, number: int, nbytes: int, fsync: bool = False) -> Iterator[int]:
    """Yield the descriptor of the file that a thread writes, at its full size."""
    target.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(target / f"part-{number:03d}", flags, 0o644)
    try:
        os.ftruncate(descriptor, nbytes)
        yield descriptor
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(
    source: str | Path,
    target: str | Path,
    jobs: int,
    *,
    crc: str = "isal",
    grow: float = 1.0,
    fsync: bool = False,
) -> None:
    """Copy everything below *source* into *target*, a new directory.

    Args:
        source: A directory or one file.
        target: Where to; must not exist.
        jobs: How many threads.
        crc: What computes the checksum of every block: a key of :data:`CRCS`.
        grow: Bytes to write for each byte that is read.
        fsync: Whether to sync every file.
    """
    checksum = CRCS[crc]

    def work(number: int, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        whole = memoryview(bytearray(BLOCK))
        out = memoryview(bytearray(round(BLOCK * grow))) if grow != 1 else whole
        length = sum(round(block.nbytes * grow) for block in blocks)
        with part_file(Path(target), number, length, fsync) as file:
            end = 0
            for block in blocks:
                if os.preadv(block.file, [whole[: block.nbytes]], block.offset) != block.nbytes:
                    raise OSError("short read")
                end += put(file, out[: round(block.nbytes * grow)], end, checksum)

    Path(target).mkdir(parents=True)
    with opened(Path(source)) as blocks:
        side_by_side(work, blocks, jobs)


def put(file: int, view: memoryview, offset: int, checksum: Crc | None) -> int:
    """Checksum and write *view*."""
    if checksum:
        checksum(view)
    if os.pwrite(file, view, offset) != len(view):
        raise OSError("short write")
    return len(view)


def write(
    views: Sequence[memoryview], target: Path, jobs: int, crc: str = "isal", fsync: bool = False
) -> None:
    """Write memory into files in *target*, as :func:`copy` does."""
    checksum = CRCS[crc]
    parts = [view[at : at + BLOCK] for view in views for at in range(0, len(view), BLOCK)]

    def work(number: int, parts: Sequence[memoryview]) -> None:
        with part_file(target, number, sum(map(len, parts)), fsync) as file:
            end = 0
            for part in parts:
                end += put(file, part, end, checksum)

    side_by_side(work, parts, jobs)


def main() -> None:
    """Parse the arguments and copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--crc", choices=CRCS, default="isal")
    parser.add_argument("--fsync", action="store_true")
    given = parser.parse_args()
    copy(given.source, given.target, given.jobs, crc=given.crc, fsync=given.fsync)


if __name__ == "__main__":
    main()
