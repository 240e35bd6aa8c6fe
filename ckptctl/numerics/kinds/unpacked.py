"""A kind that decompresses DCP write items stored with an extension.

``unpacked``: the input is the bytes of the item, a ``torch.save`` zip with one tensor of the file's
dtype and shape. Compressed bytes can only be read from the start, so the item is decompressed once
into a temporary file, from which all threads read. Recently used items are cached.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptctl.catalog import Box, ComputedTensor, Extent, TensorEntry
from ckptctl.errors import DamagedError, StorageError, UnsupportedError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.computed import Kind, OutputRectangle, SharedResults, build_matrix_box
from ckptctl.storage.crc import compute_crc
from ckptctl.storage.files import IOV_MAX, SourceFiles, skip_bytes
from ckptctl.storage.tensor_reader import TensorReader
from ckptctl.storage.zips.items import read_item_tensor, require_matching_chunk
from ckptctl.storage.zstd import iterate_decompressed
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

CACHE_ITEMS = 64
CACHE_BYTES = 8 << 30
MAX_SIZE_FACTOR, MAX_EXTRA_BYTES = 4, 64 << 20
"""Limit on the decompressed size of an item, as a multiple of its elements plus extra bytes.

An item may exceed its elements, because torch saves the complete storage of a view.
"""


class _UnpackedItem(NamedTuple):
    """A decompressed DCP write item in a temporary file, and the entry of its tensor."""

    files: TemporaryFile
    entry: TensorEntry


def _exceeds_cache(items: Sequence[_UnpackedItem | None]) -> bool:
    nbytes = sum(item.files.nbytes for item in items if item)
    return len(items) > CACHE_ITEMS or nbytes > CACHE_BYTES


_ITEMS = SharedResults[_UnpackedItem](_exceeds_cache)


def _read_unpacked(out: OutputRectangle) -> None:
    files, packed = out.inputs[0].files, out.inputs[0].entry
    item_location = packed.extents[0].file, packed.extents[0].offset
    item = _ITEMS.get_or_compute(
        files, item_location, lambda: _decompress_item(files, packed, out.computed)
    )
    matrix = StridedTensor.from_entry(item.entry).as_matrix()
    TensorReader(item.files, matrix).read_box_into(
        build_matrix_box(out.rows, out.columns), out.memory
    )


def _decompress_item(
    files: SourceFiles, packed: TensorEntry, computed: ComputedTensor
) -> _UnpackedItem:
    """Decompress an item into a temporary file, and verify its checksum."""
    name, packed_extent = packed.name, packed.extents[0]
    where = f"{files.root / packed_extent.file}, at byte {packed_extent.offset:,}"
    file = TemporaryFile(files.root, packed_extent.file)
    max_bytes = MAX_SIZE_FACTOR * computed.to_extent("").nbytes + MAX_EXTRA_BYTES
    for piece in iterate_decompressed(
        files, packed_extent.file, packed_extent.offset, packed_extent.nbytes
    ):
        file.append_bytes([piece])
        if file.nbytes > max_bytes:
            why = (
                f"more than {pluralize(max_bytes, 'byte')} for {computed.dtype} "
                f"{list(computed.shape)}"
            )
            raise UnsupportedError(f"an item of `{name}` is too long", where=where, why=why)
    stored = read_item_tensor(file, packed_extent.file, 0, file.nbytes)
    require_matching_chunk(
        (stored.dtype, stored.shape), name, computed.dtype, computed.shape, lambda: where
    )
    box = Box.whole(stored.shape)
    extent = Extent(
        *(box, packed_extent.file, stored.offset, stored.nbytes),
        strides=stored.strides,
        crc32=stored.crc32,
        within=stored.within,
    )
    checksum = extent.recorded_checksum
    if (
        checksum
        and compute_crc(file, packed_extent.file, checksum.offset, checksum.nbytes)
        != checksum.crc32
    ):
        why = f"the CRC-32 of `{name}` differs from the one in its zip"
        raise DamagedError("checksum mismatch", where=where, why=why)
    return _UnpackedItem(
        file, TensorEntry(name, stored.dtype, stored.shape, (extent,), packed.path)
    )


class TemporaryFile(SourceFiles):
    """An unnamed temporary file, deleted with this object.

    *root* and *name* identify the compressed source file in error messages.
    """

    def __init__(self, root: TreePath, name: str) -> None:
        self.root = root
        self.name = name
        self.nbytes = 0
        self._folder = tempfile.gettempdir()
        self._descriptor = -1
        try:
            with tempfile.TemporaryFile(prefix="ckptctl-") as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._write_error(error) from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def append_bytes(self, chunks: Iterable[bytes]) -> None:
        """Append *chunks* to the file."""
        for chunk in chunks:
            remaining = memoryview(chunk)
            while remaining:
                try:
                    count = os.write(self._descriptor, remaining)
                except OSError as error:
                    raise self._write_error(error) from error
                remaining = remaining[count:]
            self.nbytes += len(chunk)

    def path(self, name: str) -> TreePath:
        """Return the path of the compressed source file, which error messages show."""
        return self.root / name

    def read_identity(self, name: str) -> FileIdentity:  # noqa: ARG002
        """Return a file identity that contains the current size of the temporary file."""
        return FileIdentity(self.nbytes, 0, 0, 0, 0)

    def read_up_to(self, name: str, offset: int, nbytes: int) -> bytes:
        """See :meth:`~ckptctl.storage.files.SourceFiles.read_up_to`."""
        try:
            return os.pread(self._descriptor, nbytes, offset)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(self.root / name)) from error

    def fill_views(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        """See :meth:`~ckptctl.storage.files.SourceFiles.fill_views`."""
        read_count = 0
        remaining = [view for view in views if view]
        try:
            while remaining:
                count = os.preadv(self._descriptor, remaining[:IOV_MAX], offset + read_count)
                if not count:
                    break
                read_count += count
                remaining = skip_bytes(remaining, count)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(self.root / name)) from error
        return read_count

    def _write_error(self, error: OSError) -> StorageError:
        failed = StorageError.from_os_error(error, "write a temporary file", self._folder)
        failed.why = f"the file buffers parts of {self.root / self.name}"
        failed.hint = "set `TMPDIR` to another folder"
        return failed


KINDS = {"unpacked": Kind(_read_unpacked, needs_torch=lambda _: False, host_only=True)}
