"""Read tensors and model metadata from the headers of GGUF files.

A header contains the metadata and the location of each tensor, which may be damaged or malicious.
Counts and lengths are therefore compared with the file size before the data is read. Long arrays
are skipped, and nested arrays are rejected.

Sources: ``docs/gguf.md`` of ggml; ``gguf/constants.py`` and ``gguf_reader.py`` (0.19).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.dtypes import get_itemsize
from ckptctl.errors import DamagedError, UnsupportedError, quote_names
from ckptctl.facts.gguf_config import ROPE_FACTORS, build_config_from_gguf, select_sizes
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.numerics.quantization.ggml import BLOCK_TYPES, UNQUANTIZED_TYPES
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.schema import MalformedError, wrap_malformed_errors
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

CONFIG = "config.json"
MAX_FACTORS = 1 << 12
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
MAX_HEADER_BYTES = 400_000_000
"""Maximum length of a header in bytes, most of which is usually the tokenizer vocabulary."""
MAX_COUNT = 1 << 20
"""Maximum number of tensors in a file, and of metadata keys."""
MAX_TEXT_BYTES = 1 << 24
MAX_NAME_BYTES = 1 << 12
MAX_DIMS = 4
MAX_KEPT_VALUES = 4096
"""Maximum number of elements of a metadata array that is read instead of skipped."""
READ_BYTES = 1 << 20
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
TEXT, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_TENSOR_INFO_STRUCTS = tuple(struct.Struct(f"<{rank}QIQ") for rank in range(MAX_DIMS + 1))
"""Struct of the dimensions, type and offset of a tensor, by number of dimensions."""


def read_catalog(path: TreePath, names: Sequence[str], name: str) -> Catalog:
    """Read the catalog of the model in the files *names*.

    Args:
        path: File or folder that the user passed.
        names: Names of all files of the model, in the order of their numbers.
        name: Name of the format.
    """
    root = path if path.is_dir() else path.parent
    with source_files(root) as files:
        headers = {file: read_header(files, file) for file in names}
        _require_complete_model(root, headers)
        sizes = {file: files.size(file) for file in names}
        tensors = _make_entries(root, headers)
        metadata = headers[names[0]].metadata
        values = {
            key: value for key, value in metadata.items() if not isinstance(value, OmittedArray)
        }
        counts = {
            key: value.count for key, value in metadata.items() if isinstance(value, OmittedArray)
        }
        config, notes = build_config_from_gguf(
            values, counts, tensors, _read_rope_factors(files, tensors)
        )
    sidecars = scan_sidecar_files(root, names, is_single_file=path.is_file())
    catalog = sidecars.start_catalog(root, name)
    has_config = CONFIG in catalog.documents
    documents = (
        catalog.documents if has_config or not config else {**catalog.documents, CONFIG: config}
    )
    return replace(
        catalog,
        path=path,
        files=sizes,
        tensors=tensors,
        documents=documents,
        stated={f"the metadata of {root / names[0]}": select_sizes(config)}
        if has_config and config
        else {},
        notes=() if has_config else notes,
    )


def _require_complete_model(root: TreePath, headers: Mapping[str, GgufHeader]) -> None:
    """Raise if the headers show that the files are of different models, or tensors are missing."""
    first, *_ = headers.values()
    total = first.metadata.get("split.tensors.count")
    tensor_count = sum(len(header.tensors) for header in headers.values())
    for place, (name, header) in enumerate(headers.items()):
        part = header.metadata.get("split.no", place), header.metadata.get("split.count")
        if part[0] != place or part[1] not in (None, len(headers)):
            why = (
                f"its header states part {part[0]} of {part[1]}, counted from 0; expected "
                f"{place} of {len(headers)}"
            )
            raise DamagedError(
                "the files do not belong to one model", where=str(root / name), why=why
            )
    if isinstance(total, int) and len(headers) > 1 and total != tensor_count:
        raise DamagedError(
            "tensors are missing", where=str(root), why=f"found {tensor_count:,} of {total:,}"
        )


def _make_entries(root: TreePath, headers: Mapping[str, GgufHeader]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    file_by_name: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            name, dtype, shape = tensor.name, UNQUANTIZED_TYPES.get(tensor.kind), tensor.shape
            if dtype is None:
                block = BLOCK_TYPES[tensor.kind]
                name, dtype = f"{name}.{block.name}", "uint8"
                shape = (*shape[:-1], shape[-1] // block.elements * block.nbytes)
            if file_by_name.setdefault(tensor.name, file) != file:
                why = f"it is in {quote_names([file_by_name[tensor.name], file])}"
                raise DamagedError(f"duplicate tensor `{tensor.name}`", where=str(root), why=why)
            if name in entries:
                why = (
                    f"without its type suffix, `{tensor.name}` in {file} has the same name as "
                    "another tensor"
                )
                raise UnsupportedError(f"duplicate tensor `{name}`", where=str(root), why=why)
            extent = Extent(Box.whole(shape), file, tensor.offset, tensor.nbytes)
            entries[name] = TensorEntry(name, dtype, shape, (extent,), (name,))
    return entries


def _read_rope_factors(
    files: SourceFiles, tensors: Mapping[str, TensorEntry]
) -> Sequence[float] | None:
    """Read the RoPE frequency divisors, or return None if the model has no such tensor."""
    entry = tensors.get(ROPE_FACTORS)
    if entry is None:
        return None
    if entry.dtype != "float32" or not 0 < entry.numel <= MAX_FACTORS:
        why = f"{entry.dtype} {list(entry.shape)}"
        raise UnsupportedError(f"`{ROPE_FACTORS}` is malformed", where=str(files.root), why=why)
    extent = entry.extents[0]
    data = files.read(extent.file, extent.offset, extent.nbytes)
    return list(memoryview(data).cast("f"))


@dataclass(frozen=True, slots=True)
class OmittedArray:
    """Placeholder for a metadata array that was skipped.

    Attributes:
        count: Number of elements in the array.
    """

    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file.

    Attributes:
        name: Name in the file, without a type suffix.
        shape: Shape in torch order, with the outermost dimension first.
        kind: Number of the GGML type, such as 12 for Q4_K.
        offset: Offset of the tensor in the file, in bytes.
        nbytes: Size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Parsed header of one GGUF file.

    Attributes:
        metadata: Values by key, with :class:`OmittedArray` for long arrays and arrays of strings.
        tensors: Tensors in the order of the header.
    """

    metadata: Mapping[str, object]
    tensors: tuple[GgufTensor, ...]


def read_header(files: SourceFiles, name: str) -> GgufHeader:
    """Read and parse the header of the GGUF file *name*.

    Raises:
        DamagedError: The file is truncated, or tensors overlap or are misaligned.
        UnsupportedError: The version or a value type is not supported.
    """
    cursor = _Cursor(files, name)
    with wrap_malformed_errors("unsupported GGUF file", cursor.where):
        if cursor.size < 4 or cursor.read_bytes(4) != b"GGUF":
            raise MalformedError("the file does not start with `GGUF`")
        version = cursor.read_number("<I")
        if version not in VERSIONS:
            order = " (the byte order is reversed)" if version & 0xFFFF == 0 else ""
            raise MalformedError(f"version {version}{order}; only versions 2 and 3 are supported")
        tensor_count, key_count = cursor.read_count("<Q", 24), cursor.read_count("<Q", 13)
        metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = cursor.read_text(MAX_NAME_BYTES)
            if key in metadata:
                raise MalformedError(f"duplicate key `{key}`")
            metadata[key] = _read_value(cursor, cursor.read_number("<I"))
        tensor_infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
        alignment = metadata.get(ALIGNMENT_KEY, 32)
        if (
            not isinstance(alignment, int)
            or not 0 < alignment <= 1 << 20
            or alignment.bit_count() != 1
        ):
            raise MalformedError(f"`{ALIGNMENT_KEY}` is {alignment!r}, which is not a power of two")
        return GgufHeader(metadata, _locate_tensors(cursor, tensor_infos, alignment))


class _Cursor:
    """Sequential reader of a GGUF header, which never reads past the end of the file."""

    def __init__(self, files: SourceFiles, name: str) -> None:
        self._files, self._name = files, name
        self.size = files.size(name)
        self.position = 0
        self._begin, self._chunk = 0, b""

    @property
    def where(self) -> str:
        """Path of the file, for error messages."""
        return str(self._files.root / self._name)

    def damaged_error(self, why: str) -> DamagedError:
        """Build the error for a damaged GGUF file, with *why* as the reason."""
        return DamagedError("damaged GGUF file", where=self.where, why=why)

    def require_remaining(self, nbytes: int) -> None:
        """Raise if fewer than *nbytes* bytes remain in the file, or the header is too long."""
        if self.position + nbytes > self.size:
            why = f"the header extends past the end of the file at byte {self.size:,}"
            raise DamagedError("truncated GGUF file", where=self.where, why=why)
        if self.position + nbytes > MAX_HEADER_BYTES:
            raise MalformedError(f"the header is longer than {MAX_HEADER_BYTES:,} bytes")

    def read_bytes(self, nbytes: int) -> bytes:
        """Read the next *nbytes* bytes, or raise if the file ends before."""
        self.require_remaining(nbytes)
        start = self.position - self._begin
        if start + nbytes > len(self._chunk):
            self._begin = self.position
            length = min(max(nbytes, READ_BYTES), self.size - self.position)
            self._chunk, start = self._files.read(self._name, self.position, length), 0
        self.position += nbytes
        return self._chunk[start : start + nbytes]

    def skip_bytes(self, nbytes: int) -> None:
        """Skip the next *nbytes* bytes, or raise if the file ends before."""
        self.require_remaining(nbytes)
        self.position += nbytes

    def skip_texts(self, count: int) -> None:
        """Skip the next *count* strings.

        Strings that are already in the read buffer are skipped in a tight loop, because
        vocabularies are large.
        """
        unpack_length, skipped_count = struct.Struct("<Q").unpack_from, 0
        while skipped_count < count:
            self.skip_bytes(self.read_length(MAX_TEXT_BYTES))
            skipped_count += 1
            position, last = self.position - self._begin, len(self._chunk) - 8
            while skipped_count < count and position <= last:
                position += 8 + unpack_length(self._chunk, position)[0]
                skipped_count += 1
            self.position = self._begin + position
        self.require_remaining(0)

    def read_number(self, code: str) -> Any:
        """Read the next number, whose :mod:`struct` format is *code*, such as ``<I``."""
        (value,) = struct.unpack(code, self.read_bytes(struct.calcsize(code)))
        return value

    def read_count(self, code: str, min_bytes: int) -> int:
        """Read a count, or raise if the file is too short for that many entries.

        Args:
            code: :mod:`struct` format of the count.
            min_bytes: Minimum size of an entry in bytes.
        """
        value: int = self.read_number(code)
        if value > MAX_COUNT:
            raise MalformedError(f"the header declares {pluralize(value, 'entry', 'entries')}")
        self.require_remaining(value * min_bytes)
        return value

    def read_length(self, max_bytes: int) -> int:
        """Read the length of a string in bytes, or raise if it exceeds *max_bytes*."""
        value: int = _LENGTH.unpack(self.read_bytes(8))[0]
        self.require_remaining(value)
        if value > max_bytes:
            raise MalformedError(f"a string of {pluralize(value, 'byte')} is too long")
        return value

    def read_text(self, max_bytes: int = MAX_TEXT_BYTES) -> str:
        """Read the next UTF-8 string, or raise if it is longer than *max_bytes*."""
        raw = self.read_bytes(self.read_length(max_bytes))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(
                f"the string before byte {self.position:,} is not UTF-8"
            ) from error


def _read_value(cursor: _Cursor, kind: int) -> object:
    if kind == TEXT:
        return cursor.read_text()
    if kind == ARRAY:
        return _read_array(cursor)
    if kind not in SCALARS:
        raise MalformedError(f"the metadata contains a value of unknown type {kind}")
    return cursor.read_number(SCALARS[kind])


def _read_array(cursor: _Cursor) -> object:
    kind, count = cursor.read_number("<I"), cursor.read_number("<Q")
    if kind == TEXT:
        cursor.require_remaining(8 * count)
        cursor.skip_texts(count)
        return OmittedArray(count)
    if kind not in SCALARS:
        raise MalformedError(f"the metadata contains an array of unknown type {kind}")
    each = struct.calcsize(SCALARS[kind])
    cursor.require_remaining(each * count)
    if count > MAX_KEPT_VALUES:
        cursor.skip_bytes(each * count)
        return OmittedArray(count)
    return list(struct.unpack(f"<{count}{SCALARS[kind][1]}", cursor.read_bytes(each * count)))


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read the name, shape, GGML type number and offset of the next tensor.

    The offset is in bytes from the start of the tensor data, which follows the header.
    """
    name, rank = cursor.read_text(MAX_NAME_BYTES), cursor.read_number("<I")
    if rank > MAX_DIMS:
        raise MalformedError(f"`{name}` has {pluralize(rank, 'dimension')}")
    info_struct = _TENSOR_INFO_STRUCTS[rank]
    *shape, kind, offset = info_struct.unpack(cursor.read_bytes(info_struct.size))
    return name, tuple(shape[::-1]), kind, offset


def _locate_tensors(
    cursor: _Cursor, tensor_infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> tuple[GgufTensor, ...]:
    """Compute the file offset and size of each tensor in *tensor_infos*.

    Raises an error if a tensor is misaligned, overlaps another one, or exceeds the file.
    """
    data_offset = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in tensor_infos:
        if name in tensors:
            raise cursor.damaged_error(f"duplicate tensor `{name}`")
        if offset % alignment:
            raise cursor.damaged_error(
                f"`{name}` starts at {offset:,}, which is not a multiple of {alignment}"
            )
        tensors[name] = GgufTensor(
            name, shape, kind, data_offset + offset, _compute_nbytes(cursor, name, shape, kind)
        )
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise cursor.damaged_error(
                f"`{tensor.name}` and `{last}` overlap at byte {tensor.offset:,}"
            )
        end, last = tensor.offset + tensor.nbytes, tensor.name
    if end > cursor.size:
        why = f"`{last}` ends at byte {end:,}, but the file has {cursor.size:,}"
        raise DamagedError("truncated GGUF file", where=cursor.where, why=why)
    return tuple(tensors.values())


def _compute_nbytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> int:
    count = math.prod(shape)
    if kind in UNQUANTIZED_TYPES:
        return count * get_itemsize(UNQUANTIZED_TYPES[kind])
    if kind not in BLOCK_TYPES:
        raise MalformedError(f"`{name}` has the unknown type {kind}")
    block = BLOCK_TYPES[kind]
    if not shape or shape[-1] % block.elements:
        raise cursor.damaged_error(
            f"a row of `{name}` is not a multiple of {pluralize(block.elements, 'element')}"
        )
    return count // block.elements * block.nbytes
