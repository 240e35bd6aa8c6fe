"""Reading virtual files: byte ranges and rows of tensors that are computed as they are asked for.

Whatever is asked for becomes rectangles of the file's elements, as large as they can be and of at
most a few megabytes, and a module of :mod:`ckptctl.storage.kinds` computes each of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Computed, TensorEntry, is_computed, made_of
from ckptctl.planner.runs import product_boxes
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.compare import read_box
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.kinds import kinds

if TYPE_CHECKING:
    import torch

RECTANGLE = 1 << 20
KEPT = 32 << 20
Piece = tuple[int, memoryview]
"""Where bytes begin in a virtual file, and the room for them."""


class Rectangle(NamedTuple):
    """Equal parts of consecutive rows; all numbers but *row* and *rows* in bytes.

    Attributes:
        row: The first row.
        rows: How many.
        start: Where the part of each row begins.
        nbytes: Its length.
        views: Room for all of them, one after the other.
    """

    row: int
    rows: int
    start: int
    nbytes: int
    views: list[memoryview]


class ComputedFiles:
    """The virtual files of a plan or a catalog, for one thread.

    Args:
        computed: By name; one may be made of another.
        sources: Returns the files below a root.
    """

    def __init__(
        self, computed: Mapping[str, Computed], sources: Callable[[str], SourceFiles]
    ) -> None:
        self._computed = computed
        self._sources = sources
        self._inputs: dict[str, Inputs] = {}
        self._kept: OrderedDict[tuple[str, str], memoryview] = OrderedDict()
        self._scratch = memoryview(bytearray())

    def gather(self, name: str, pieces: Iterable[Piece]) -> None:
        """Fill pieces of the file called *name*; quickest when neighbours follow each other.

        Raises:
            DamagedError: A file that it is made of is too short.
            StorageError: A read failed.
        """
        computed = self._computed[name]
        item = dtypes.itemsize(computed.dtype)
        inputs = self._inputs.setdefault(name, Inputs(self, name, computed))
        compute = kinds()[computed.kind].compute
        for found in rectangles(pieces, width(computed) * item):
            rows = range(found.row, found.row + found.rows)
            columns = range(found.start // item, (found.start + found.nbytes) // item)
            whole = len(found.views) == 1
            out = found.views[0] if whole else self._room(found.rows * found.nbytes)
            compute(inputs, computed, rows, columns, out)
            if not whole:
                _scatter(out, found.views)

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the virtual file *name* on."""
        pieces: list[Piece] = []
        for view in views:
            pieces.append((offset, view))
            offset += len(view)
        self.gather(name, pieces)

    def reader(self, root: str) -> Reader:
        """Return what reads the files below *root*, virtual ones included."""
        return Reader(self._sources(root), self)

    def kept(self, key: tuple[str, str], read: Callable[[], memoryview]) -> memoryview:
        """Return what *read* returned for *key*, now or, where it is small, earlier."""
        found = self._kept.pop(key, None)
        if found is None:
            found = read()
        self._kept[key] = found
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT:
            self._kept.popitem(last=False)
        return found

    def _room(self, nbytes: int) -> memoryview:
        if len(self._scratch) < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]


class Reader:
    """The files below one root and the virtual ones.

    Args:
        files: The former.
        computed: The latter.
    """

    def __init__(self, files: SourceFiles, computed: ComputedFiles) -> None:
        self._files = files
        self._computed = computed

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the file *name* on."""
        files = self._computed if is_computed(name) else self._files
        files.readv(name, views, offset)


class Inputs:
    """What one virtual file is made of.

    Args:
        files: Where it belongs.
        name: The virtual file.
        computed: Its definition.
    """

    def __init__(self, files: ComputedFiles, name: str, computed: Computed) -> None:
        self._files = files
        self._name = name
        self._computed = computed

    def entry(self, key: str) -> TensorEntry:
        """Return the tensor called *key* in the definition."""
        return self._computed.inputs[key].entry

    def tensor(self, key: str, rows: range) -> torch.Tensor:
        """Return consecutive rows of the input *key*, seen as a matrix of its last dimension.

        Returns:
            ``[len(rows), last dimension]``; a fresh copy.
        """
        entry = self.entry(key)
        return elements(memoryview(self._rows(key, rows)), entry.dtype, _last(entry.shape))

    def whole(self, key: str) -> torch.Tensor:
        """Return all of a small input as it is shaped; kept for the next call, so do not write.

        Nothing bounds its size: it is for inputs that are small by nature.
        """
        entry = self.entry(key)
        rows = range(math.prod(entry.shape[:-1]))
        read = lambda: memoryview(self._rows(key, rows))  # noqa: E731
        kept = self._files.kept((self._name, key), read)
        return elements(kept, entry.dtype, _last(entry.shape)).view(entry.shape)

    def _rows(self, key: str, rows: range) -> bytearray:
        found = self._computed.inputs[key]
        entry, reader = found.entry, self._files.reader(found.root)
        parts = [read_box(reader, entry, box) for box in _boxes(entry.shape, rows)]
        return parts[0] if len(parts) == 1 else bytearray(b"".join(parts))


def width(computed: Computed) -> int:
    """Return the elements of a row of a virtual file."""
    return _last(computed.shape)


def _last(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _boxes(shape: tuple[int, ...], rows: range) -> Iterator[Box]:
    """Yield the boxes that hold consecutive rows of a tensor of *shape*."""
    if not shape:
        yield Box((), ())
        return
    for offsets, sizes in product_boxes(rows.start, rows.stop, shape[:-1]):
        yield Box((*offsets, 0), (*sizes, shape[-1]))


def rectangles(pieces: Iterable[Piece], width: int, limit: int = RECTANGLE) -> Iterator[Rectangle]:
    """Yield what computes *pieces*.

    Args:
        pieces: Parts of a virtual file.
        width: Bytes of one of its rows.
        limit: Most bytes of a rectangle.
    """
    last: Rectangle | None = None
    for one in (part for piece in pieces for part in _parts(*piece, width, limit)):
        if last and _follows(last, one) and (last.rows + one.rows) * one.nbytes <= limit:
            last.views.extend(one.views)
            last = last._replace(rows=last.rows + one.rows)
            continue
        if last:
            yield last
        last = one
    if last:
        yield last


def _follows(last: Rectangle, one: Rectangle) -> bool:
    same = (last.start, last.nbytes) == (one.start, one.nbytes)
    return same and last.row + last.rows == one.row


def _parts(offset: int, view: memoryview, width: int, limit: int) -> Iterator[Rectangle]:
    while len(view):
        row, start = divmod(offset, width)
        rows, nbytes = min(len(view), limit) // width, width
        if start or not rows:
            rows, nbytes = 1, min(width - start, len(view), limit)
        total = rows * nbytes
        yield Rectangle(row, rows, start, nbytes, [view[:total]])
        offset, view = offset + total, view[total:]


def _scatter(data: memoryview, views: Sequence[memoryview]) -> None:
    start = 0
    for view in views:
        view[:] = data[start : start + len(view)]
        start += len(view)


@contextmanager
def open_reader(catalog: Catalog) -> Iterator[Reader]:
    """Open what reads the files of *catalog*, virtual ones included, for one thread."""
    roots = {catalog.root} | {root for root, _ in made_of(catalog.computed)}
    with ExitStack() as stack:
        sources = {root: stack.enter_context(SourceFiles(root)) for root in roots}
        yield ComputedFiles(catalog.computed, sources.__getitem__).reader(catalog.root)
