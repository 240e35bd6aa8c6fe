"""The plan: every output file, record and copy of a run, complete before a byte moves.

A :class:`Transfer` says which elements of the source's stored tensors a tensor of the target
consists of, and where boxes of it are written. Which bytes go where follows from the two, and is
found while the tensor is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptctl.catalog import Computed, TensorEntry
from ckptctl.columns import files_of
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.strided import Strided
from ckptctl.tree import TreePath

CrcOf = Callable[[int], int]
"""Returns the CRC-32 of a finished record, by its index in ``Plan.records``."""


class TargetBox(NamedTuple):
    """A box of a tensor, and where its elements are written.

    Attributes:
        file: Relative to the output's root, or the name of memory.
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
    """A stored tensor of the target, on its way from the source.

    Attributes:
        name: The target's key, for messages.
        tensor: Its elements, and the dtype to which they are cast.
        targets: The boxes that are written; ranks may repeat some of them.
    """

    name: str
    tensor: Strided
    targets: tuple[TargetBox, ...]

    @property
    def casts(self) -> bool:
        """Return whether elements are cast."""
        return self.tensor.dtype != self.tensor.stored_dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes that are read for the boxes, each counted once."""
        boxes = {(target.start, target.sizes) for target in self.targets}
        return sum(math.prod(sizes) for _, sizes in boxes) * self.tensor.itemsize

    def files(self) -> set[str]:
        """Return the files that stored tensors lie in, virtual ones and memory included."""
        return {file for entry in self.stored_tensors() for file in files_of(entry.extents)}

    def stored_tensors(self) -> Iterator[TensorEntry]:
        """Yield the stored tensors that are read, some of them repeatedly."""
        return (part.of for part in self.tensor.parts)


@dataclass(frozen=True, slots=True)
class Record:
    """A byte range of an output file that holds one box of one tensor and has a checksum.

    Attributes:
        name: Fully qualified name of the tensor in the output.
        file: Output file, relative to the output's root.
        offset: First byte.
        nbytes: Length; 0 for an empty tensor.
    """

    name: str
    file: str
    offset: int
    nbytes: int


Frame = Callable[[CrcOf], Iterator[tuple[int, bytes]]]
"""Yields ``(offset, bytes)`` of an output file that are not tensor data: headers, zip directories.

Called once all records of the file are written; of a file without records, once those of all
files are.
"""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to be created at its full size and filled by position.

    Attributes:
        path: Relative to the output's root.
        size: Final size in bytes.
        frame: Yields everything in it that is not a record.
    """

    path: str
    size: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class RawCopy:
    """A byte range copied as it is: a side file, a DCP byte item.

    Attributes:
        source: File relative to the root that it comes from.
        offset: First byte in it.
        nbytes: How many bytes.
        target: Output file.
        target_offset: First byte there.
        root: The directory that *source* is relative to; None: the source checkpoint's.
    """

    source: str
    offset: int
    nbytes: int
    target: str
    target_offset: int = 0
    root: TreePath | None = None


class RecordedRange(NamedTuple):
    """A range of a source file whose CRC-32 is recorded.

    Attributes:
        file: Source file.
        offset: First byte.
        nbytes: Length, at least 1.
        crc32: CRC-32 of the range.
        name: The stored tensor that has all of it, or empty where several may have parts of it.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str = ""


class CheckedRange(NamedTuple):
    """A recorded range of which some bytes are read for the checksum alone.

    Attributes:
        root: The directory that its file is relative to.
        recorded: The range.
        name: A tensor in it, for messages.
        gaps: What is read for the checksum alone, as ``(position, bytes)``.
    """

    root: TreePath
    recorded: RecordedRange
    name: str
    gaps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the executor does, and nothing it has to decide.

    Attributes:
        source_root: Directory that source files are relative to.
        sources: The files that will be read, with their identity when the plan was made.
        target: Absolute path that is published.
        single_file: Whether *target* is one file (the only output file) or a directory of them.
        files: Output files.
        records: Checksummed byte ranges of the output files.
        transfers: Tensor copies.
        raw_copies: Byte ranges copied unchanged.
        digest: Hexadecimal SHA-256 of files, records, transfers, raw copies and checks; it says
            nothing of what the source files hold.
        computed: The virtual files that transfers read, and those that these are made of.
        inputs: By ``(root, file)`` what virtual files are made of under other roots, as it was when
            the plan was made.
        checked: Transfers, by number, and the stored tensors that they read for their recorded
            checksums on the way; no element is read twice for these.
        checks: Recorded ranges of which other bytes have to be read.
        opened: The path of the source, and its identity before anything of it was read.
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
    computed: Mapping[str, Computed] = field(default_factory=dict)
    inputs: Mapping[tuple[TreePath, str], FileIdentity] = field(default_factory=dict)
    checked: frozenset[tuple[int, str]] = frozenset()
    checks: tuple[CheckedRange, ...] = ()
    opened: tuple[TreePath, FileIdentity] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole output."""
        return sum(file.size for file in self.files)

    def checked_by(self, number: int) -> set[str]:
        """Return the stored tensors that a transfer, by its number, reads for their checksums."""
        parts = self.transfers[number].tensor.parts if self.checked else ()
        return {part.of.name for part in parts if (number, part.of.name) in self.checked}

    @property
    def first_check(self) -> int:
        """Return the number of the first check, as transfers and raw copies are counted."""
        return len(self.transfers) + len(self.raw_copies)

    def root_of(self, number: int) -> TreePath:
        """Return the directory of what a transfer or check reads, by its number."""
        if number >= self.first_check:
            return self.checks[number - self.first_check].root
        return self.source_root
