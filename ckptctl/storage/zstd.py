"""Decompressing what was written through Zstandard, a piece at a time.

Python can from 3.14 on; before, one of three packages does it.
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
"""Bytes that all values of one checkpoint may unpack to: they are held in memory."""
TOO_LARGE = "requires too much memory"
"""What libzstd says of a window above 128 MiB, as it writes them when it is asked to."""
MODULES: tuple[str, ...] = ("compression.zstd", "zstandard", "backports.zstd", "pyzstd")
"""What can decompress, in the order in which it is tried."""


class MemoryBudget:
    """What the values of one checkpoint may still unpack to."""

    def __init__(self) -> None:
        self.left = MAX_UNPACKED

    def take(self, nbytes: int, where: str) -> None:
        """Count bytes that are unpacked into memory.

        Raises:
            UnsupportedError: There are more than a checkpoint may have.
        """
        self.left -= nbytes
        if self.left < 0:
            raise UnsupportedError(
                f"the values decompress to more than {MAX_UNPACKED:,} bytes",
                where=where,
                why="they are decompressed in memory, and the decompressed size is unbounded",
            )


class _Compressed:
    """A range of a file, as these modules read it."""

    def __init__(self, files: SourceFiles, name: str, offset: int, nbytes: int) -> None:
        self._files = files
        self._name = name
        self._offset = offset
        self._end = offset + nbytes

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most *size*."""
        left = self._end - self._offset
        found = self._files.read(self._name, self._offset, left if size < 0 else min(size, left))
        self._offset += len(found)
        return found

    @property
    def left(self) -> int:
        """Return how many bytes follow."""
        return self._end - self._offset

    def skip(self, size: int, take: Callable[[int], bytes]) -> None:
        """Pass over *size* bytes, of which *take* reads the last one."""
        if size:
            self._offset += min(size - 1, self.left)
            take(1)


def is_zstd(extension: str) -> bool:
    """Return whether *extension*, as ``torch/distributed/checkpoint/_extension.py`` has it, is it.

    Its descriptors are ``NAME[@DOMAIN][/VERSION]``.
    """
    name, _, version = extension.partition("/")
    return name == "stream.zstd" and version.partition(".")[0] == "1"


def require_zstd(where: TreePath) -> ModuleType:
    """Return a module that decompresses what lies at *where*.

    Raises:
        MissingPackageError: There is none.
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
    """Return what a range of a file holds that went through *extension*, taken from *budget*.

    Raises:
        CkptError: As :func:`decompressed`; or that extension is another one.
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
    """Yield what a range of a file holds, at most :data:`STEP` bytes at a time.

    Raises:
        MissingPackageError: Nothing that is installed decompresses.
        DamagedError: The range is damaged.
        UnsupportedError: Nothing was compressed there.
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
        # its reader ends where the bytes do, without an error
        _require_whole_frames(_Compressed(files, name, offset, nbytes), where)
    if not begun:
        raise UnsupportedError("the Zstandard data is empty", where=where)


def _require_whole_frames(source: _Compressed, where: str) -> None:
    """Refuse frames that are cut off; their blocks are passed over (RFC 8878, section 3.1)."""

    def take(size: int) -> bytes:
        found = source.read(size)
        if len(found) < size:
            why = f"the last frame is incomplete after {counted(nbytes, 'byte')}"
            raise DamagedError("the Zstandard data is truncated", where=where, why=why)
        return found

    nbytes = source.left
    while source.left:
        if take(4) != MAGIC:  # a frame to be skipped: the reader has seen all others
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
    """Return whether *head* is of a frame with content, or of bytes that were never written."""
    return not any(head) or (head.startswith(MAGIC) and not _is_empty_frame(module, head))


def _is_empty_frame(module: ModuleType, head: bytes) -> bool:
    """Return whether *head* begins with a frame that ends without content.

    Such a frame comes before what torch writes past its extensions, as safetensors. Its index has
    the lengths that the tensors had without it.
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
