"""Read the entries of a ``.metadata`` pickle as wholes, where they look as torch writes them.

A tensor of one chunk is 112 opcodes, and 512 ranks have half a million such tensors. All but the
first of a file are the same opcodes with other numbers. A regular expression takes one of them at a
time; what refers to the memo is looked up once for each spelling. The state of the pickle machine
is the same afterwards, except that records inside an entry cannot be referred to: a file that does
so, or that has anything else unusual, is read again opcode by opcode.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Box
from ckptctl.storage.pickles.inert import Builder, Global, Size

_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J...[\0-\x7f]|\x8a\x04....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7})"
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
_INDEX = rb"(%b%b)(%b|\x8c.[^\x94]+\x94)(%b)(?:%b|N)(%b)(%b)(?:(%b)%b)?ub(%b%b)(%b|\x8c)" % (
    *(_STATE, _REF, _REF, _REF, _INT, _REF, _REF, _DIMS, _MADE),
    *(_STATE, _REF, _REF),
)
_RANGE = rb"(%b)(%b)(%b)(%b)ub" % (_REF, _INT, _REF, _INT)
_TOKEN = re.compile(rb"%b|%b|." % (_REF, _INT), re.DOTALL)
_TEXT, _MEMOIZE, _LONG, _INTEGERS = 0x8C, 0x94, 0x8A, b"KMJ\x8a"
_CHUNK_HEAD = ("ChunkStorageMetadata", "offsets", "Size")
_CHUNK_MIDDLE = ("sizes", "Size")


class Scanned(NamedTuple):
    """A ``TensorStorageMetadata``."""

    dtype: str
    requires_grad: bool
    shape: tuple[int, ...]
    boxes: list[Box]


class Scanner:
    """Called by the pickle machine after each BUILD; takes entries as long as they are usual.

    Attributes:
        stored: File, first byte and length of what was found, by tensor and offsets.
        files: The files that it lies in.
        target: The dict that it belongs to; None: nothing was found.
        repeated: Whether something was there twice.
    """

    def __init__(self) -> None:
        self.stored: dict[str, dict[tuple[int, ...], tuple[str, int, int]]] = {}
        self.files: set[str] = set()
        self.target: object = None
        self.repeated = False
        # Compiled here, not when the module is imported, which every command does: it takes 3 ms.
        self._match_tensor, self._match_chunk, self._match_index, self._match_range = (
            re.compile(pattern, re.DOTALL).match for pattern in (_TENSOR, _CHUNK, _INDEX, _RANGE)
        )
        self._heads: dict[bytes, tuple[str, bool]] = {}
        self._usual: dict[tuple[str, ...], set[bytes]] = {}

    def __call__(
        self,
        data: bytes,
        pos: int,
        stack: list[object],
        outer: list[list[object]],
        memo: dict[int, object],
    ) -> int:
        """Return the position after as many entries as there are; *pos* where there is none.

        What an entry remembers takes numbers in *memo*; its records get negative ones, which
        nothing can name.
        """
        if len(stack) % 2 or not outer or not outer[-1]:
            return pos
        while True:
            if data[pos] == _TEXT:
                after = self._tensor(data, pos, stack, memo)
            else:
                after = self._item(data, pos, outer[-1][-1], memo)
            if after == pos:
                return pos
            pos = after

    def _tensor(self, data: bytes, pos: int, stack: list[object], memo: dict[int, object]) -> int:
        end = pos + 2 + data[pos + 1]
        found = self._match_tensor(data, end + 1)
        if found is None or data[end] != _MEMOIZE:
            return pos
        head, size_ref, dims, chunks, several = found.groups()
        facts = self._heads.get(head) or self._facts(head, memo)
        if facts is None or not self._is(chunks, ("chunks",), memo):
            return pos
        if dims is not None and not self._is(size_ref, ("Size",), memo):
            return pos
        shape = memo[_number(size_ref)] if dims is None else _sizes(dims)
        if type(shape) is not Size:
            return pos
        boxes: list[tuple[Size, Size]] = []
        at = self._chunks(data, found.end(), several is not None, boxes, memo)
        if at < 0:
            return pos
        name = str(data[pos + 2 : end], "utf-8", "surrogatepass")
        made = 3 * (dims is not None)
        first, after = len(memo), len(memo) + 6 + made + 8 * len(boxes)
        memo[first] = name
        if made:
            memo[first + 7] = shape
        for place, (offsets, sizes) in zip(range(first + 10 + made, after, 8), boxes, strict=True):
            memo[place], memo[place + 3] = offsets, sizes
        memo.update(dict.fromkeys(range(-after, -len(memo))))
        stack += (name, Scanned(*facts, tuple(shape), [_box(*box) for box in boxes]))
        return at

    def _chunks(
        self,
        data: bytes,
        pos: int,
        several: bool,
        boxes: list[tuple[Size, Size]],
        memo: dict[int, object],
    ) -> int:
        """Put the chunks of a tensor into *boxes*; return where it ends, or -1."""
        while (found := self._match_chunk(data, pos)) is not None:
            head, offsets, middle, sizes = found.groups()
            if not self._is(head, _CHUNK_HEAD, memo) or not self._is(middle, _CHUNK_MIDDLE, memo):
                return -1
            boxes.append((_sizes(offsets), _sizes(sizes)))
            pos = found.end()
            if not several:
                return pos + 3 if data[pos : pos + 3] == b"aub" else -1
            if data[pos : pos + 3] == b"eub":
                return pos + 3
            if data[pos : pos + 2] == b"e(":
                pos += 2
        return -1

    def _item(self, data: bytes, pos: int, target: object, memo: dict[int, object]) -> int:
        found = self._match_index(data, pos)
        if found is None or not self._is_target(target):
            return pos
        head, name_ref, before_index, before_offset, size_ref, dims, info, file_ref = found.groups()
        at = found.end()
        if file_ref == b"\x8c":
            end = at + 1 + data[at]
            file: object = str(data[at + 1 : end], "utf-8", "surrogatepass")
            at = end + 1 if data[end] == _MEMOIZE else end
        else:
            end, file = -1, memo[_number(file_ref)]
        span = self._match_range(data, at)
        if span is None or end == at:
            return pos
        before, offset, between, length = span.groups()
        usual = (
            self._is(head, ("MetadataIndex", "fqn"), memo)
            and self._is(before_index, ("index",), memo)
            and self._is(before_offset, ("offset",), memo)
            and self._is(info, ("_StorageInfo", "relative_path"), memo)
            and self._is(before, ("offset",), memo)
            and self._is(between, ("length",), memo)
            and (dims is None or self._is(size_ref, ("Size",), memo))
        )
        new = name_ref[0] == _TEXT
        name = _text(name_ref) if new else memo[_number(name_ref)]
        offsets = memo[_number(size_ref)] if dims is None else _sizes(dims)
        start, nbytes = _integer(offset), _integer(length)
        if not usual or type(name) is not str or type(file) is not str or min(start, nbytes) < 0:
            return pos
        if type(offsets) is not Size:
            return pos
        first = len(memo)
        after = first + 4 + new + 3 * (dims is not None) + (end >= 0)
        if new:
            memo[first + 2] = name
        if dims is not None:
            memo[first + 4 + new] = offsets
        if end >= 0:
            memo[after - 1] = file
        self.files.add(file)
        memo.update(dict.fromkeys(range(-after, -len(memo))))
        known = self.stored.setdefault(name, {})
        self.repeated = self.repeated or offsets in known
        known[offsets] = (file, start, nbytes)
        self.target = target
        return span.end()

    def _is_target(self, target: object) -> bool:
        return type(target) is dict if self.target is None else target is self.target

    def _is(self, raw: bytes, names: tuple[str, ...], memo: dict[int, object]) -> bool:
        """Whether what *raw* refers to are the strings, or the classes, that *names* says."""
        usual = self._usual.setdefault(names, set())
        if raw in usual:
            return True
        found = [_name(value) for value in _referred(raw, memo)]
        if found != list(names):
            return False
        usual.add(raw)
        return True

    def _facts(self, raw: bytes, memo: dict[int, object]) -> tuple[str, bool] | None:
        """Return dtype and ``requires_grad`` of the tensors that begin with *raw*."""
        values = _referred(raw, memo)
        names = [_name(value) for value in values]
        fixed = ["TensorStorageMetadata", "properties", "TensorProperties", "size"]
        dtype = values[3]
        if names[:3] + names[-1:] != fixed or type(dtype) is not Global or dtype.module != "torch":
            return None
        if dtype.name not in dtypes.BY_NAME:
            return None
        # DTYPE, LAYOUT, then the flag: nothing before it has its value as a whole token.
        flags = [token for token in _TOKEN.findall(raw) if token in (b"\x88", b"\x89")]
        self._heads[raw] = facts = (dtype.name, flags[0] == b"\x88")
        return facts


def _referred(raw: bytes, memo: dict[int, object]) -> list[object]:
    return [memo[_number(token)] for token in _TOKEN.findall(raw) if token[0] in b"hj"]


def _name(value: object) -> str:
    """Return a string itself, and of a class its last name."""
    if type(value) is Builder:
        value = value.source
    if type(value) is Global:
        return value.name
    return value if type(value) is str else ""


def _text(raw: bytes) -> str | None:
    """Return a short string with its opcodes; None: its length is not what it says."""
    return str(raw[2:-1], "utf-8", "surrogatepass") if raw[1] == len(raw) - 3 else None


def _number(ref: bytes) -> int:
    return int.from_bytes(ref[1:], "little")


def _integer(raw: bytes) -> int:
    if raw[0] == _LONG:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little")


@lru_cache(maxsize=1 << 15)
def _sizes(raw: bytes) -> Size:
    found = Size(_integer(token) for token in _TOKEN.findall(raw) if token[0] in _INTEGERS)
    if min(found) < 0:
        raise ValueError("a negative size")
    return found


@lru_cache(maxsize=1 << 15)
def _box(offsets: Size, sizes: Size) -> Box:
    return Box(tuple(offsets), tuple(sizes))
