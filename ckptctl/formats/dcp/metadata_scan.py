"""Read many entries of a ``.metadata`` pickle at once if they have torch's usual opcodes.

A tensor with one chunk takes 112 opcodes, and 512 ranks have half a million such tensors. A tensor
of a thousand ranks has as many chunks, and the dict of byte ranges has a million entries. All
entries except the first of a file have the same opcodes, with other numbers. A regular expression
matches one entry at a time. References to the memo are resolved once per byte string.

The unpickler continues as if it had read the opcodes, except that a run of entries is one object in
its list or dict, and that nothing can refer to the records inside an entry. A file with such
references, with opcodes that move entries (no pickler writes these), or with anything else unusual
is read again opcode by opcode.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from ckptctl import dtypes
from ckptctl.columns import Vector
from ckptctl.formats.shared.indexes import parse_integers
from ckptctl.storage.pickles.inert import Builder, Global, Size

_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J...[\0-\x7f]|\x8a\x04....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7})"
_TEXT = rb"\x8c.[^\x94]{1,255}\x94"
_DIMS = rb"(?:%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,8}t\x94)" % (_INT, _INT, _INT, _INT)
_STATE = rb"%b\)\x81\x94\}\x94\(" % _REF
_BUILT = rb"\x85\x94R\x94"
_TENSOR = (
    rb"(%b%b%b\)\x81\x94\(%b%b[\x88\x89]%b[\x88\x89]t\x94b%b)(%b)(?:(%b)%b)?(%b\]\x94)(\()?"
    % (_STATE, _REF, _REF, _REF, _REF, _REF, _REF, _REF, _DIMS, _BUILT, _REF)
)
_CHUNK = rb"(%b%b%b)(%b)%b(%b%b)(%b)%bub" % (
    *(_STATE, _REF, _REF, _DIMS, _BUILT),
    *(_REF, _REF, _DIMS, _BUILT),
)
_INDEX = rb"(%b%b)(%b|%b)(%b)(?:%b|N)(?:(%b)(%b)(?:(%b)%b)?)?ub" % (
    *(_STATE, _REF, _REF, _TEXT, _REF, _INT, _REF, _REF, _DIMS, _BUILT),
)
_INFO = rb"(%b%b)(%b|%b)(%b)(%b)(%b)(%b)ub" % (
    *(_STATE, _REF, _REF, _TEXT),
    *(_REF, _INT, _REF, _INT),
)
_OR_EMPTY = rb"|"
"""Regex suffix for an empty alternative, so that ``finditer`` stops instead of skipping bytes."""
_TOKEN = re.compile(rb"%b|%b|." % (_REF, _INT), re.DOTALL)
_SHORT_TEXT, _MEMOIZE, _LONG, _INTEGERS = 0x8C, 0x94, 0x8A, b"KMJ\x8a"
_Target = str | tuple[str]
"""Target of a memo reference, which is a string, or a 1-tuple with the name of a class."""
_SIZE = ("Size",)
_CHUNK_HEAD = (("ChunkStorageMetadata",), "offsets", _SIZE)
_CHUNK_MIDDLE = ("sizes", _SIZE)
_ITEM_TARGETS: tuple[tuple[_Target, ...], ...] = (
    *((("MetadataIndex",), "fqn"), ("index",), ("offset",)),
    *((("_StorageInfo",), "relative_path"), ("offset",), ("length",)),
)
_TENSOR_HEAD_TARGETS: list[_Target] = [
    ("TensorStorageMetadata",),
    "properties",
    ("TensorProperties",),
    "size",
]
MAX_RECENT_NAMES = 1 << 14
"""Maximum number of cached tensor names by memo index.

Items of further chunks of a tensor refer to its name.
"""
MAX_CHUNKS = 64
"""Maximum number of chunks in the list of a tensor that is scanned as a single entry."""


class ChunkRun(NamedTuple):
    """Offsets and sizes of consecutive ``ChunkStorageMetadata`` entries in a list."""

    offsets: Sequence[Vector]
    sizes: Sequence[Vector]


class ScannedTensor(NamedTuple):
    """A scanned ``TensorStorageMetadata``."""

    dtype: str
    requires_grad: bool
    shape: Vector
    chunks: ChunkRun


class PlaceRun(NamedTuple):
    """Consecutive ``(MetadataIndex, _StorageInfo)`` pairs, stored as one value of a dict."""

    names: Sequence[str]
    offsets: Sequence[Vector | None]
    files: Sequence[str]
    starts: Sequence[int]
    lengths: Sequence[int]


class _Memo(dict[int, object]):
    """The unpickler's memo, which recreates entries skipped by the scanner when they are used."""

    def __init__(self, recall: Callable[[int], object]) -> None:
        self._recall = recall

    def __missing__(self, number: int) -> object:
        return self._recall(number)


class Scanner:
    """Hook of the unpickler that scans many consecutive entries at once after a BUILD opcode.

    Attributes:
        memo: The unpickler's memo.
        taken: Number of memo indices used by scanned entries that are not in the memo.
        sizes: For each class of scanned objects, a function that counts the values in an object.
        entries: Number of scanned chunks and items.
    """

    sizes: ClassVar[Mapping[type, Callable[[Any], int]]] = {
        ChunkRun: lambda run: 2 * len(run.offsets),
        ScannedTensor: lambda tensor: 4 + 2 * len(tensor.chunks.offsets),
        PlaceRun: lambda run: 5 * len(run.names),
    }

    def __init__(self) -> None:
        self.memo: dict[int, object] = _Memo(self._recreate_memo_entry)
        self.taken = self.entries = 0
        # Compiling takes 3 ms, so it is not done at import time.
        self._match_tensor = re.compile(_TENSOR, re.DOTALL).match
        self._chunks, self._items = (
            re.compile(pattern + _OR_EMPTY, re.DOTALL).finditer
            for pattern in (_CHUNK, _INDEX + _INFO)
        )
        self._data = b""
        self._heads: dict[bytes, tuple[str, bool]] = {}
        self._known_bytes: dict[tuple[_Target, ...], set[bytes]] = {}
        self._usual_item: tuple[bytes, ...] = (b"",) * len(_ITEM_TARGETS)
        self._strings: dict[bytes, str] = {}
        self._recent_names: dict[int, str] = {}
        self._sizes: dict[bytes, Vector] = {}
        self._size_class: set[bytes] = set()
        self._runs: list[tuple[int, int, int, bool]] = []
        self._created_runs: list[object] = []
        self._recalled_entries: dict[int, dict[int, object]] = {}

    def __call__(
        self, data: bytes, pos: int, stack: list[object], outer: list[list[object]]
    ) -> int:
        """Scan the entries at *pos*, push them onto *stack*, and return the position after them.

        Returns *pos* if the bytes there do not have the usual opcodes.
        """
        if not outer or not outer[-1]:
            return pos
        self._data = data
        container_type = type(outer[-1][-1])
        while True:
            if container_type is list:
                boxes, next_pos = self._read_chunks(pos)
                if boxes:
                    stack.append(run := _make_chunk_run(boxes))
                    self._record_run(run, pos, 8 * len(boxes), len(self.memo))
            elif container_type is not dict or len(stack) % 2:
                return pos
            elif data[pos] == _SHORT_TEXT:
                next_pos = self._read_tensor(pos, stack)
            else:
                next_pos = self._read_items(pos, stack)
            if next_pos == pos:
                return pos
            pos = next_pos

    def _read_tensor(self, pos: int, stack: list[object]) -> int:
        data, memo = self._data, self.memo
        end = pos + 2 + data[pos + 1]
        match = self._match_tensor(data, end + 1)
        if match is None or data[end] != _MEMOIZE:
            return pos
        head, size_ref, dims, chunks, several = match.groups()
        facts = self._heads.get(head) or self._parse_tensor_head(head)
        if facts is None or not self._is_reference_to(chunks, ("chunks",)):
            return pos
        if dims is not None and not self._is_reference_to(size_ref, (_SIZE,)):
            return pos
        shape = memo[_parse_reference(size_ref)] if dims is None else _parse_size(dims)
        if type(shape) is not Size:
            return pos
        max_chunks, ending = (MAX_CHUNKS, b"eub") if several else (1, b"aub")
        boxes, after = self._read_chunks(match.end(), max_chunks)
        if not boxes or data[after : after + 3] != ending:
            return pos
        name = str(data[pos + 2 : end], "utf-8", "surrogatepass")
        memo_size = len(memo)
        first = memo_size + self.taken
        number = first + 6
        memo[first] = name
        if dims is not None:
            memo[first + 7] = shape
            number += 3
        for offsets, sizes in boxes:
            memo[number + 4], memo[number + 7] = _parse_size(offsets), _parse_size(sizes)
            number += 8
        self.taken += number - first - (len(memo) - memo_size)
        self.entries += len(boxes)
        stack += (name, ScannedTensor(*facts, parse_integers(shape), _make_chunk_run(boxes)))
        return after + 3

    def _read_chunks(
        self, pos: int, max_chunks: int | None = None
    ) -> tuple[list[tuple[bytes, bytes]], int]:
        """Return the encoded ``(offsets, sizes)`` of the chunks at *pos*, and the end position."""
        boxes: list[tuple[bytes, bytes]] = []
        usual: tuple[bytes, bytes] | None = None
        last: re.Match[bytes] | None = None
        for match in islice(self._chunks(self._data, pos), max_chunks):
            head, offsets, middle, sizes = match.groups()
            if usual != (head, middle):
                if head is None or not self._is_reference_to(head, _CHUNK_HEAD):
                    break
                if not self._is_reference_to(middle, _CHUNK_MIDDLE):
                    break
                usual = head, middle
            boxes.append((offsets, sizes))
            last = match
        return boxes, pos if last is None else last.end()

    def _read_items(self, pos: int, stack: list[object]) -> int:
        memo, strings, names, usual = self.memo, self._strings, self._recent_names, self._usual_item
        if len(names) > MAX_RECENT_NAMES:
            names.clear()
        rows: list[tuple[str, Vector | None, str, int, int]] = []
        memo_size = len(memo)
        first = number = memo_size + self.taken
        last: re.Match[bytes] | None = None
        for match in self._items(self._data, pos):
            (
                head,
                name_ref,
                index,
                offset,
                size,
                dims,
                info,
                file_ref,
                offset_name,
                start,
                length_name,
                length,
            ) = match.groups()
            if usual != (head, index, offset or usual[2], info, offset_name, length_name):
                usual = head, index, offset or usual[2], info, offset_name, length_name
                if head is None or not all(map(self._is_reference_to, usual, _ITEM_TARGETS)):
                    break
                self._usual_item = usual
            name = strings.get(name_ref) or self._resolve_string(name_ref)
            file = strings.get(file_ref) or self._resolve_string(file_ref)
            offsets = self._sizes.get(size) if dims is None else _parse_vector(dims)
            if offset is not None and (
                offsets is None or (dims is not None and size not in self._size_class)
            ):
                offsets = self._resolve_offsets(size, dims)
                if offsets is None:
                    break
            first_byte, nbytes = _parse_integer(start), _parse_integer(length)
            if name is None or file is None or min(first_byte, nbytes) < 0:
                break
            rows.append((name, offsets, file, first_byte, nbytes))
            number += 2
            if name_ref[0] == _SHORT_TEXT:
                names[number] = name
                number += 1
            number += 2 if dims is None else 5
            if file_ref[0] == _SHORT_TEXT:
                memo[number] = file
                number += 1
            last = match
        if last is None:
            return pos
        stack += ((pos,), run := PlaceRun(*zip(*rows, strict=True)))
        self._record_run(run, pos, number - first, memo_size)
        return last.end()

    def _record_run(self, run: ChunkRun | PlaceRun, pos: int, numbers: int, memo_size: int) -> None:
        """Record a run at *pos* that used *numbers* memo indices after *memo_size* entries."""
        count = len(run.offsets)
        self._created_runs.append(run)
        self._runs.append((memo_size + self.taken, pos, count, type(run) is ChunkRun))
        self.taken += numbers - (len(self.memo) - memo_size)
        self.entries += count

    def is_every_run_used_once(self, used_runs: Iterable[ChunkRun | PlaceRun]) -> bool:
        """Return whether *used_runs* has each scanned run exactly once, and the memo has none."""
        kinds = {*map(type, self.memo.values())}
        once = sorted(map(id, self._created_runs)) == sorted(map(id, used_runs))
        return once and not kinds & {ChunkRun, PlaceRun}

    def _recreate_memo_entry(self, number: int) -> object:
        """Recreate memo entry *number*, which the scanner skipped, by rescanning its run."""
        index = bisect_right(self._runs, number, key=itemgetter(0)) - 1
        if index not in self._recalled_entries:
            self._recalled_entries[index] = (
                dict(self._rescan_run(*self._runs[index])) if index >= 0 else {}
            )
        return self._recalled_entries[index][number]

    def _rescan_run(
        self, number: int, pos: int, count: int, is_chunk_run: bool
    ) -> Iterator[tuple[int, object]]:
        find_entries = self._chunks if is_chunk_run else self._items
        for match in islice(find_entries(self._data, pos), count):
            if is_chunk_run:
                yield number + 4, _parse_size(match[2])
                yield number + 7, _parse_size(match[4])
                number += 8
                continue
            number += 2
            if match[2][0] == _SHORT_TEXT:
                yield number, self._strings[match[2]]
                number += 1
            if match[6] is not None:
                yield number + 2, _parse_size(match[6])
                number += 3
            number += 2 + (match[8][0] == _SHORT_TEXT)

    def _resolve_string(self, raw: bytes) -> str | None:
        """Decode a string literal, or resolve a memo reference to a string.

        Returns None for any other encoding or value.
        """
        if raw[0] == _SHORT_TEXT:
            usual = raw[1] == len(raw) - 3  # matches the length in its opcode
            text = str(raw[2:-1], "utf-8", "surrogatepass") if usual else None
        else:
            value = self._resolve_reference(raw)
            text = value if type(value) is str else None
        if text is not None:
            self._strings[raw] = text
        return text

    def _resolve_offsets(self, size: bytes, dims: bytes | None) -> Vector | None:
        """Decode a ``torch.Size`` from *dims*, or resolve *size* as a memo reference if it is None.

        Returns None for any other encoding or value.
        """
        if dims is not None:
            if not self._is_reference_to(size, (_SIZE,)):
                return None
            self._size_class.add(size)
            return _parse_vector(dims)
        value = self._resolve_reference(size)
        if type(value) is not Size:
            return None
        offsets = self._sizes[size] = parse_integers(value)
        return offsets

    def _resolve_reference(self, raw: bytes) -> object:
        """Resolve a memo reference, or return None if the memo has no such entry yet."""
        number = _parse_reference(raw)
        try:
            return self._recent_names.get(number) or self.memo[number]
        except KeyError:
            return None

    def _is_reference_to(self, raw: bytes, names: tuple[_Target, ...]) -> bool:
        """Return whether the memo references in *raw* refer to the strings and classes *names*."""
        known_bytes = self._known_bytes.setdefault(names, set())
        if raw in known_bytes:
            return True
        targets = [
            _get_target_name(self.memo[_parse_reference(token)]) for token in _find_references(raw)
        ]
        if targets != list(names):
            return False
        known_bytes.add(raw)
        return True

    def _parse_tensor_head(self, raw: bytes) -> tuple[str, bool] | None:
        """Return the dtype and ``requires_grad`` of the tensors whose pickle starts with *raw*.

        Returns None if *raw* does not have the usual opcodes or the dtype is unknown.
        """
        values = [self.memo[_parse_reference(token)] for token in _find_references(raw)]
        names = [_get_target_name(value) for value in values]
        dtype = values[3]
        if (
            names[:3] + names[-1:] != _TENSOR_HEAD_TARGETS
            or type(dtype) is not Global
            or dtype.module != "torch"
        ):
            return None
        if dtype.name not in dtypes.BY_NAME:
            return None
        # The flag follows dtype and layout, and no token before it has its value.
        flags = [token for token in _TOKEN.findall(raw) if token in (b"\x88", b"\x89")]
        self._heads[raw] = facts = (dtype.name, flags[0] == b"\x88")
        return facts


def _find_references(raw: bytes) -> list[bytes]:
    return [token for token in _TOKEN.findall(raw) if token[0] in b"hj"]


def _get_target_name(value: object) -> _Target:
    if type(value) is Builder:
        value = value.source
    if type(value) is Global:
        return (value.name,)
    return value if type(value) is str else ""


def _parse_reference(ref: bytes) -> int:
    return int.from_bytes(ref[1:], "little")


@lru_cache(maxsize=1 << 15)
def _parse_integer(raw: bytes) -> int:
    if raw[0] == _LONG:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little")


@lru_cache(maxsize=1 << 15)
def _parse_vector(raw: bytes) -> Vector:
    values = tuple(
        [_parse_integer(token) for token in _TOKEN.findall(raw) if token[0] in _INTEGERS]
    )
    if min(values) < 0:
        raise ValueError("a negative size")
    return values


@lru_cache(maxsize=1 << 15)
def _parse_size(raw: bytes) -> Size:
    return Size(_parse_vector(raw))


def _make_chunk_run(boxes: Iterable[tuple[bytes, bytes]]) -> ChunkRun:
    offsets, sizes = zip(*boxes, strict=True)
    return ChunkRun(tuple(map(_parse_vector, offsets)), tuple(map(_parse_vector, sizes)))
