"""Plans, which list all output files, records and copies before anything is written.

A :class:`Transfer` describes a target tensor as elements of stored tensors, and lists the boxes of
the target tensor to write. The byte ranges to copy are derived from this description while the
tensor is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.catalog import ComputedTensor, TensorEntry
from ckptctl.columns import get_extent_files
from ckptctl.file_identity import FileIdentity
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.planner.strided import StridedTensor

CrcLookup = Callable[[int], int]
"""Function that returns the CRC-32 of a finished record, by its index in ``Plan.records``."""


class TargetBox(NamedTuple):
    """A box of a target tensor, and the byte positions to which its elements are written.

    Attributes:
        file: Path relative to the output's root, or the name of a memory buffer.
        offset: Byte position of the first element.
        start: First index of the box along each dimension.
        sizes: Size of the box along each dimension, in elements.
        strides: Distance between adjacent elements along each dimension, in bytes.
        record: Index in ``Plan.records`` of the record that contains the box.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    record: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A target tensor to write, as elements of stored tensors.

    Attributes:
        name: Key of the target tensor, for messages.
        tensor: Elements of the target tensor, and the dtype to which they are cast.
        targets: Boxes to write. If several ranks store the same box, it has one target per rank.
    """

    name: str
    tensor: StridedTensor
    targets: tuple[TargetBox, ...]

    @property
    def is_cast(self) -> bool:
        """Whether elements are cast to another dtype than the stored dtype."""
        return self.tensor.dtype != self.tensor.stored_dtype

    @property
    def nbytes(self) -> int:
        """Bytes to read for all boxes, where a box with several targets counts once."""
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
    """A byte range of an output file that contains one box of a tensor and has a checksum.

    Attributes:
        name: Fully qualified name of the tensor in the output.
        file: Output file, relative to the output's root.
        offset: Offset of the first byte in the file.
        nbytes: Length in bytes, or 0 for an empty tensor.
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
        offset: Offset of the first byte in the source file.
        nbytes: Number of bytes to copy.
        target: Output file, relative to the root of the output.
        target_offset: Offset of the first byte in the output file.
        root: The directory that *source* is relative to, or None for the source checkpoint.
    """

    source: str
    offset: int
    nbytes: int
    target: str
    target_offset: int = 0
    root: TreePath | None = None


class RecordedRange(NamedTuple):
    """A byte range of a source file for which the checkpoint records a CRC-32.

    Attributes:
        file: Source file.
        offset: Offset of the first byte in the file.
        nbytes: Length in bytes, at least 1.
        crc32: Recorded CRC-32 of the range.
        name: Stored tensor to which the range belongs, or empty if several tensors may share it.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str = ""


class CheckedRange(NamedTuple):
    """A recorded range with bytes that must be read only to verify its checksum.

    Attributes:
        root: The directory that the range's file is relative to.
        recorded: The range, with its recorded checksum.
        name: Name of a tensor in the range, for messages.
        gaps: Byte ranges that are read only for the checksum, as ``(position, bytes)``.
    """

    root: TreePath
    recorded: RecordedRange
    name: str
    gaps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Complete description of the copies that an executor performs.

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
        """Total size of all output files in bytes."""
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
        """Return the root directory of the source files that operation *number* reads."""
        if number >= self.first_check_number:
            return self.checks[number - self.first_check_number].root
        return self.source_root
