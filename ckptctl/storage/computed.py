"""Virtual files, which are tensors that are computed when their elements are read.

A :class:`Kind` computes the elements of one kind of virtual file. Each module of
:mod:`ckptctl.numerics.kinds` is found automatically and defines ``KINDS``, a dict of kinds by name.
Reads are split into rectangles of elements of at most a few megabytes. A kind fills an
:class:`OutputRectangle`, one such rectangle, from the :class:`InputTensor` objects of the file.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, ComputedTensor, ComputeInput, list_input_files
from ckptctl.installed import has_torch, require_package, require_torch
from ckptctl.planner.copying.copies import needs_permutation
from ckptctl.planner.plan import Plan
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.arithmetic import count_out_of_range, import_torch, view_elements
from ckptctl.storage.buffers import TileBuffers
from ckptctl.storage.byte_files import ByteSource, Piece
from ckptctl.storage.compute_device import DEVICE_RECTANGLE_BYTES, ComputeDevice
from ckptctl.storage.files import IOV_MAX, SourceFiles, source_files
from ckptctl.storage.outcome import NO_LOSS, NO_OUTCOME, NO_ROUNDING, Outcome, Rounding
from ckptctl.storage.tensor_reader import TensorReader
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
KINDS_PACKAGE = "ckptctl.numerics.kinds"
RECTANGLE_BYTES = 1 << 20
"""Maximum size in bytes of a rectangle of elements that is computed at a time."""
MAX_GAP_BYTES = 16 << 10
"""Maximum bytes between two ranges of a stored file that are read in one call."""
CACHE_BYTES = 8 << 20
"""Size of each thread's cache of small inputs, in bytes."""
SEEK_BYTES = 64 << 10
"""Number of bytes that take as long to read as a disk seek."""
MAX_ROWS_BYTES = 8 << 20
"""Maximum bytes of complete rows to read when only some columns are requested."""
TRANSPOSE_BYTES = 1 << 20
"""Number of bytes of a matrix to read and transpose at a time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Implementation of one kind of virtual file.

    Attributes:
        compute: Fills an output rectangle and, if it quantizes, returns the quantization error.
        overflows: Whether its arithmetic can exceed the range of a dtype.
        keeps_infinite: Whether infinite and NaN elements of the first input, which has the shape
            of the file, are passed through and do not count as out of range.
        needs_torch: Returns whether computing a given virtual file requires torch.
        rows_per_group: Number of rows in a group that is computed together.
        package: Package other than torch that *compute* requires, installed by an extra of the
            same name, or an empty string.
        host_only: Whether *compute* always runs on the CPU, because it moves bits or needs numpy.
        reads_in_turn: Whether *compute* is done with the elements of an input before it reads the
            next one, so that all inputs share one buffer.
    """

    compute: Callable[[OutputRectangle], Rounding | None]
    overflows: bool = False
    keeps_infinite: bool = False
    needs_torch: Callable[[ComputedTensor], bool] = lambda _: True
    rows_per_group: int = 1
    package: str = ""
    host_only: bool = False
    reads_in_turn: bool = False


@cache
def load_kinds() -> dict[str, Kind]:
    """Load all kinds of virtual files, by name."""
    package = importlib.import_module(KINDS_PACKAGE)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = (importlib.import_module(f"{KINDS_PACKAGE}.{name}") for name in names)
    return {name: kind for module in modules for name, kind in module.KINDS.items()}


def can_overflow(computed: ComputedTensor) -> bool:
    """Return whether the arithmetic of *computed* can exceed the range of a dtype."""
    return load_kinds()[computed.kind].overflows


def needs_torch(computed: ComputedTensor) -> bool:
    """Return whether computing *computed* requires torch."""
    return load_kinds()[computed.kind].needs_torch(computed)


def plan_needs_torch(plan: Plan) -> bool:
    """Return whether executing *plan* requires torch to compute, cast or transpose elements."""
    return needs_arithmetic(plan) or any(map(needs_permutation, plan.transfers))


def needs_arithmetic(plan: Plan) -> bool:
    """Return whether executing *plan* requires torch to compute or cast elements."""
    if any(map(needs_torch, plan.computed.values())):
        return True
    return any(transfer.is_cast for transfer in plan.transfers)


def require_packages_for(plan: Plan, action: str) -> None:
    """Raise if *plan* requires torch or another package that is not installed."""
    if not has_torch() and plan_needs_torch(plan):
        require_torch(action, "elements are cast, computed or transposed one by one")
    packages = {load_kinds()[computed.kind].package for computed in plan.computed.values()}
    for package in sorted(packages - {""}):
        require_package(package, action)


@dataclass(frozen=True, slots=True)
class OutputRectangle:
    """Rectangle of elements to compute of a virtual file.

    The file is treated as a matrix whose columns are the last dimension.

    Attributes:
        opened: Open files of this thread.
        computed: Definition of the virtual file.
        inputs: Tensors that the file is computed from.
        rows: Range of rows to compute.
        columns: Range of columns to compute.
        memory: Row-major buffer for the elements of the rectangle.
        device_elements: Elements of the rectangle on a device, which are copied to *memory* after
            the computation, or None on the CPU.
    """

    opened: OpenFiles
    computed: ComputedTensor
    inputs: Sequence[InputTensor]
    rows: range
    columns: range
    memory: memoryview
    device_elements: torch.Tensor | None = None

    @property
    def arguments(self) -> Any:
        """Arguments of the computation, whose type depends on the kind of virtual file."""
        return self.computed.arguments

    @property
    def elements(self) -> torch.Tensor:
        """Tensor of shape ``[rows, columns]`` that views the elements to fill."""
        if self.device_elements is not None:
            return self.device_elements
        return view_elements(self.memory, self.computed.dtype, len(self.columns))

    def list_groups(self, size: int) -> range:
        """Return the indices of the groups of *size* columns that overlap the rectangle."""
        return range(self.columns.start // size, -(-self.columns.stop // size))

    def write(self, values: torch.Tensor, first_column: int = 0) -> None:
        """Cast *values*, which start at *first_column*, and write the columns of the rectangle."""
        all_columns = values.reshape(len(self.rows), -1)
        self.elements.copy_(
            all_columns[:, self.columns.start - first_column : self.columns.stop - first_column]
        )

    def get_scratch(self, use: str, dtype: str, count: int) -> torch.Tensor:
        """Return an uninitialized tensor of *count* elements that is reused for the same *use*.

        It is valid until the next call with the same *use*.

        Allocating a new buffer for each rectangle would cost more than most of the computation.
        """
        device = self.opened.device
        if device is not None and self.device_elements is not None:
            return device.allocate((use, self.opened.nesting_depth), dtype, count)
        nbytes = count * dtypes.get_itemsize(dtype)
        buffer = self.opened.buffers.get_buffer(f"/{use}", nbytes)[:nbytes]
        return view_elements(buffer, dtype, max(count, 1)).view(-1)[:count]


class InputTensor:
    """Input tensor of a virtual file, read as a matrix whose columns are the last dimension.

    Attributes:
        entry: Catalog entry of the tensor.
        device: Device on which the file is computed and tensors are returned, or None for the CPU.
    """

    def __init__(
        self,
        opened: OpenFiles,
        compute_input: ComputeInput,
        file: str,
        number: int,
        device: ComputeDevice | None,
        buffer: str,
    ) -> None:
        self.entry = compute_input.entry
        self.device = device
        self._opened = opened
        self._root = compute_input.root
        self._key = file, number
        self._buffer = buffer

    @property
    def files(self) -> SourceFiles:
        """Files of the checkpoint that contains the tensor."""
        return self._opened.open_root(self._root)

    def read(self, rows: range, columns: range | None = None) -> torch.Tensor:
        """Read *columns* of *rows*, or complete rows if *columns* is None.

        The result is a view of a reused buffer, valid until the next call.
        """
        width, item = get_last_dim_size(self.entry.shape), dtypes.get_itemsize(self.entry.dtype)
        selected_columns = columns or range(width)
        extra_bytes, total_bytes = (width - len(selected_columns)) * item, len(rows) * width * item
        reads_rows = extra_bytes == 0 or (
            extra_bytes < SEEK_BYTES and total_bytes <= MAX_ROWS_BYTES
        )
        read_columns = selected_columns
        if reads_rows or len(self.entry.extents) > 1 or not self.files.local:
            read_columns = range(width)
        memory = self._opened.buffers.get_buffer(self._buffer, len(rows) * len(read_columns) * item)
        memory = memory[: len(rows) * len(read_columns) * item]
        self._reader.read_box_into(build_matrix_box(rows, read_columns), memory)
        matrix = view_elements(memory, self.entry.dtype, len(read_columns))
        if read_columns != selected_columns:
            matrix = matrix[:, selected_columns.start : selected_columns.stop]
        return self._upload(matrix)

    def read_all(self) -> torch.Tensor:
        """Read the complete tensor, with its original shape instead of as a matrix.

        The result is cached and must not be modified. The size is not limited, so use this method
        only for tensors that are always small.
        """
        entry = self.entry
        content = self._opened.get_or_read(self._key, lambda: memoryview(self._reader.read()))
        matrix = view_elements(content, entry.dtype, get_last_dim_size(entry.shape))
        return self._upload(matrix.view(entry.shape))

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device is None else self.device.upload(tensor)

    def read_transposed(
        self, columns: range, dtype: str, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Read columns of a matrix in batches of rows, convert each batch, and transpose it.

        Args:
            columns: Range of columns.
            dtype: Dtype of the result of *convert*.
            convert: Converts a batch of rows.

        Returns:
            Tensor of shape ``[columns, rows]``, which is cached and must not be modified.
        """
        import torch

        height, width = self.entry.shape
        step = max(TRANSPOSE_BYTES // (width * dtypes.get_itemsize(dtype)), 1)

        def read_content() -> memoryview:
            blocks = [
                # torch transposes in blocks if the target is dense. A single row is already
                # dense, but its buffer is reused by the next batch, so it has to be copied too.
                convert(self.read(range(start, min(start + step, height)), columns))
                .t()
                .clone(memory_format=torch.contiguous_format)
                for start in range(0, height, step)
            ]
            content = memoryview(bytearray(sum(block.nbytes for block in blocks)))
            target, start = view_elements(content, dtype, height), 0
            for block in blocks:
                target[:, start : start + block.shape[1]].copy_(block)
                start += block.shape[1]
            return content

        content = self._opened.get_or_read((*self._key, columns), read_content)
        return self._upload(view_elements(content, dtype, height))

    def read_source_rows(self, rows: range) -> torch.Tensor | None:
        """Read the stored elements that *rows* are computed from, or return None if all are finite.

        Infinities and NaN that the stored elements contain do not count as out of range.
        """
        source_file = self._opened.find_virtual_file(self.entry.extents[0].file)
        return (
            source_file.read_source_rows(rows)
            if source_file and source_file.kind.overflows
            else self.read(rows)
        )

    @cached_property
    def _reader(self) -> TensorReader:
        matrix = StridedTensor.from_entry(self.entry).as_matrix()
        return TensorReader(self._opened.create_reader(self._root), matrix)


class OpenFiles:
    """Stored and computed files that one thread reads, opened on demand.

    Attributes:
        open_root: Returns the source files of a directory.
        bytes_read: Bytes read from stored files.
        nesting_depth: Nesting depth of the virtual file being computed (its inputs may be virtual,
            too).
        gap_buffer: Buffer for the bytes between two requested ranges that are read in one call.
        device: Device that computes virtual files, or None for the CPU.
    """

    def __init__(
        self,
        computed: Mapping[str, ComputedTensor],
        open_root: Callable[[TreePath], SourceFiles],
        device: ComputeDevice | None = None,
    ) -> None:
        self._computed = computed
        self.device = device
        self.open_root = open_root
        self.bytes_read = 0
        self.nesting_depth = 0
        self._virtual: dict[str, ComputedFile] = {}
        self._cache: OrderedDict[tuple[object, ...], memoryview] = OrderedDict()
        self._cached_bytes = 0
        self._buffers: dict[int, TileBuffers] = {}
        self.gap_buffer = memoryview(bytearray(MAX_GAP_BYTES))

    def open_source(self, files: SourceFiles, name: str) -> ByteSource:
        """Open the virtual file *name*, or the file *name* of *files* if it is not virtual.

        The result is only valid until the next call.
        """
        return self.find_virtual_file(name) or StoredFile(self, files, name)

    def find_virtual_file(self, name: str) -> ComputedFile | None:
        """Return the virtual file called *name*, or None if it is a stored file."""
        file = self._virtual.get(name)
        if file is None and name in self._computed:
            file = self._virtual[name] = ComputedFile(self, name, self._computed[name])
        return file

    def create_reader(self, root: TreePath) -> RootReader:
        """Create a reader of the files below *root* and of virtual files."""
        return RootReader(self, self.open_root(root))

    def get_or_read(self, key: tuple[object, ...], read: Callable[[], memoryview]) -> memoryview:
        """Return the cached content for *key*, or call *read* and cache its result."""
        content = self._cache.pop(key, None)
        if content is None:
            content = read()
            self._cached_bytes += len(content)
        self._cache[key] = content
        while len(self._cache) > 1 and self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1])
        return content

    @property
    def buffers(self) -> TileBuffers:
        """Buffers for the current nesting depth, which virtual inputs do not overwrite."""
        buffers = self._buffers.get(self.nesting_depth)
        if buffers is None:
            buffers = self.device.create_buffers() if self.device else TileBuffers()
            self._buffers[self.nesting_depth] = buffers
        return buffers


class StoredFile(ByteSource):
    """File that is read through :class:`SourceFiles`, which threads share.

    Args:
        opened: Open files of this thread, which count the bytes read.
        files: Source files that contain the file.
        name: Name of the file relative to the root of *files*.
    """

    def __init__(self, opened: OpenFiles, files: SourceFiles, name: str) -> None:
        self._opened = opened
        self._files = files
        self.name = name

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        """See :meth:`ByteSource.read_into`."""
        self._opened.bytes_read += nbytes
        self._files.readv(self.name, views, offset)

    def read_pieces(self, pieces: Iterable[Piece], buffer: memoryview) -> Outcome:
        """See :meth:`ByteSource.read_pieces`. Pieces with small gaps are read in one call.

        At most twice as many bytes are read as *pieces* contain.

        This is a hot path: there may be thousands of pieces, each taking a few microseconds.
        """
        unused = self._opened.gap_buffer
        views, begin, end = list[memoryview](), 0, 0
        for offset, nbytes, start in pieces:
            if (
                not views
                or not 0 <= offset - end <= min(MAX_GAP_BYTES, nbytes)
                or len(views) > IOV_MAX - 2
            ):
                if views:
                    self.read_into(begin, views, end - begin)
                views, begin, end = [], offset, offset
            if offset > end:
                views.append(unused[: offset - end])
            views.append(buffer[start : start + nbytes])
            end = offset + nbytes
        if views:
            self.read_into(begin, views, end - begin)
        return NO_OUTCOME

    def limit_read_ahead(self, stop: int) -> None:
        """See :meth:`ByteSource.limit_read_ahead`."""
        self._files.limit_read_ahead(self.name, stop)


class ComputedFile(ByteSource):
    """Virtual file opened for reading, whose elements are computed by each read."""

    batches_pieces = True

    def __init__(self, opened: OpenFiles, name: str, computed: ComputedTensor) -> None:
        self.kind = load_kinds()[computed.kind]
        self._opened = opened
        self._computed = computed
        if needs_torch(computed):
            import_torch()
        self._device = None if self.kind.host_only else opened.device
        self._inputs = tuple(
            InputTensor(
                opened,
                compute_input,
                name,
                number,
                self._device,
                "0" if self.kind.reads_in_turn else str(number),
            )
            for number, compute_input in enumerate(computed.inputs)
        )
        self._itemsize = dtypes.get_itemsize(computed.dtype)
        self._row_bytes = (
            get_last_dim_size(computed.shape) * self._itemsize or 1
        )  # of an empty tensor

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:  # noqa: ARG002
        """See :meth:`ByteSource.read_into`. Out-of-range values and rounding errors are ignored."""
        for view in views:
            for _ in self._compute_rectangles([(offset, len(view), 0)], view):
                pass
            offset += len(view)

    def read_pieces(self, pieces: Iterable[Piece], buffer: memoryview) -> Outcome:
        """See :meth:`ByteSource.read_pieces`."""
        losses, rounding = NO_LOSS, NO_ROUNDING
        for output, error in self._compute_rectangles(pieces, buffer):
            rounding += error
            if self.kind.overflows:
                losses += count_out_of_range(
                    output.elements, partial(self._read_source_elements, output)
                )
        return Outcome(losses, rounding)

    def choose_read_size(self, offset: int, nbytes: int) -> int:
        """Return a number of bytes close to *nbytes* that is efficient to read at *offset*.

        The range is extended to the end of a group of rows or of one row, unless it would then have
        more than 2 * *nbytes* bytes.
        """
        for stride in (self._row_bytes * self.kind.rows_per_group, self._row_bytes):
            end = max((offset + nbytes) // stride, offset // stride + 1) * stride
            if end - offset <= 2 * nbytes:
                return end - offset
        return nbytes

    def read_source_rows(self, rows: range) -> torch.Tensor | None:
        """See :meth:`InputTensor.read_source_rows`."""
        return self._inputs[0].read_source_rows(rows) if self.kind.keeps_infinite else None

    def _read_source_elements(self, output: OutputRectangle) -> torch.Tensor | None:
        rows = self.read_source_rows(output.rows)
        return None if rows is None else rows[:, output.columns.start : output.columns.stop]

    def _compute_rectangles(
        self, pieces: Iterable[Piece], buffer: memoryview
    ) -> Iterator[tuple[OutputRectangle, Rounding]]:
        """Compute *pieces* into *buffer*, and yield each rectangle with its quantization error."""
        group_bytes = self._row_bytes * self.kind.rows_per_group
        max_bytes = DEVICE_RECTANGLE_BYTES if self._device else RECTANGLE_BYTES
        limit = max(max_bytes // group_bytes, 1) * group_bytes
        limit = limit if limit <= 2 * max_bytes else max_bytes
        for rectangle in split_rectangles(pieces, self._row_bytes, limit):
            rows = range(rectangle.row, rectangle.row + rectangle.rows)
            end = rectangle.start + rectangle.nbytes
            columns = range(rectangle.start // self._itemsize, end // self._itemsize)
            views = [buffer[start : start + nbytes] for start, nbytes in rectangle.destinations]
            size = rectangle.rows * rectangle.nbytes
            memory = (
                views[0] if len(views) == 1 else self._opened.buffers.get_buffer("", size)[:size]
            )
            output = OutputRectangle(
                self._opened,
                self._computed,
                self._inputs,
                rows,
                columns,
                memory,
                self._allocate_on_device(len(rows), len(columns)),
            )
            self._opened.nesting_depth += 1
            try:
                with self._device.activate() if self._device else nullcontext():
                    rounding = self.kind.compute(output)
            finally:
                self._opened.nesting_depth -= 1
            if output.device_elements is not None:
                target = view_elements(memory, self._computed.dtype, len(columns))
                target.copy_(output.device_elements)
            yield output, rounding or NO_ROUNDING
            start = 0
            for view in views if len(views) > 1 else ():
                view[:] = memory[start : start + len(view)]
                start += len(view)

    def _allocate_on_device(self, rows: int, columns: int) -> torch.Tensor | None:
        if self._device is None:
            return None
        key = ("elements", self._opened.nesting_depth)
        return self._device.allocate(key, self._computed.dtype, rows * columns).view(rows, columns)


@dataclass(slots=True)
class Rectangle:
    """Byte range that is read from each of several consecutive rows of a matrix.

    Attributes:
        row: Index of the first row.
        rows: Number of rows.
        start: Offset of the byte range in each row.
        nbytes: Size in bytes of the range in each row.
        destinations: Start and size in bytes of each range of the buffer to fill.
    """

    row: int
    rows: int
    start: int
    nbytes: int
    destinations: list[tuple[int, int]]

    def try_extend(self, row: int, rows: int, start: int, nbytes: int, limit: int) -> bool:
        """Append rows that continue the rectangle, and return whether they were appended.

        Rows are not appended if the rectangle would exceed *limit* bytes.
        """
        if row != self.row + self.rows or start != self.start or nbytes != self.nbytes:
            return False
        if (self.rows + rows) * nbytes > limit:
            return False
        self.rows += rows
        return True

    def add_destination(self, start: int, nbytes: int) -> None:
        """Add a range of the buffer for the next *nbytes* bytes, or extend the previous range."""
        previous = self.destinations[-1] if self.destinations else None
        if previous and previous[0] + previous[1] == start:
            self.destinations[-1] = (previous[0], previous[1] + nbytes)
        else:
            self.destinations.append((start, nbytes))


def split_rectangles(
    pieces: Iterable[Piece], row_bytes: int, max_bytes: int = RECTANGLE_BYTES
) -> Iterator[Rectangle]:
    """Split *pieces* of a matrix into rectangles of at most *max_bytes* bytes.

    A row of the matrix has *row_bytes* bytes.
    """
    current: Rectangle | None = None
    for offset, nbytes, destination in pieces:
        for row, rows, start, size in _split_range(offset, nbytes, row_bytes, max_bytes):
            if current is None or not current.try_extend(row, rows, start, size, max_bytes):
                if current is not None:
                    yield current
                current = Rectangle(row, rows, start, size, [])
            current.add_destination(destination, rows * size)
            destination += rows * size
    if current is not None:
        yield current


def _split_range(
    offset: int, nbytes: int, width: int, limit: int
) -> Iterator[tuple[int, int, int, int]]:
    """Split a byte range of a matrix with rows of *width* bytes into rectangles.

    Yields ``(first row, number of rows, start in row, bytes per row)``.
    """
    while nbytes:
        row, start = divmod(offset, width)
        rows, size = min(nbytes, limit) // width, width
        if start or not rows:
            rows, size = 1, min(width - start, nbytes, limit)
        yield row, rows, start, size
        offset += rows * size
        nbytes -= rows * size


class RootReader:
    """Reader of virtual files and of the stored files below one root directory."""

    def __init__(self, opened: OpenFiles, files: SourceFiles) -> None:
        self._opened = opened
        self._files = files

    @property
    def bytes_read(self) -> int:
        """Number of bytes that this thread has read from stored files."""
        return self._opened.bytes_read

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views* in order with the bytes of the file *name* from *offset*."""
        source = self._opened.open_source(self._files, name)
        source.read_into(offset, views, sum(map(len, views)))


class CatalogReader(threading.local, RootReader):
    """Reader of the files of a catalog, with separate buffers for each thread."""

    def __init__(self, catalog: Catalog, open_root: Callable[[TreePath], SourceFiles]) -> None:
        RootReader.__init__(self, OpenFiles(catalog.computed, open_root), open_root(catalog.root))


@contextmanager
def open_catalog_reader(catalog: Catalog) -> Iterator[CatalogReader]:
    """Open a reader of the stored and virtual files of *catalog*."""
    roots = {catalog.root} | {root for root, _ in list_input_files(catalog.computed)}
    with ExitStack() as stack:
        sources = {root: stack.enter_context(source_files(root)) for root in roots}
        yield CatalogReader(catalog, sources.__getitem__)


@dataclass(slots=True)
class _Result(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: T | None = None


class SharedResults(Generic[T]):
    """Cache shared by threads, with separate entries for each `SourceFiles` object.

    Each result is computed by one thread, while other threads wait for it.

    Args:
        exceeds_limit: Returns whether the cached results are too large, in which case the least
            recently used ones are evicted. A result is None while it is computed. If
            *exceeds_limit* is None, no result is evicted before its `SourceFiles` object is freed.
    """

    def __init__(self, exceeds_limit: Callable[[Sequence[T | None]], bool] | None = None) -> None:
        self._exceeds_limit = exceeds_limit
        self._lock = threading.Lock()
        self._by_files: WeakKeyDictionary[SourceFiles, OrderedDict[object, _Result[T]]] = (
            WeakKeyDictionary()
        )

    def get_or_compute(self, files: SourceFiles, key: object, compute: Callable[[], T]) -> T:
        """Return the cached result for *key* of *files*, or call *compute* and cache its result."""
        with self._lock:
            results = self._by_files.setdefault(files, OrderedDict())
            result = results.setdefault(key, _Result())
            results.move_to_end(key)
            while self._exceeds_limit and len(results) > 1:
                if not self._exceeds_limit(
                    [cached_result.value for cached_result in results.values()]
                ):
                    break
                results.popitem(last=False)
        with result.lock:
            if result.value is None:
                result.value = compute()
            return result.value


def get_last_dim_size(shape: tuple[int, ...]) -> int:
    """Return the size of the last dimension, or 1 for a scalar."""
    return shape[-1] if shape else 1


def build_matrix_box(rows: range, columns: range) -> Box:
    """Build the box of *rows* and *columns* of a matrix."""
    return Box((rows.start, columns.start), (len(rows), len(columns)))
