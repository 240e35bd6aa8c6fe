"""Reading virtual files: byte ranges and rows of tensors that are computed as they are asked for.

Whatever is asked for becomes rectangles of the file's elements, as large as they can be and of at
most a few megabytes, and a kind of :mod:`ckptctl.storage.kinds` computes each of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Catalog, Computed, is_computed, made_of
from ckptctl.storage.arithmetic import elements, import_torch, out_of_range
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.kinds import Inputs, given_to, kinds, last_of, needs_torch
from ckptctl.storage.out_of_range import NONE, OutOfRange
from ckptctl.storage.outcome import Outcome
from ckptctl.storage.rounding import EXACT, Rounding

if TYPE_CHECKING:
    import torch

RECTANGLE = 1 << 20
"""Bytes computed at a time."""
KEPT = 8 << 20
"""Bytes of small inputs that each thread keeps for the next call."""
Span = tuple[int, int, int]
"""Where bytes begin in a virtual file, how many they are, and where they go in a buffer."""


@dataclass(slots=True)
class Rectangle:
    """Equal parts of consecutive rows; all numbers but *row* and *rows* in bytes."""

    row: int
    rows: int
    start: int
    nbytes: int
    places: list[tuple[int, int]]

    def take(self, row: int, rows: int, start: int, nbytes: int, limit: int) -> bool:
        """Grow by other rows if they continue this rectangle; return whether they do."""
        if row != self.row + self.rows or start != self.start or nbytes != self.nbytes:
            return False
        if (self.rows + rows) * nbytes > limit:
            return False
        self.rows += rows
        return True

    def place(self, start: int, nbytes: int) -> None:
        """Add a place in the buffer for the next bytes."""
        last = self.places[-1] if self.places else None
        if last and last[0] + last[1] == start:
            self.places[-1] = (last[0], last[1] + nbytes)
        else:
            self.places.append((start, nbytes))


class _Made(NamedTuple):
    """A rectangle that was computed: its rows and columns, its elements, how far they are off."""

    rows: range
    columns: range
    out: memoryview
    rounding: Rounding


class ComputedFiles:
    """The virtual files of a plan or a catalog, for one thread.

    Attributes:
        bytes_read: Bytes that its readers read from real files.
    """

    def __init__(
        self, computed: Mapping[str, Computed], sources: Callable[[str], SourceFiles]
    ) -> None:
        self._computed = computed
        self.sources = sources
        self.bytes_read = 0
        self._inputs: dict[str, Inputs] = {}
        self._kept: OrderedDict[tuple[str, str], memoryview] = OrderedDict()
        self._held = 0
        self._rooms: dict[tuple[int, str], memoryview] = {}
        self._depth = 0

    def gather(self, name: str, pieces: Iterable[Span], buffer: memoryview) -> Outcome:
        """Read pieces of the file called *name*; quickest when neighbors follow each other.

        Returns what of them became infinite, NaN or saturated when it was computed, and how far
        what was quantized is off.
        """
        computed, inputs = self._computed[name], self._made_of(name)
        given = given_to(computed)
        lost, rounding = NONE, EXACT
        for found in self._computing(name, pieces, buffer):
            rounding += found.rounding
            if given is not None:
                before = partial(given, inputs, found.rows)
                lost += _lost(computed, found.out, found.columns, before)
        return Outcome(lost, rounding)

    def step(self, name: str, offset: int, nbytes: int) -> int:
        """Return how many bytes of the file called *name* are best asked for from *offset* on.

        They end with a row, or with rows that are best computed together; at most 2 * *nbytes*.
        """
        for stride in reversed(self._strides(name)):
            end = max((offset + nbytes) // stride, offset // stride + 1) * stride
            if end - offset <= 2 * nbytes:
                return end - offset
        return nbytes

    def _strides(self, name: str) -> tuple[int, int]:
        """Return the bytes of a row, and of rows that are best computed together."""
        computed = self._computed[name]
        width = last_of(computed.shape) * dtypes.itemsize(computed.dtype)
        width = width or 1  # of an empty tensor
        return width, width * kinds()[computed.kind].rows

    def given(self, name: str, rows: range) -> torch.Tensor | None:
        """Return the source's own elements in rows of the file called *name*; see ``Given``."""
        given = given_to(self._computed[name])
        return given(self._made_of(name), rows) if given else None

    def _made_of(self, name: str) -> Inputs:
        if name not in self._inputs:
            if needs_torch(self._computed[name]):
                import_torch()
            self._inputs[name] = Inputs(self, name, self._computed[name])
        return self._inputs[name]

    def _computing(self, name: str, pieces: Iterable[Span], buffer: memoryview) -> Iterator[_Made]:
        """Fill *buffer*, rectangle by rectangle."""
        computed, inputs = self._computed[name], self._made_of(name)
        item = dtypes.itemsize(computed.dtype)
        compute = kinds()[computed.kind].compute
        width, together = self._strides(name)
        limit = max(RECTANGLE // together, 1) * together
        for found in rectangles(pieces, width, limit if limit <= 2 * RECTANGLE else RECTANGLE):
            rows = range(found.row, found.row + found.rows)
            columns = range(found.start // item, (found.start + found.nbytes) // item)
            views = [buffer[start : start + nbytes] for start, nbytes in found.places]
            out = views[0] if len(views) == 1 else self.room("", found.rows * found.nbytes)
            self._depth += 1
            try:
                rounding = compute(inputs, computed, rows, columns, out)
            finally:
                self._depth -= 1
            yield _Made(rows, columns, out, rounding or EXACT)
            if len(views) > 1:
                _scatter(out, views)

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the virtual file *name* on."""
        for view in views:
            for _ in self._computing(name, [(offset, len(view), 0)], view):
                pass
            offset += len(view)

    def reader(self, root: str) -> ComputedReader:
        """Return a reader of the files below *root*, virtual ones included."""
        return ComputedReader(self.sources(root), self)

    def kept(self, key: tuple[str, str], read: Callable[[], memoryview]) -> memoryview:
        """Return the result of *read* for *key*, of an earlier call where it is small."""
        found = self._kept.pop(key, None)
        if found is None:
            found = read()
            self._held += len(found)
        self._kept[key] = found
        while len(self._kept) > 1 and self._held > KEPT:
            self._held -= len(self._kept.popitem(last=False)[1])
        return found

    def room(self, use: str, nbytes: int) -> memoryview:
        """Return memory that lasts until more is asked for the same use.

        What is computed may be made of what is computed: each has its own.
        """
        held = self._rooms.get((self._depth, use))
        if held is None or len(held) < nbytes:
            held = self._rooms[self._depth, use] = memoryview(bytearray(nbytes))
        return held[:nbytes]


class ComputedReader:
    """The files below one root and the virtual ones."""

    def __init__(self, files: SourceFiles, computed: ComputedFiles) -> None:
        self._files = files
        self._computed = computed

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the file *name* on."""
        if is_computed(name):
            self._computed.readv(name, views, offset)
            return
        self._files.readv(name, views, offset)
        self._computed.bytes_read += sum(map(len, views))


def rectangles(pieces: Iterable[Span], width: int, limit: int = RECTANGLE) -> Iterator[Rectangle]:
    """Yield the rectangles that cover *pieces*."""
    last: Rectangle | None = None
    for offset, nbytes, place in pieces:
        for row, rows, start, size in _parts(offset, nbytes, width, limit):
            if last is None or not last.take(row, rows, start, size, limit):
                if last is not None:
                    yield last
                last = Rectangle(row, rows, start, size, [])
            last.place(place, rows * size)
            place += rows * size
    if last is not None:
        yield last


def _parts(offset: int, nbytes: int, width: int, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(row, rows, start in a row, bytes of a row)`` for a range of bytes."""
    while nbytes:
        row, start = divmod(offset, width)
        rows, size = min(nbytes, limit) // width, width
        if start or not rows:
            rows, size = 1, min(width - start, nbytes, limit)
        yield row, rows, start, size
        offset += rows * size
        nbytes -= rows * size


def _lost(
    computed: Computed,
    out: memoryview,
    columns: range,
    given: Callable[[], torch.Tensor | None],
) -> OutOfRange:
    """Count what became infinite, NaN or saturated in a rectangle; *given* has its whole rows."""

    def before() -> torch.Tensor | None:
        found = given()
        return None if found is None else found[:, columns.start : columns.stop]

    return out_of_range(elements(out, computed.dtype, len(columns)), before)


def _scatter(data: memoryview, views: Sequence[memoryview]) -> None:
    start = 0
    for view in views:
        view[:] = data[start : start + len(view)]
        start += len(view)


class EachThread(threading.local):
    """Reads in any thread: what computes has buffers, so each thread has its own."""

    def __init__(self, catalog: Catalog, sources: Callable[[str], SourceFiles]) -> None:
        self._computed = ComputedFiles(catalog.computed, sources)
        self._reader = self._computed.reader(catalog.root)

    @property
    def bytes_read(self) -> int:
        """Return the bytes that this thread read from files."""
        return self._computed.bytes_read

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the file *name* on."""
        self._reader.readv(name, views, offset)


@contextmanager
def open_reader(catalog: Catalog) -> Iterator[EachThread]:
    """Open what reads the files of *catalog*, virtual ones included."""
    roots = {catalog.root} | {root for root, _ in made_of(catalog.computed)}
    with ExitStack() as stack:
        sources = {root: stack.enter_context(source_files(root)) for root in roots}
        yield EachThread(catalog, sources.__getitem__)
