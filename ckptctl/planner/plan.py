"""Plans, which list every output file, record and copy before the first byte is written.

A :class:`Transfer` describes the elements of stored tensors that form a tensor of the target, and
the boxes of it that are written. Byte ranges follow from the two and are computed while the tensor
is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptctl.catalog import ComputedTensor, TensorEntry
from ckptctl.columns import get_extent_files
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.strided import StridedTensor
from ckptctl.tree import TreePath

CrcLookup = Callable[[int], int]
"""Function that returns the CRC-32 of a finished record, by its index in ``Plan.records``."""


class TargetBox(NamedTuple):
    """A box of a tensor, and the position at which its elements are written.

    Attributes:
        file: Path relative to the output's root, or the name of a memory buffer.
        offset: Byte position of the first element.
        start: First index along each dimension.
        sizes: Elements along each dimension.
        strides: Bytes between neighbors along each dimension.
        record: Index in ``Plan.records`` of the record that these bytes are part of.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    record: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The copy of one stored tensor of the target.

    Attributes:
        name: The target's key, for messages.
        tensor: The elements of the target, and the dtype to which they are cast.
        targets: The boxes that are written. The same box may have several targets, one per rank.
    """

    name: str
    tensor: StridedTensor
    targets: tuple[TargetBox, ...]

    @property
    def is_cast(self) -> bool:
        """Whether elements are cast."""
        return self.tensor.dtype != self.tensor.stored_dtype

    @property
    def nbytes(self) -> int:
        """Bytes to read for the boxes, each counted once."""
        boxes = {(target.start, target.sizes) for target in self.targets}
        return sum(math.prod(sizes) for _, sizes in boxes) * self.tensor.itemsize

    def list_files(self) -> set[str]:
        """List the files of the stored tensors, including virtual files and memory."""
        return {
            file
            for entry in self.iterate_stored_tensors()
            for file in get_extent_files(entry.extents)
        }

    def iterate_stored_tensors(self) -> Iterator[TensorEntry]:
        """Yield the stored tensors to read, possibly with repetitions."""
        return (part.entry for part in self.tensor.parts)


@dataclass(frozen=True, slots=True)
class Record:
    """A byte range of an output file with one box of one tensor and a checksum.

    Attributes:
        name: Fully qualified name of the tensor in the output.
        file: Output file, relative to the output's root.
        offset: First byte.
        nbytes: Length in bytes, 0 for an empty tensor.
    """

    name: str
    file: str
    offset: int
    nbytes: int


Frame = Callable[[CrcLookup], Iterator[tuple[int, bytes]]]
"""Function that yields the ``(offset, bytes)`` of an output file that are not tensor data.

Examples are headers and zip directories. The function is called after all records of the file are
written. For a file without records, it is called after the records of all files are written.
"""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """An output file, which is created at its full size and filled by position.

    Attributes:
        path: Path relative to the output's root.
        size: Final size in bytes.
        frame: Function that yields all bytes of the file outside records.
    """

    path: str
    size: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class RawCopy:
    """A byte range that is copied unchanged, such as a sidecar file or a DCP byte item.

    Attributes:
        source: Source file, relative to *root*.
        offset: First byte in it.
        nbytes: Number of bytes.
        target: Output file.
        target_offset: First byte in the output file.
        root: The directory that *source* is relative to, or None for the source checkpoint.
    """

    source: str
    offset: int
    nbytes: int
    target: str
    target_offset: int = 0
    root: TreePath | None = None


class RecordedRange(NamedTuple):
    """A range of a source file with a recorded CRC-32.

    Attributes:
        file: Source file.
        offset: First byte.
        nbytes: Length, at least 1.
        crc32: CRC-32 of the range.
        name: The stored tensor that contains all of it, or empty if several tensors may share it.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str = ""


class CheckedRange(NamedTuple):
    """A recorded range that needs reads of additional bytes for its checksum.

    Attributes:
        root: The directory that the range's file is relative to.
        recorded: The range.
        name: A tensor in the range, for messages.
        gaps: The ranges that are read only for the checksum, as ``(position, bytes)``.
    """

    root: TreePath
    recorded: RecordedRange
    name: str
    gaps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All operations of an executor, which makes no decisions of its own.

    Attributes:
        source_root: Directory that source files are relative to.
        sources: The source files, with their identity at the time of planning.
        target: Absolute path of the published output.
        single_file: Whether *target* is one file (the only output file) or a directory of them.
        files: Output files.
        records: Checksummed byte ranges of the output files.
        transfers: Tensor copies.
        raw_copies: Byte ranges copied unchanged.
        digest: Hexadecimal SHA-256 of files, records, transfers, raw copies and checks, but not of
            the contents of source files.
        computed: The virtual files that transfers read, and the virtual files that they depend on.
        inputs: Files under other roots that virtual files depend on, by ``(root, file)``, with
            their identity at the time of planning.
        checked: Pairs of a transfer, by number, and a stored tensor whose recorded checksums it
            verifies inline, without reading elements twice.
        checks: Recorded ranges of which additional bytes must be read.
        opened: The path of the source, and its identity before the first read.
    """

    source_root: TreePath
    sources: Mapping[str, FileIdentity]
    target: TreePath
    single_file: bool
    files: tuple[OutputFile, ...]
    records: tuple[Record, ...]
    transfers: tuple[Transfer, ...]
    raw_copies: tuple[RawCopy, ...]
    digest: str
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    inputs: Mapping[tuple[TreePath, str], FileIdentity] = field(default_factory=dict)
    checked: frozenset[tuple[int, str]] = frozenset()
    checks: tuple[CheckedRange, ...] = ()
    opened: tuple[TreePath, FileIdentity] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the complete output."""
        return sum(file.size for file in self.files)

    def get_checked_tensors(self, number: int) -> set[str]:
        """Return the names of the stored tensors whose checksums transfer *number* verifies."""
        parts = self.transfers[number].tensor.parts if self.checked else ()
        return {part.entry.name for part in parts if (number, part.entry.name) in self.checked}

    @property
    def first_check_number(self) -> int:
        """Number of the first check, counted after transfers and raw copies."""
        return len(self.transfers) + len(self.raw_copies)

    def get_root(self, number: int) -> TreePath:
        """Return the root of the files that transfer or check *number* reads."""
        if number >= self.first_check_number:
            return self.checks[number - self.first_check_number].root
        return self.source_root
