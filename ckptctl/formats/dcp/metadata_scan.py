"""Read runs of entries of a ``.metadata`` pickle at once if they have torch's usual form.

A tensor with one chunk takes 112 opcodes, and 512 ranks have half a million such tensors. A tensor
of a thousand ranks has as many chunks, and the places of all chunks are a million entries. Apart
from the first entry of a file, all have the same opcodes with other numbers. A regular expression
matches one entry at a time. References to the memo are resolved once per byte string.

The unpickler continues as if it had read the opcodes, except that a run of entries is one object in
its list or dict, and that nothing can refer to the records inside an entry. A file with such
references, or that moves objects it has read (no pickler does), or with anything else unusual, is
read again opcode by opcode.
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
from ckptctl.formats.shared.indexes import integers
from ckptctl.storage.pickles.inert import Builder, Global, Size

_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J...[\0-\x7f]|\x8a\x04....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7})"
_TEXT = rb"\x8c.[^\x94]{1,255}\x94"
_DIMS = rb"(?:%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,8}t\x94)" % (_INT, _INT, _INT, _INT)
_STATE = rb"%b\)\x81\x94\}\x94\(" % _REF
_MADE = rb"\x85\x94R\x94"
_TENSOR = (
    rb"(%b%b%b\)\x81\x94\(%b%b[\x88\x89]%b[\x88\x89]t\x94b%b)(%b)(?:(%b)%b)?(%b\]\x94)(\()?"
    % (_STATE, _REF, _REF, _REF, _REF, _REF, _REF, _REF, _DIMS, _MADE, _REF)
)
_CHUNK = rb"(%b%b%b)(%b)%b(%b%b)(%b)%bub" % (
    *(_STATE, _REF, _REF, _DIMS, _MADE),
    *(_REF, _REF, _DIMS, _MADE),
)
_INDEX = rb"(%b%b)(%b|%b)(%b)(?:%b|N)(?:(%b)(%b)(?:(%b)%b)?)?ub" % (
    *(_STATE, _REF, _REF, _TEXT, _REF, _INT, _REF, _REF, _DIMS, _MADE),
)
_INFO = rb"(%b%b)(%b|%b)(%b)(%b)(%b)(%b)ub" % (
    *(_STATE, _REF, _REF, _TEXT),
    *(_REF, _INT, _REF, _INT),
)
_OR_NOTHING = rb"|"
"""Suffix of a pattern that lets it match anywhere, so that matches are adjacent."""
_TOKEN = re.compile(rb"%b|%b|." % (_REF, _INT), re.DOTALL)
_SHORT_TEXT, _MEMOIZE, _LONG, _INTEGERS = 0x8C, 0x94, 0x8A, b"KMJ\x8a"
_Meant = str | tuple[str]
"""Target of a reference, a string or the last name of a class in a tuple."""
_SIZE = ("Size",)
_CHUNK_HEAD = (("ChunkStorageMetadata",), "offsets", _SIZE)
_CHUNK_MIDDLE = ("sizes", _SIZE)
_ITEM: tuple[tuple[_Meant, ...], ...] = (
    *((("MetadataIndex",), "fqn"), ("index",), ("offset",)),
    *((("_StorageInfo",), "relative_path"), ("offset",), ("length",)),
)
_FIXED: list[_Meant] = [("TensorStorageMetadata",), "properties", ("TensorProperties",), "size"]
NAMES = 1 << 14
"""Number of recent names to keep by memo index; a rank with several chunks refers to them."""
MOST = 64
"""Maximum number of chunks of a tensor read at once; batches interrupt longer lists."""


class Chunks(NamedTuple):
    """A run of ``ChunkStorageMetadata`` in a list."""

    offsets: Sequence[Vector]
    sizes: Sequence[Vector]


class Scanned(NamedTuple):
    """A ``TensorStorageMetadata``."""

    dtype: str
    requires_grad: bool
    shape: Vector
    chunks: Chunks


class Places(NamedTuple):
    """A run of ``MetadataIndex`` and ``_StorageInfo`` pairs, stored as one value of a dict."""

    names: Sequence[str]
    offsets: Sequence[Vector | None]
    files: Sequence[str]
    starts: Sequence[int]
    lengths: Sequence[int]


class _Memo(dict[int, object]):
    """The unpickler's memo, which recreates entries skipped by runs on demand."""

    def __init__(self, recall: Callable[[int], object]) -> None:
        self._recall = recall

    def __missing__(self, number: int) -> object:
        return self._recall(number)


class Scanner:
    """Hook for the unpickler after each BUILD opcode that reads usual entries at once.

    Attributes:
        memo: The unpickler's memo.
        taken: Number of memo indices used by scanned entries that are not in the memo.
        sizes: Functions that count the values represented by an object, by class.
        entries: Number of chunks and places scanned.
    """

    sizes: ClassVar[Mapping[type, Callable[[Any], int]]] = {
        Chunks: lambda run: 2 * len(run.offsets),
        Scanned: lambda tensor: 4 + 2 * len(tensor.chunks.offsets),
        Places: lambda run: 5 * len(run.names),
    }

    def __init__(self) -> None:
        self.memo: dict[int, object] = _Memo(self._recalled)
        self.taken = self.entries = 0
        # Compiling takes 3 ms, so it is not done at import time.
        self._match_tensor = re.compile(_TENSOR, re.DOTALL).match
        self._chunks, self._items = (
            re.compile(pattern + _OR_NOTHING, re.DOTALL).finditer
            for pattern in (_CHUNK, _INDEX + _INFO)
        )
        self._data = b""
        self._heads: dict[bytes, tuple[str, bool]] = {}
        self._usual: dict[tuple[_Meant, ...], set[bytes]] = {}
        self._usual_item: tuple[bytes, ...] = (b"",) * len(_ITEM)
        self._strings: dict[bytes, str] = {}
        self._latest: dict[int, str] = {}
        self._sizes: dict[bytes, Vector] = {}
        self._size_class: set[bytes] = set()
        self._runs: list[tuple[int, int, int, bool]] = []
        self._made: list[object] = []
        self._named: dict[int, dict[int, object]] = {}

    def __call__(
        self, data: bytes, pos: int, stack: list[object], outer: list[list[object]]
    ) -> int:
        """Return the position after as many usual entries as follow, or *pos* if there are none."""
        if not outer or not outer[-1]:
            return pos
        self._data = data
        within = type(outer[-1][-1])
        while True:
            if within is list:
                boxes, after = self._read_chunks(pos)
                if boxes:
                    stack.append(run := _columns(boxes))
                    self._took(run, pos, 8 * len(boxes), len(self.memo))
            elif within is not dict or len(stack) % 2:
                return pos
            elif data[pos] == _SHORT_TEXT:
                after = self._take_tensor(pos, stack)
            else:
                after = self._take_items(pos, stack)
            if after == pos:
                return pos
            pos = after

    def _take_tensor(self, pos: int, stack: list[object]) -> int:
        data, memo = self._data, self.memo
        end = pos + 2 + data[pos + 1]
        found = self._match_tensor(data, end + 1)
        if found is None or data[end] != _MEMOIZE:
            return pos
        head, size_ref, dims, chunks, several = found.groups()
        facts = self._heads.get(head) or self._facts(head)
        if facts is None or not self._is(chunks, ("chunks",)):
            return pos
        if dims is not None and not self._is(size_ref, (_SIZE,)):
            return pos
        shape = memo[_number(size_ref)] if dims is None else _size(dims)
        if type(shape) is not Size:
            return pos
        most, ending = (MOST, b"eub") if several else (1, b"aub")
        boxes, at = self._read_chunks(found.end(), most)
        if not boxes or data[at : at + 3] != ending:
            return pos
        name = str(data[pos + 2 : end], "utf-8", "surrogatepass")
        held = len(memo)
        first = held + self.taken
        number = first + 6
        memo[first] = name
        if dims is not None:
            memo[first + 7] = shape
            number += 3
        for offsets, sizes in boxes:
            memo[number + 4], memo[number + 7] = _size(offsets), _size(sizes)
            number += 8
        self.taken += number - first - (len(memo) - held)
        self.entries += len(boxes)
        stack += (name, Scanned(*facts, integers(shape), _columns(boxes)))
        return at + 3

    def _read_chunks(
        self, pos: int, most: int | None = None
    ) -> tuple[list[tuple[bytes, bytes]], int]:
        """Return the raw offsets and sizes of chunks, and the position after them."""
        boxes: list[tuple[bytes, bytes]] = []
        usual: tuple[bytes, bytes] | None = None
        last: re.Match[bytes] | None = None
        for match in islice(self._chunks(self._data, pos), most):
            head, offsets, middle, sizes = match.groups()
            if usual != (head, middle):
                if head is None or not self._is(head, _CHUNK_HEAD):
                    break
                if not self._is(middle, _CHUNK_MIDDLE):
                    break
                usual = head, middle
            boxes.append((offsets, sizes))
            last = match
        return boxes, pos if last is None else last.end()

    def _take_items(self, pos: int, stack: list[object]) -> int:
        memo, strings, names, usual = self.memo, self._strings, self._latest, self._usual_item
        if len(names) > NAMES:
            names.clear()
        rows: list[tuple[str, Vector | None, str, int, int]] = []
        held = len(memo)
        first = number = held + self.taken
        last: re.Match[bytes] | None = None
        for match in self._items(self._data, pos):
            head, name_ref, index, offset, size, dims, info, file_ref, at, start, of, length = (
                match.groups()
            )
            if usual != (head, index, offset or usual[2], info, at, of):
                usual = head, index, offset or usual[2], info, at, of
                if head is None or not all(map(self._is, usual, _ITEM)):
                    break
                self._usual_item = usual
            name = strings.get(name_ref) or self._string(name_ref)
            file = strings.get(file_ref) or self._string(file_ref)
            offsets = self._sizes.get(size) if dims is None else _vector(dims)
            if offset is not None and (
                offsets is None or (dims is not None and size not in self._size_class)
            ):
                offsets = self._offsets(size, dims)
                if offsets is None:
                    break
            first_byte, nbytes = _integer(start), _integer(length)
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
        stack += ((pos,), run := Places(*zip(*rows, strict=True)))
        self._took(run, pos, number - first, held)
        return last.end()

    def _took(self, run: Chunks | Places, pos: int, numbers: int, held: int) -> None:
        """Record a run that used *numbers* memo indices after *held* existing entries."""
        count = len(run.offsets)
        self._made.append(run)
        self._runs.append((held + self.taken, pos, count, type(run) is Chunks))
        self.taken += numbers - (len(self.memo) - held)
        self.entries += count

    def all_in_place(self, used: Iterable[Chunks | Places]) -> bool:
        """Return whether each run is used exactly once, and in no other way."""
        kinds = {*map(type, self.memo.values())}
        once = sorted(map(id, self._made)) == sorted(map(id, used))
        return once and not kinds & {Chunks, Places}

    def _recalled(self, number: int) -> object:
        """Return the memo entry that a run would have created."""
        at = bisect_right(self._runs, number, key=itemgetter(0)) - 1
        if at not in self._named:
            self._named[at] = dict(self._read_again(*self._runs[at])) if at >= 0 else {}
        return self._named[at][number]

    def _read_again(
        self, number: int, pos: int, count: int, chunks: bool
    ) -> Iterator[tuple[int, object]]:
        read = self._chunks if chunks else self._items
        for match in islice(read(self._data, pos), count):
            if chunks:
                yield number + 4, _size(match[2])
                yield number + 7, _size(match[4])
                number += 8
                continue
            number += 2
            if match[2][0] == _SHORT_TEXT:
                yield number, self._strings[match[2]]
                number += 1
            if match[6] is not None:
                yield number + 2, _size(match[6])
                number += 3
            number += 2 + (match[8][0] == _SHORT_TEXT)

    def _string(self, raw: bytes) -> str | None:
        """Return a literal or referenced string, or None if it is unusual."""
        if raw[0] == _SHORT_TEXT:
            usual = raw[1] == len(raw) - 3  # matches the length in its opcode
            found = str(raw[2:-1], "utf-8", "surrogatepass") if usual else None
        else:
            value = self._referred(raw)
            found = value if type(value) is str else None
        if found is not None:
            self._strings[raw] = found
        return found

    def _offsets(self, size: bytes, dims: bytes | None) -> Vector | None:
        """Return a literal or referenced ``torch.Size``, or None if it is unusual."""
        if dims is not None:
            if not self._is(size, (_SIZE,)):
                return None
            self._size_class.add(size)
            return _vector(dims)
        value = self._referred(size)
        if type(value) is not Size:
            return None
        found = self._sizes[size] = integers(value)
        return found

    def _referred(self, raw: bytes) -> object:
        """Resolve a memo reference, or return None if it is undefined or in the current run."""
        number = _number(raw)
        try:
            return self._latest.get(number) or self.memo[number]
        except KeyError:
            return None

    def _is(self, raw: bytes, names: tuple[_Meant, ...]) -> bool:
        """Return whether the references in *raw* are the strings and classes in *names*."""
        usual = self._usual.setdefault(names, set())
        if raw in usual:
            return True
        found = [_name(self.memo[_number(token)]) for token in _refs(raw)]
        if found != list(names):
            return False
        usual.add(raw)
        return True

    def _facts(self, raw: bytes) -> tuple[str, bool] | None:
        """Return dtype and ``requires_grad`` of tensors that start with *raw*, or None."""
        values = [self.memo[_number(token)] for token in _refs(raw)]
        names = [_name(value) for value in values]
        dtype = values[3]
        if names[:3] + names[-1:] != _FIXED or type(dtype) is not Global or dtype.module != "torch":
            return None
        if dtype.name not in dtypes.BY_NAME:
            return None
        # The flag follows dtype and layout, and no token before it has its value.
        flags = [token for token in _TOKEN.findall(raw) if token in (b"\x88", b"\x89")]
        self._heads[raw] = facts = (dtype.name, flags[0] == b"\x88")
        return facts


def _refs(raw: bytes) -> list[bytes]:
    return [token for token in _TOKEN.findall(raw) if token[0] in b"hj"]


def _name(value: object) -> _Meant:
    if type(value) is Builder:
        value = value.source
    if type(value) is Global:
        return (value.name,)
    return value if type(value) is str else ""


def _number(ref: bytes) -> int:
    return int.from_bytes(ref[1:], "little")


@lru_cache(maxsize=1 << 15)
def _integer(raw: bytes) -> int:
    if raw[0] == _LONG:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little")


@lru_cache(maxsize=1 << 15)
def _vector(raw: bytes) -> Vector:
    found = tuple([_integer(token) for token in _TOKEN.findall(raw) if token[0] in _INTEGERS])
    if min(found) < 0:
        raise ValueError("a negative size")
    return found


@lru_cache(maxsize=1 << 15)
def _size(raw: bytes) -> Size:
    return Size(_vector(raw))


def _columns(boxes: Iterable[tuple[bytes, bytes]]) -> Chunks:
    offsets, sizes = zip(*boxes, strict=True)
    return Chunks(tuple(map(_vector, offsets)), tuple(map(_vector, sizes)))
