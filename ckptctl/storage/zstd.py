"""Incremental decompression of Zstandard data.

Python 3.14 has a module for Zstandard; earlier versions need one of three packages.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ckptctl.errors import DamagedError, MissingPackageError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.units import pluralize

STEP_BYTES = 1 << 20
MAGIC = b"\x28\xb5\x2f\xfd"
HEAD_BYTES = 64
MAX_DECOMPRESSED_BYTES = 256 << 20
"""Maximum total size in bytes of the decompressed values of a checkpoint, kept in memory."""
WINDOW_TOO_LARGE = "requires too much memory"
"""Text in the libzstd error for a window of more than 128 MiB, which is not the default."""
MODULES: tuple[str, ...] = ("compression.zstd", "zstandard", "backports.zstd", "pyzstd")
"""Modules that can decompress Zstandard data, in order of preference."""


class MemoryBudget:
    """Memory budget in bytes for the decompressed values of one checkpoint."""

    def __init__(self) -> None:
        self.remaining_bytes = MAX_DECOMPRESSED_BYTES

    def spend_bytes(self, nbytes: int, where: str) -> None:
        """Subtract *nbytes* from the budget.

        Raises:
            UnsupportedError: The budget is exceeded.
        """
        self.remaining_bytes -= nbytes
        if self.remaining_bytes < 0:
            raise UnsupportedError(
                f"the values decompress to more than {MAX_DECOMPRESSED_BYTES:,} bytes",
                where=where,
                why="they are decompressed in memory, and the decompressed size is unbounded",
            )


class _CompressedRange:
    """Stream interface to a byte range of a file, which the decompression modules read."""

    def __init__(self, files: SourceFiles, name: str, offset: int, nbytes: int) -> None:
        self._files = files
        self._name = name
        self._offset = offset
        self._end = offset + nbytes

    def read(self, size: int = -1) -> bytes:
        """Read up to *size* bytes, or all remaining bytes if *size* is negative."""
        remaining = self._end - self._offset
        content = self._files.read(
            self._name, self._offset, remaining if size < 0 else min(size, remaining)
        )
        self._offset += len(content)
        return content

    @property
    def remaining_bytes(self) -> int:
        """Number of bytes of the range that have not been read."""
        return self._end - self._offset

    def skip_bytes(self, size: int, read_exactly: Callable[[int], bytes]) -> None:
        """Skip *size* bytes, calling *read_exactly* for the last one to detect truncation."""
        if size:
            self._offset += min(size - 1, self.remaining_bytes)
            read_exactly(1)


def is_zstd(extension: str) -> bool:
    """Return whether *extension* is DCP's Zstandard extension.

    Descriptors are ``NAME[@DOMAIN][/VERSION]`` (``torch/distributed/checkpoint/_extension.py``).
    """
    name, _, version = extension.partition("/")
    return name == "stream.zstd" and version.partition(".")[0] == "1"


def find_zstd() -> ModuleType | None:
    """Import the preferred installed module for Zstandard data, or return None if none is."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def import_zstd(where: str | os.PathLike[str] | None, *, writes: bool = False) -> ModuleType:
    """Import the preferred installed module that can decompress Zstandard data.

    *where* is the checkpoint to show in the error, and *writes* states whether it is written.

    Raises:
        MissingPackageError: No such module is installed.
    """
    if module := find_zstd():
        return module
    raise MissingPackageError(
        f"{'writing' if writes else 'reading'} this checkpoint requires `zstandard`, which is not "
        "installed",
        where=where,
        why=f"it {'is' if writes else 'was'} written with Zstandard compression",
        hint="install it with `pip install zstandard`, or use Python 3.14",
    )


def decompress_value(
    files: SourceFiles, name: str, offset: int, nbytes: int, extension: str, budget: MemoryBudget
) -> bytes:
    """Decompress a byte range that the DCP extension *extension* has written.

    Args:
        files: Files of the checkpoint.
        name: File name.
        offset: File offset of the first compressed byte.
        nbytes: Number of compressed bytes.
        extension: DCP extension descriptor.
        budget: Budget for the decompressed bytes.

    Raises:
        CkptError: The extension is not supported, or see :func:`iterate_decompressed`.
    """
    where = f"{files.root / name}, at byte {offset:,}"
    if not is_zstd(extension):
        raise UnsupportedError(f"the extension `{extension}` is not supported", where=where)
    pieces: list[bytes] = []
    for piece in iterate_decompressed(files, name, offset, nbytes):
        budget.spend_bytes(len(piece), where)
        pieces.append(piece)
    return b"".join(pieces)


def iterate_decompressed(
    files: SourceFiles, name: str, offset: int, nbytes: int
) -> Iterator[bytes]:
    """Decompress a byte range in blocks of at most :data:`STEP_BYTES` bytes.

    Raises:
        MissingPackageError: No module for decompression is installed.
        DamagedError: The data is damaged or truncated.
        UnsupportedError: The data is not Zstandard data.
    """
    module = import_zstd(files.root / name)
    where = f"{files.root / name}, at byte {offset:,}"
    has_content = False
    try:
        with _open_stream(module, _CompressedRange(files, name, offset, nbytes)) as stream:
            while piece := stream.read(STEP_BYTES):
                has_content = True
                yield piece
    except (module.ZstdError, EOFError) as error:
        if WINDOW_TOO_LARGE in str(error):
            message = "a Zstandard frame is too large"
            raise UnsupportedError(message, where=where, why=f"{error}") from error
        if has_content or _is_frame(module, files.read_up_to(name, offset, HEAD_BYTES)):
            raise DamagedError("damaged Zstandard data", where=where, why=f"{error}") from error
        why = f"{error}"
        raise UnsupportedError("not Zstandard data", where=where, why=why) from error
    empty = not has_content and _is_empty_frame(module, files.read_up_to(name, offset, HEAD_BYTES))
    if not (empty or hasattr(module, "ZstdFile")):
        # these readers do not report truncated data
        _require_complete_frames(_CompressedRange(files, name, offset, nbytes), where)
    if not has_content:
        raise UnsupportedError("the Zstandard data is empty", where=where)


def _require_complete_frames(source: _CompressedRange, where: str) -> None:
    """Raise if the last frame is truncated, according to the block headers (RFC 8878, 3.1)."""

    def read_exactly(size: int) -> bytes:
        content = source.read(size)
        if len(content) < size:
            why = f"the last frame is incomplete after {pluralize(nbytes, 'byte')}"
            raise DamagedError("the Zstandard data is truncated", where=where, why=why)
        return content

    nbytes = source.remaining_bytes
    while source.remaining_bytes:
        if read_exactly(4) != MAGIC:  # a skippable frame; the decompressor has checked all others
            source.skip_bytes(int.from_bytes(read_exactly(4), "little"), read_exactly)
            continue
        (head,) = read_exactly(1)
        single, checksum = head >> 5 & 1, head >> 2 & 1
        read_exactly((not single) + (0, 1, 2, 4)[head & 3] + (single, 2, 4, 8)[head >> 6])
        is_last = False
        while not is_last:
            block = int.from_bytes(read_exactly(3), "little")
            is_last, repeated = bool(block & 1), block >> 1 & 3 == 1
            source.skip_bytes(1 if repeated else block >> 3, read_exactly)
        read_exactly(4 * checksum)


def _is_frame(module: ModuleType, head: bytes) -> bool:
    """Return whether *head* begins with a non-empty frame or consists of zeros.

    A file that was never written contains only zeros.
    """
    return not any(head) or (head.startswith(MAGIC) and not _is_empty_frame(module, head))


def _is_empty_frame(module: ModuleType, head: bytes) -> bool:
    """Return whether *head* starts with an empty frame.

    torch writes such a frame before data that bypasses its extensions, such as safetensors. The
    lengths in the DCP metadata do not include this frame.
    """
    reader = module.ZstdDecompressor()
    if hasattr(reader, "decompressobj"):
        reader = reader.decompressobj()
    try:
        return head.startswith(MAGIC) and not reader.decompress(head) and bool(reader.eof)
    except module.ZstdError:
        return False


def _open_stream(module: ModuleType, source: _CompressedRange) -> Any:
    if hasattr(module, "ZstdFile"):
        return module.ZstdFile(source)
    reader = module.ZstdDecompressor()
    return reader.stream_reader(source, read_across_frames=True, closefd=False)
