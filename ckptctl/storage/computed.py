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
from typing import TYPE_CHECKING

from ckptctl import dtypes
from ckptctl.catalog import Catalog, Computed, made_of
from ckptctl.storage.arithmetic import import_torch, out_of_range
from ckptctl.storage.buffers import TileBuffers
from ckptctl.storage.byte_files import ByteSource, Piece
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.kinds import InputTensor, Output, kinds, last_of, needs_torch
from ckptctl.storage.outcome import EXACT, NONE, Outcome, Rounding
from ckptctl.storage.tree import TreePath

if TYPE_CHECKING:
    import torch

RECTANGLE = 1 << 20
"""Bytes computed at a time."""
CACHED = 8 << 20
"""Bytes of small inputs that each thread keeps for the next call."""


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


class OpenFiles:
    """The files that one thread reads, stored or computed, opened as they are asked for.

    Attributes:
        roots: Returns the files below a directory.
        bytes_read: Bytes that were read from stored files.
        depth: How many virtual files are being computed, each for the one before it.
    """

    def __init__(
        self, computed: Mapping[str, Computed], roots: Callable[[TreePath], SourceFiles]
    ) -> None:
        self._computed = computed
        self.roots = roots
        self.bytes_read = 0
        self.depth = 0
        self._virtual: dict[str, ComputedFile] = {}
        self._cache: OrderedDict[tuple[object, ...], memoryview] = OrderedDict()
        self._cached_bytes = 0
        self._buffers: dict[int, TileBuffers] = {}

    def source(self, files: SourceFiles, name: str) -> ByteSource:
        """Return *name*, a virtual file or one of *files*, which is read before the next one."""
        return self.computed(name) or StoredFile(self, files, name)

    def computed(self, name: str) -> ComputedFile | None:
        """Return the virtual file called *name*, or None if it is a stored one."""
        file = self._virtual.get(name)
        if file is None and name in self._computed:
            file = self._virtual[name] = ComputedFile(self, name, self._computed[name])
        return file

    def reader(self, root: TreePath) -> RootReader:
        """Return a reader of the files below *root*, virtual ones included."""
        return RootReader(self, self.roots(root))

    def cached(self, key: tuple[object, ...], read: Callable[[], memoryview]) -> memoryview:
        """Return the result of *read* for *key*, of an earlier call where it is small."""
        content = self._cache.pop(key, None)
        if content is None:
            content = read()
            self._cached_bytes += len(content)
        self._cache[key] = content
        while len(self._cache) > 1 and self._cached_bytes > CACHED:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1])
        return content

    @property
    def buffers(self) -> TileBuffers:
        """Return the buffers of what is being computed, which those it is made of do not touch."""
        buffers = self._buffers.get(self.depth)
        if buffers is None:
            buffers = self._buffers[self.depth] = TileBuffers()
        return buffers


class StoredFile(ByteSource):
    """A file that is read through :class:`SourceFiles`, which several threads share."""

    def __init__(self, opened: OpenFiles, files: SourceFiles, name: str) -> None:
        self._opened = opened
        self._files = files
        self._name = name

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        """See :meth:`ByteSource.read_into`."""
        self._opened.bytes_read += nbytes
        self._files.readv(self._name, views, offset)

    def end(self, stop: int) -> None:
        """See :meth:`ByteSource.end`."""
        self._files.end(self._name, stop)


class ComputedFile(ByteSource):
    """A virtual file."""

    together = True

    def __init__(self, opened: OpenFiles, name: str, computed: Computed) -> None:
        self.kind = kinds()[computed.kind]
        self._opened = opened
        self._computed = computed
        if needs_torch(computed):
            import_torch()
        self._inputs = tuple(
            InputTensor(opened, made_of, name, number)
            for number, made_of in enumerate(computed.inputs)
        )
        self._item = dtypes.itemsize(computed.dtype)
        self._width = last_of(computed.shape) * self._item or 1  # of an empty tensor

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:  # noqa: ARG002
        """See :meth:`ByteSource.read_into`; what became of the elements is not looked at."""
        for view in views:
            for _ in self._computing([(offset, len(view), 0)], view):
                pass
            offset += len(view)

    def gather(self, pieces: Iterable[Piece], buffer: memoryview) -> Outcome:
        """See :meth:`ByteSource.gather`."""
        lost, rounding = NONE, EXACT
        for output, off in self._computing(pieces, buffer):
            rounding += off
            if self.kind.overflows:
                lost += out_of_range(output.elements, partial(self._source_elements, output))
        return Outcome(lost, rounding)

    def best_step(self, offset: int, nbytes: int) -> int:
        """Return how many bytes are best read from *offset* on.

        They end with a row, or with rows that are best computed together; at most 2 * *nbytes*.
        """
        for stride in (self._width * self.kind.rows, self._width):
            end = max((offset + nbytes) // stride, offset // stride + 1) * stride
            if end - offset <= 2 * nbytes:
                return end - offset
        return nbytes

    def source_rows(self, rows: range) -> torch.Tensor | None:
        """See :meth:`InputTensor.source_rows`."""
        return self._inputs[0].source_rows(rows) if self.kind.keeps_infinite else None

    def _source_elements(self, output: Output) -> torch.Tensor | None:
        rows = self.source_rows(output.rows)
        return None if rows is None else rows[:, output.columns.start : output.columns.stop]

    def _computing(
        self, pieces: Iterable[Piece], buffer: memoryview
    ) -> Iterator[tuple[Output, Rounding]]:
        """Fill *buffer*, rectangle by rectangle, each with how far its elements are off."""
        together = self._width * self.kind.rows
        limit = max(RECTANGLE // together, 1) * together
        limit = limit if limit <= 2 * RECTANGLE else RECTANGLE
        for part in rectangles(pieces, self._width, limit):
            rows = range(part.row, part.row + part.rows)
            end = part.start + part.nbytes
            columns = range(part.start // self._item, end // self._item)
            views = [buffer[start : start + nbytes] for start, nbytes in part.places]
            size = part.rows * part.nbytes
            memory = views[0] if len(views) == 1 else self._opened.buffers.get("", size)[:size]
            output = Output(self._opened, self._computed, self._inputs, rows, columns, memory)
            self._opened.depth += 1
            try:
                rounding = self.kind.compute(output)
            finally:
                self._opened.depth -= 1
            yield output, rounding or EXACT
            if len(views) > 1:
                _scatter(memory, views)


class RootReader:
    """The files below one root and the virtual ones, by name."""

    def __init__(self, opened: OpenFiles, files: SourceFiles) -> None:
        self._opened = opened
        self._files = files

    @property
    def bytes_read(self) -> int:
        """Return the bytes that this thread read from files."""
        return self._opened.bytes_read

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the file *name* on."""
        source = self._opened.source(self._files, name)
        source.read_into(offset, views, sum(map(len, views)))


def rectangles(pieces: Iterable[Piece], width: int, limit: int = RECTANGLE) -> Iterator[Rectangle]:
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


def _scatter(data: memoryview, views: Sequence[memoryview]) -> None:
    start = 0
    for view in views:
        view[:] = data[start : start + len(view)]
        start += len(view)


class CatalogReader(threading.local, RootReader):
    """Reads in any thread: what computes has buffers, so each thread has its own."""

    def __init__(self, catalog: Catalog, roots: Callable[[TreePath], SourceFiles]) -> None:
        RootReader.__init__(self, OpenFiles(catalog.computed, roots), roots(catalog.root))


@contextmanager
def open_reader(catalog: Catalog) -> Iterator[CatalogReader]:
    """Open what reads the files of *catalog*, virtual ones included."""
    roots = {catalog.root} | {root for root, _ in made_of(catalog.computed)}
    with ExitStack() as stack:
        sources = {root: stack.enter_context(source_files(root)) for root in roots}
        yield CatalogReader(catalog, sources.__getitem__)
