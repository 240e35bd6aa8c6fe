"""Read tensors and model metadata from the headers of GGUF files.

A header contains metadata and the place of each tensor, none of which is trusted: counts and
lengths are compared with the file size before anything is read, long arrays are skipped, and nested
arrays are rejected.

Sources: ``docs/gguf.md`` of ggml; ``gguf/constants.py`` and ``gguf_reader.py`` (0.19).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.dtypes import itemsize
from ckptctl.errors import DamagedError, UnsupportedError, quote_names
from ckptctl.facts.gguf_config import ROPE_FACTORS, build_config_from_gguf, select_sizes
from ckptctl.formats.sidecar_files import beside
from ckptctl.numerics.quantization.ggml import BLOCK_TYPES, UNQUANTIZED_TYPES
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.schema import MalformedError, malformed_errors
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

CONFIG = "config.json"
MAX_FACTORS = 1 << 12
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_HEADER = 400_000_000
"""Maximum length of a header in bytes; tokenizer vocabularies take most of it."""
MAX_COUNT = 1 << 20
"""Maximum number of tensors, and of metadata keys."""
MAX_TEXT = 1 << 24
MAX_NAME = 1 << 12
MAX_DIMS = 4
KEPT = 4096
"""Maximum length of a numeric array whose values are kept."""
CHUNK = 1 << 20
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
_CLAIMS = tuple(struct.Struct(f"<{rank}QIQ") for rank in range(MAX_DIMS + 1))
"""Fields after the name and rank of a tensor: dimensions, type and offset."""


def read(path: TreePath, names: Sequence[str], name: str) -> Catalog:
    """Read the catalog of the model *path*, which has the files *names*."""
    root = path if path.is_dir() else path.parent
    with source_files(root) as files:
        headers = {file: read_header(files, file) for file in names}
        _require_all(root, headers)
        sizes = {file: files.size(file) for file in names}
        tensors = _tensors(root, headers)
        metadata = headers[names[0]].metadata
        values = {key: value for key, value in metadata.items() if not isinstance(value, Many)}
        counts = {key: value.count for key, value in metadata.items() if isinstance(value, Many)}
        config, notes = build_config_from_gguf(values, counts, tensors, _factors(files, tensors))
    around = beside(root, names, alone=path.is_file())
    found = around.catalog(root, name)
    own = CONFIG in found.documents
    documents = found.documents if own or not config else {**found.documents, CONFIG: config}
    return replace(
        found,
        path=path,
        files=sizes,
        tensors=tensors,
        documents=documents,
        stated={f"the metadata of {root / names[0]}": select_sizes(config)}
        if own and config
        else {},
        notes=() if own else notes,
    )


def _require_all(root: TreePath, headers: Mapping[str, Header]) -> None:
    """Raise if the files do not belong to one model, or tensors are missing."""
    first, *_ = headers.values()
    total = first.metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers.values())
    for place, (name, header) in enumerate(headers.items()):
        told = header.metadata.get("split.no", place), header.metadata.get("split.count")
        if told[0] != place or told[1] not in (None, len(headers)):
            why = (
                f"its header states part {told[0]} of {told[1]}, counted from 0; expected "
                f"{place} of {len(headers)}"
            )
            raise DamagedError(
                "the files do not belong to one model", where=str(root / name), why=why
            )
    if isinstance(total, int) and len(headers) > 1 and total != found:
        raise DamagedError(
            "tensors are missing", where=str(root), why=f"found {found:,} of {total:,}"
        )


def _tensors(root: TreePath, headers: Mapping[str, Header]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    of: dict[str, str] = {}
    for file, header in headers.items():
        for one in header.tensors:
            name, dtype, shape = one.name, UNQUANTIZED_TYPES.get(one.kind), one.shape
            if dtype is None:
                block = BLOCK_TYPES[one.kind]
                name, dtype = f"{name}.{block.name}", "uint8"
                shape = (*shape[:-1], shape[-1] // block.elements * block.nbytes)
            if of.setdefault(one.name, file) != file:
                why = f"it is in {quote_names([of[one.name], file])}"
                raise DamagedError(f"duplicate tensor `{one.name}`", where=str(root), why=why)
            if name in found:
                why = (
                    f"without its type suffix, `{one.name}` in {file} has the same name as "
                    "another tensor"
                )
                raise UnsupportedError(f"duplicate tensor `{name}`", where=str(root), why=why)
            extent = Extent(Box.whole(shape), file, one.offset, one.nbytes)
            found[name] = TensorEntry(name, dtype, shape, (extent,), (name,))
    return found


def _factors(files: SourceFiles, tensors: Mapping[str, TensorEntry]) -> Sequence[float] | None:
    """Return the divisors of the rotary frequencies, or None if there are none."""
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
class Many:
    """Placeholder for a metadata array whose values are not kept.

    Attributes:
        count: Number of values.
    """

    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        name: Name in the file.
        shape: Dimensions, outermost first.
        kind: GGML type number.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Content of one file's header.

    Attributes:
        metadata: Values by key; arrays that are long or not numeric are :class:`Many`.
        tensors: Tensors in the order of the file.
    """

    metadata: Mapping[str, object]
    tensors: tuple[GgufTensor, ...]


def read_header(files: SourceFiles, name: str) -> Header:
    """Read the header of the file *name*.

    Raises:
        DamagedError: The file is truncated, or tensors are misplaced.
        UnsupportedError: The version or a value type is not supported.
    """
    cursor = _Cursor(files, name)
    with malformed_errors("unsupported GGUF file", cursor.where):
        if cursor.size < 4 or cursor.take(4) != b"GGUF":
            raise MalformedError("the file does not start with `GGUF`")
        version = cursor.number("<I")
        if version not in VERSIONS:
            order = " (the byte order is reversed)" if version & 0xFFFF == 0 else ""
            raise MalformedError(f"version {version}{order}; only versions 2 and 3 are supported")
        tensors, keys = cursor.count("<Q", 24), cursor.count("<Q", 13)
        metadata: dict[str, object] = {}
        for _ in range(keys):
            key = cursor.text(MAX_NAME)
            if key in metadata:
                raise MalformedError(f"duplicate key `{key}`")
            metadata[key] = _value(cursor, cursor.number("<I"))
        claims = [_claim(cursor) for _ in range(tensors)]
        alignment = metadata.get(ALIGNMENT, 32)
        if (
            not isinstance(alignment, int)
            or not 0 < alignment <= 1 << 20
            or alignment.bit_count() != 1
        ):
            raise MalformedError(f"`{ALIGNMENT}` is {alignment!r}, which is not a power of two")
        return Header(metadata, _placed(cursor, claims, alignment))


class _Cursor:
    """Sequential reader of a header that never reads past the end of the file."""

    def __init__(self, files: SourceFiles, name: str) -> None:
        self._files, self._name = files, name
        self.size = files.size(name)
        self.at = 0
        self._begin, self._chunk = 0, b""

    @property
    def where(self) -> str:
        """Path of the file."""
        return str(self._files.root / self._name)

    def torn(self, why: str) -> DamagedError:
        """Make the error for a damaged file."""
        return DamagedError("damaged GGUF file", where=self.where, why=why)

    def require(self, nbytes: int) -> None:
        """Raise if fewer than *nbytes* bytes remain."""
        if self.at + nbytes > self.size:
            why = f"the header extends past the end of the file at byte {self.size:,}"
            raise DamagedError("truncated GGUF file", where=self.where, why=why)
        if self.at + nbytes > MAX_HEADER:
            raise MalformedError(f"the header is longer than {MAX_HEADER:,} bytes")

    def take(self, nbytes: int) -> bytes:
        """Read the next *nbytes* bytes."""
        self.require(nbytes)
        start = self.at - self._begin
        if start + nbytes > len(self._chunk):
            self._begin = self.at
            length = min(max(nbytes, CHUNK), self.size - self.at)
            self._chunk, start = self._files.read(self._name, self.at, length), 0
        self.at += nbytes
        return self._chunk[start : start + nbytes]

    def skip(self, nbytes: int) -> None:
        """Skip *nbytes* bytes."""
        self.require(nbytes)
        self.at += nbytes

    def skip_texts(self, count: int) -> None:
        """Skip *count* strings, several hundred thousand in a vocabulary."""
        read, done = struct.Struct("<Q").unpack_from, 0
        while done < count:
            self.skip(self.length(MAX_TEXT))
            done += 1
            place, last = self.at - self._begin, len(self._chunk) - 8
            while done < count and place <= last:
                place += 8 + read(self._chunk, place)[0]
                done += 1
            self.at = self._begin + place
        self.require(0)

    def number(self, code: str) -> Any:
        """Read the next number."""
        (found,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return found

    def count(self, code: str, least: int) -> int:
        """Read the number of following entries, each of at least *least* bytes."""
        found: int = self.number(code)
        if found > MAX_COUNT:
            raise MalformedError(f"the header declares {pluralize(found, 'entry', 'entries')}")
        self.require(found * least)
        return found

    def length(self, most: int) -> int:
        """Read the length of a string."""
        found: int = _LENGTH.unpack(self.take(8))[0]
        self.require(found)
        if found > most:
            raise MalformedError(f"a string of {pluralize(found, 'byte')} is too long")
        return found

    def text(self, most: int = MAX_TEXT) -> str:
        """Read the next string."""
        raw = self.take(self.length(most))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"the string before byte {self.at:,} is not UTF-8") from error


def _value(cursor: _Cursor, kind: int) -> object:
    if kind == TEXT:
        return cursor.text()
    if kind == ARRAY:
        return _array(cursor)
    if kind not in SCALARS:
        raise MalformedError(f"the metadata contains a value of unknown type {kind}")
    return cursor.number(SCALARS[kind])


def _array(cursor: _Cursor) -> object:
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind == TEXT:
        cursor.require(8 * count)
        cursor.skip_texts(count)
        return Many(count)
    if kind not in SCALARS:
        raise MalformedError(f"the metadata contains an array of unknown type {kind}")
    each = struct.calcsize(SCALARS[kind])
    cursor.require(each * count)
    if count > KEPT:
        cursor.skip(each * count)
        return Many(count)
    return list(struct.unpack(f"<{count}{SCALARS[kind][1]}", cursor.take(each * count)))


def _claim(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read the name, shape, type and relative offset of the next tensor."""
    name, rank = cursor.text(MAX_NAME), cursor.number("<I")
    if rank > MAX_DIMS:
        raise MalformedError(f"`{name}` has {pluralize(rank, 'dimension')}")
    form = _CLAIMS[rank]
    *shape, kind, offset = form.unpack(cursor.take(form.size))
    return name, tuple(shape[::-1]), kind, offset


def _placed(
    cursor: _Cursor, claims: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> tuple[GgufTensor, ...]:
    """Check that tensors are aligned, inside the file and do not overlap, and return them."""
    data = -(-cursor.at // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in claims:
        if name in found:
            raise cursor.torn(f"duplicate tensor `{name}`")
        if offset % alignment:
            raise cursor.torn(
                f"`{name}` starts at {offset:,}, which is not a multiple of {alignment}"
            )
        found[name] = GgufTensor(
            name, shape, kind, data + offset, _nbytes(cursor, name, shape, kind)
        )
    end, last = 0, ""
    for one in sorted(found.values(), key=lambda one: one.offset):
        if one.offset < end:
            raise cursor.torn(f"`{one.name}` and `{last}` overlap at byte {one.offset:,}")
        end, last = one.offset + one.nbytes, one.name
    if end > cursor.size:
        why = f"`{last}` ends at byte {end:,}, but the file has {cursor.size:,}"
        raise DamagedError("truncated GGUF file", where=cursor.where, why=why)
    return tuple(found.values())


def _nbytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> int:
    count = math.prod(shape)
    if kind in UNQUANTIZED_TYPES:
        return count * itemsize(UNQUANTIZED_TYPES[kind])
    if kind not in BLOCK_TYPES:
        raise MalformedError(f"`{name}` has the unknown type {kind}")
    block = BLOCK_TYPES[kind]
    if not shape or shape[-1] % block.elements:
        raise cursor.torn(
            f"a row of `{name}` is not a multiple of {pluralize(block.elements, 'element')}"
        )
    return count // block.elements * block.nbytes
