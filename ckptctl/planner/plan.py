"""The plan: every output file, record and copy of a run, complete before a byte moves.

The geometry is expressed once, in a form that every format and layout reduces to. A *logical
tensor* has named atomic axes (``h p r d``). A layout stores it as a tensor whose dimensions are
groups of those axes in some order (``(h r p) d``), cut into boxes that lie somewhere in files. A
:class:`Transfer` says: these operands hold the logical tensor in the source's order, those are to
hold it in the target's. Which bytes go where follows from the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptctl.catalog import Computed
from ckptctl.file_identity import FileIdentity

CrcOf = Callable[[int], int]
"""Returns the CRC-32 of a finished record, by its index in ``Plan.records``."""


class Operand(NamedTuple):
    """One stored box of a logical tensor; a plan may have a million of them.

    Dimensions are those of its :class:`Side`, an axis that is spread over several stored tensors
    (an expert index in the key) counting as a dimension of size 1 here.

    Attributes:
        file: Relative to the source's root, or to the output's; or a virtual file of the plan.
        offset: Byte position of the element at *start*.
        start: First index along each dimension.
        sizes: Elements along each dimension.
        strides: Bytes between neighbors along each dimension.
        nbytes: Length of the byte range that holds the box.
        crc32: CRC-32 of that range where the source records one.
        record: Targets only: index in ``Plan.records`` of the record that these bytes are part of.
        check: Sources only: index in ``Plan.checks`` of the range that these bytes are part of,
            where a CRC-32 is recorded of that alone.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    crc32: int | None = None
    record: int = -1
    check: int = -1

    @property
    def checked(self) -> bool:
        """Return whether a checksum is taken of what is read of these bytes."""
        return self.crc32 is not None or self.check >= 0


@dataclass(frozen=True, slots=True)
class Side:
    """How a logical tensor is stored.

    Attributes:
        dims: For each stored dimension the axes grouped in it, outermost first, as indices into
            ``Transfer.axes``. Every axis appears exactly once.
        operands: The boxes; together they tile the tensor exactly.
    """

    dims: tuple[tuple[int, ...], ...]
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One logical tensor on its way from source to target.

    Attributes:
        name: The target's key, for messages.
        source_name: The source's key, for messages.
        axes: Sizes of the atomic axes; ``()`` for a 0-d tensor.
        source: Where it comes from.
        target: Where it goes.
        source_dtype: torch's dtype name.
        target_dtype: The same unless the elements are cast.
    """

    name: str
    source_name: str
    axes: tuple[int, ...]
    source: Side
    target: Side
    source_dtype: str
    target_dtype: str


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
    root: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """A range of a source file with a checksum that no single operand has.

    Attributes:
        root: The directory that *file* is relative to.
        file: Source file.
        offset: First byte.
        nbytes: Length, at least 1.
        crc32: CRC-32 of the range.
        name: The tensor, for messages.
        gaps: What of it is read for the checksum alone, as ``(position, bytes)``: all that is no
            operand whose ``check`` this is.
    """

    root: str
    file: str
    offset: int
    nbytes: int
    crc32: int
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
        checks: Checksums of sources that no transfer takes alone on its way.
        opened: The path of the source, and its identity before anything of it was read.
    """

    source_root: str
    sources: Mapping[str, FileIdentity]
    target: str
    single_file: bool
    files: tuple[OutputFile, ...]
    records: tuple[Record, ...]
    transfers: tuple[Transfer, ...]
    raw_copies: tuple[RawCopy, ...]
    digest: str
    computed: Mapping[str, Computed] = field(default_factory=dict)
    inputs: Mapping[tuple[str, str], FileIdentity] = field(default_factory=dict)
    checks: tuple[CheckedRange, ...] = ()
    opened: tuple[str, FileIdentity] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole output."""
        return sum(file.size for file in self.files)

    @property
    def first_check(self) -> int:
        """Return the number of the first check, as transfers and raw copies are counted."""
        return len(self.transfers) + len(self.raw_copies)

    def counted(self, number: int, operand: int) -> tuple[int, int, int]:
        """Return ``(number, operand, position)`` of the checksum that a read counts for."""
        if number < self.first_check:
            found = self.transfers[number].source.operands[operand]
            if found.check >= 0:
                position = found.offset - self.checks[found.check].offset
                return self.first_check + found.check, 0, position
        return number, operand, 0

    def root_of_checked(self, number: int) -> str:
        """Return the directory of what is read for a checksum, as :meth:`recorded` counts."""
        if number >= self.first_check:
            return self.checks[number - self.first_check].root
        return self.source_root

    def recorded(self, number: int, operand: int) -> tuple[str, str, int, int | None]:
        """Return ``(tensor, file, bytes, CRC-32)`` of what is read for a checksum."""
        if number >= self.first_check:
            check = self.checks[number - self.first_check]
            return check.name, check.file, check.nbytes, check.crc32
        transfer = self.transfers[number]
        found = transfer.source.operands[operand]
        return transfer.source_name, found.file, found.nbytes, found.crc32
