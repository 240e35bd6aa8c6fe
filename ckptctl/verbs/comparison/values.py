"""Comparison of tensor elements and of non-tensor values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, TensorEntry, compute_row_major_strides
from ckptctl.errors import ChangedError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.plan import Plan
from ckptctl.save_load.loading.reading import PreparedRead, RequestedBox, fill_buffers
from ckptctl.save_load.loading.state_mapping import StateMapping
from ckptctl.storage.compare import Errors, Tolerance, compare_windows
from ckptctl.storage.computed import require_packages_for
from ckptctl.storage.pickles.inert import is_same_value
from ckptctl.storage.tensor_reader import split_into_boxes
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.verbs.comparison.diff_result import LeafDifference
from ckptctl.verbs.comparison.movement import ObserveWindow
from ckptctl.verbs.comparison.pairing import LeafPair, Pair

WINDOW_ELEMENTS = 1 << 20
"""Number of tensor elements that are compared at a time."""
BATCH_BYTES = 16 << 20
"""Maximum number of bytes that are read from each checkpoint at a time."""
MAX_WINDOWS = 256
"""Maximum number of windows that are read at a time."""
PlannedReading = tuple[Plan, list[bytearray]]
"""Read plan, and the buffers that it fills."""


class BufferPool:
    """Pool of reusable buffers, because allocating new memory pages is slower than reading."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def take_buffers(self, boxes: Sequence[RequestedBox]) -> list[bytearray]:
        """Return a buffer for each of *boxes*. Buffers of other sizes are freed first."""
        sizes = [requested.box.numel * dtypes.get_itemsize(requested.dtype) for requested in boxes]
        free, self._free = self._free, {}
        buffers = [free[size].pop() if free.get(size) else None for size in sizes]
        del free
        return [
            bytearray(size) if buffer is None else buffer
            for size, buffer in zip(sizes, buffers, strict=True)
        ]

    def return_buffers(self, buffers: Iterable[bytearray]) -> None:
        """Put *buffers* back into the pool."""
        for buffer in buffers:
            self._free.setdefault(len(buffer), []).append(buffer)


def has_equal_checksums(a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether both sides record equal checksums of the same boxes of a tensor."""
    checksums_a, checksums_b = _map_checksums(a), _map_checksums(b)
    return checksums_a is not None and a.dtype == b.dtype and checksums_a == checksums_b


def _map_checksums(entry: TensorEntry) -> dict[Box, int] | None:
    checksums: dict[Box, int] = {}
    for extent in entry.extents:
        dense = extent.strides in (None, compute_row_major_strides(extent.box.sizes))
        nbytes = extent.box.numel * dtypes.get_itemsize(entry.dtype)
        crc = extent.crc32
        if crc is None or not dense or extent.nbytes != nbytes:
            return None
        checksums[extent.box] = crc
    return checksums


@dataclass(slots=True)
class WindowComparer:
    """Comparer of the elements of two checkpoints, which reads a window of elements at a time.

    The byte offsets of all tensors must be known.

    Attributes:
        a: The first checkpoint, under its own names.
        b: The other checkpoint, mapped to the names of the first.
        jobs: Number of reading threads, or 0 to use this process's share of the CPU cores.
        bitwise: Whether to compare only bits, without torch.
        identities: Identity of each file when it was first read.
        bytes_read: Number of bytes read from the files of each of the two checkpoints.
        observe: Function that receives every window, or None.
    """

    a: StateMapping
    b: StateMapping
    jobs: int = 0
    bitwise: bool = False
    identities: dict[tuple[TreePath, str], FileIdentity] = field(default_factory=dict)
    bytes_read: tuple[int, int] = (0, 0)
    observe: ObserveWindow | None = None
    _buffers: tuple[BufferPool, BufferPool] = field(
        default_factory=lambda: (BufferPool(), BufferPool())
    )

    def compare_elements(
        self, pairs: Sequence[Pair], tolerance: Tolerance | None, advance: Advance | None
    ) -> dict[str, Errors]:
        """Compare the elements of *pairs*, which have the same shape on both sides.

        Returns:
            Errors of each tensor, by its name in A. Equal tensors are included.
        """
        errors = {pair.entry.name: Errors() for pair in pairs}
        if self.bitwise:
            for batch in _iterate_batches(pairs):
                for (plan, filled), buffers in zip(
                    self._plan_batch(batch), self._buffers, strict=True
                ):
                    require_packages_for(plan, "the comparison")
                    buffers.return_buffers(filled)
        for batch in _iterate_batches(pairs):
            (plan_a, a), (plan_b, b) = self._plan_batch(batch)
            read_a, read_b = self.bytes_read
            self.bytes_read = (
                read_a + self._fill_buffers(plan_a, a),
                read_b + self._fill_buffers(plan_b, b),
            )
            for (pair, box), x, y in zip(batch, a, b, strict=True):
                errors[pair.entry.name] += compare_windows(
                    x, y, pair.entry.dtype, pair.dtype, box, tolerance, bitwise=self.bitwise
                )
                if self.observe:
                    self.observe(pair.entry.name, x, y, pair.entry.dtype, pair.dtype)
                if advance:
                    advance(len(x))
            self._buffers[0].return_buffers(a)
            self._buffers[1].return_buffers(b)
            del a, b, x, y  # else unused buffers stay alive while the next windows are read
        return errors

    def _plan_batch(
        self, batch: Sequence[tuple[Pair, Box]]
    ) -> tuple[PlannedReading, PlannedReading]:
        boxes_a = [
            RequestedBox(p.entry.name, p.entry.dtype, p.entry.shape, box) for p, box in batch
        ]
        boxes_b = [RequestedBox(p.entry.name, p.dtype, p.entry.shape, box) for p, box in batch]
        first, second = self._buffers
        reading_a, reading_b = PreparedRead(self.a, {}), PreparedRead(self.b, {})
        return (reading_a.plan_boxes(boxes_a), first.take_buffers(boxes_a)), (
            reading_b.plan_boxes(boxes_b),
            second.take_buffers(boxes_b),
        )

    def _fill_buffers(self, plan: Plan, buffers: list[bytearray]) -> int:
        """Read the data of *plan* into *buffers*, and return the number of bytes read."""
        for file, identity in plan.sources.items():
            if self.identities.setdefault((plan.source_root, file), identity) != identity:
                raise ChangedError(plan.source_root, file)
        return fill_buffers(plan, buffers, self.jobs).bytes_read


def _iterate_batches(pairs: Sequence[Pair]) -> Iterator[list[tuple[Pair, Box]]]:
    batch: list[tuple[Pair, Box]] = []
    nbytes = 0
    for pair in pairs:
        itemsize = max(dtypes.get_itemsize(pair.entry.dtype), dtypes.get_itemsize(pair.dtype))
        for box in split_into_boxes(pair.entry.shape, WINDOW_ELEMENTS):
            batch.append((pair, box))
            nbytes += box.numel * itemsize
            if nbytes >= BATCH_BYTES or len(batch) >= MAX_WINDOWS:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


SHOWN_CHARS = 60


def compare_leaves(a: Catalog, pairs: Sequence[LeafPair]) -> tuple[LeafDifference, ...]:
    """Compare pairs of non-tensor values and return those that differ."""
    differences = []
    for pair in pairs:
        x, y = a.blobs[pair.name].value, pair.value
        if not is_same_value(x, y):
            differences.append(LeafDifference(pair.name, _shorten_value(x), _shorten_value(y)))
    return tuple(differences)


def _shorten_value(value: object) -> str:
    text = f"{value!r}"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
