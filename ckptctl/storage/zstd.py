"""Incremental decompression of Zstandard data.

Python 3.14 has a module for it; earlier versions need one of three packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ckptctl.errors import DamagedError, MissingPackageError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.tree import TreePath
from ckptctl.units import counted

STEP = 1 << 20
MAGIC = b"\x28\xb5\x2f\xfd"
HEAD = 64
MAX_UNPACKED = 256 << 20
"""Most bytes of all decompressed values of a checkpoint, which are held in memory."""
TOO_LARGE = "requires too much memory"
"""Error of libzstd for a window above 128 MiB, which it only writes on request."""
MODULES: tuple[str, ...] = ("compression.zstd", "zstandard", "backports.zstd", "pyzstd")
"""Modules for decompression, in order of preference."""


class MemoryBudget:
    """Remaining bytes to which the values of a checkpoint may decompress."""

    def __init__(self) -> None:
        self.left = MAX_UNPACKED

    def take(self, nbytes: int, where: str) -> None:
        """Subtract *nbytes* from the budget.

        Raises:
            UnsupportedError: The budget is exceeded.
        """
        self.left -= nbytes
        if self.left < 0:
            raise UnsupportedError(
                f"the values decompress to more than {MAX_UNPACKED:,} bytes",
                where=where,
                why="they are decompressed in memory, and the decompressed size is unbounded",
            )


class _Compressed:
    """Byte range of a file as a stream for the decompression modules."""

    def __init__(self, files: SourceFiles, name: str, offset: int, nbytes: int) -> None:
        self._files = files
        self._name = name
        self._offset = offset
        self._end = offset + nbytes

    def read(self, size: int = -1) -> bytes:
        """Read up to *size* bytes."""
        left = self._end - self._offset
        found = self._files.read(self._name, self._offset, left if size < 0 else min(size, left))
        self._offset += len(found)
        return found

    @property
    def left(self) -> int:
        """Number of remaining bytes."""
        return self._end - self._offset

    def skip(self, size: int, take: Callable[[int], bytes]) -> None:
        """Skip *size* bytes, calling *take* for the last one to detect truncation."""
        if size:
            self._offset += min(size - 1, self.left)
            take(1)


def is_zstd(extension: str) -> bool:
    """Return whether *extension* is DCP's Zstandard extension.

    Descriptors are ``NAME[@DOMAIN][/VERSION]`` (``torch/distributed/checkpoint/_extension.py``).
    """
    name, _, version = extension.partition("/")
    return name == "stream.zstd" and version.partition(".")[0] == "1"


def require_zstd(where: TreePath) -> ModuleType:
    """Import a module for decompression (errors name *where*).

    Raises:
        MissingPackageError: No such module is installed.
    """
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingPackageError(
        "reading this checkpoint requires `zstandard`, which is not installed",
        where=where,
        why="it was written with Zstandard compression",
        hint="install it with `pip install zstandard`, or use Python 3.14",
    )


def whole_value(
    files: SourceFiles, name: str, offset: int, nbytes: int, extension: str, budget: MemoryBudget
) -> bytes:
    """Decompress a byte range completely, as written by *extension*.

    Args:
        files: Files of the checkpoint.
        name: File name.
        offset: First byte.
        nbytes: Compressed bytes.
        extension: DCP extension descriptor.
        budget: Budget for the decompressed bytes.

    Raises:
        CkptError: As :func:`decompressed`, or the extension is not supported.
    """
    where = f"{files.root / name}, at byte {offset:,}"
    if not is_zstd(extension):
        raise UnsupportedError(f"the extension `{extension}` is not supported", where=where)
    found: list[bytes] = []
    for piece in decompressed(files, name, offset, nbytes):
        budget.take(len(piece), where)
        found.append(piece)
    return b"".join(found)


def decompressed(files: SourceFiles, name: str, offset: int, nbytes: int) -> Iterator[bytes]:
    """Decompress a byte range in blocks of at most :data:`STEP` bytes.

    Raises:
        MissingPackageError: No module for decompression is installed.
        DamagedError: The data is damaged or truncated.
        UnsupportedError: The data is not Zstandard data.
    """
    module = require_zstd(files.root / name)
    where = f"{files.root / name}, at byte {offset:,}"
    begun = False
    try:
        with _opened(module, _Compressed(files, name, offset, nbytes)) as stream:
            while piece := stream.read(STEP):
                begun = True
                yield piece
    except (module.ZstdError, EOFError) as error:
        if TOO_LARGE in str(error):
            what = "a Zstandard frame is too large"
            raise UnsupportedError(what, where=where, why=f"{error}") from error
        if begun or _is_frame(module, files.read_some(name, offset, HEAD)):
            raise DamagedError("damaged Zstandard data", where=where, why=f"{error}") from error
        why = f"{error}"
        raise UnsupportedError("not Zstandard data", where=where, why=why) from error
    empty = not begun and _is_empty_frame(module, files.read_some(name, offset, HEAD))
    if not (empty or hasattr(module, "ZstdFile")):
        # these readers do not report truncated data
        _require_whole_frames(_Compressed(files, name, offset, nbytes), where)
    if not begun:
        raise UnsupportedError("the Zstandard data is empty", where=where)


def _require_whole_frames(source: _Compressed, where: str) -> None:
    """Raise if the last frame is truncated, by walking block headers (RFC 8878, section 3.1)."""

    def take(size: int) -> bytes:
        found = source.read(size)
        if len(found) < size:
            why = f"the last frame is incomplete after {counted(nbytes, 'byte')}"
            raise DamagedError("the Zstandard data is truncated", where=where, why=why)
        return found

    nbytes = source.left
    while source.left:
        if take(4) != MAGIC:  # a skippable frame, as the reader has checked all others
            source.skip(int.from_bytes(take(4), "little"), take)
            continue
        (head,) = take(1)
        single, checksum = head >> 5 & 1, head >> 2 & 1
        take((not single) + (0, 1, 2, 4)[head & 3] + (single, 2, 4, 8)[head >> 6])
        last = False
        while not last:
            block = int.from_bytes(take(3), "little")
            last, repeated = bool(block & 1), block >> 1 & 3 == 1
            source.skip(1 if repeated else block >> 3, take)
        take(4 * checksum)


def _is_frame(module: ModuleType, head: bytes) -> bool:
    """Return whether *head* starts a non-empty frame, or is all zeros (never written)."""
    return not any(head) or (head.startswith(MAGIC) and not _is_empty_frame(module, head))


def _is_empty_frame(module: ModuleType, head: bytes) -> bool:
    """Return whether *head* starts with an empty frame.

    torch writes such a frame before data that bypasses its extensions, such as safetensors. Its
    index has the lengths that the tensors had without it.
    """
    reader = module.ZstdDecompressor()
    if hasattr(reader, "decompressobj"):
        reader = reader.decompressobj()
    try:
        return head.startswith(MAGIC) and not reader.decompress(head) and bool(reader.eof)
    except module.ZstdError:
        return False


def _opened(module: ModuleType, source: _Compressed) -> Any:
    if hasattr(module, "ZstdFile"):
        return module.ZstdFile(source)
    reader = module.ZstdDecompressor()
    return reader.stream_reader(source, read_across_frames=True, closefd=False)
