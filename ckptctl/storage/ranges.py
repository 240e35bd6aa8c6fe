"""A byte range of a file, read piece by piece through one small buffer per thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ckptctl.storage.advance import Advance
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import SourceFiles

WINDOW = 1 << 20
_local = threading.local()


def windows(
    files: SourceFiles, file: str, offset: int, nbytes: int, advance: Advance | None = None
) -> Iterator[memoryview]:
    """Yield a range of a file piece by piece; each piece is gone when the next one is there.

    Args:
        files: The files of a checkpoint.
        file: One of them.
        offset: First byte.
        nbytes: Number of bytes.
        advance: Called when a piece has been used.

    Raises:
        DamagedError: The file ends before the range does.
        StorageError: The read failed.
    """
    buffer = _buffer()
    for start in range(0, nbytes, len(buffer)):
        view = buffer[: nbytes - start]
        files.readv(file, [view], offset + start)
        yield view
        if advance:
            advance(len(view))


def _buffer() -> memoryview:
    """Return this thread's buffer."""
    found: memoryview | None = getattr(_local, "buffer", None)
    if found is None or len(found) != WINDOW:
        found = _local.buffer = memoryview(bytearray(WINDOW))
    return found


def crc_of(
    files: SourceFiles, file: str, offset: int, nbytes: int, advance: Advance | None = None
) -> int:
    """Return the CRC-32 of a range of a file; see :func:`windows` for what it takes."""
    crc = 0
    for view in windows(files, file, offset, nbytes, advance):
        crc = crc32(view, crc)
    return crc
