"""Ledger of a run in memory, and journal on disk from which a later run can resume.

The ledger counts bytes of files and combines checksums of records and sources. The journal is a
text file of lines ``<CRC-32 of the JSON, 8 hex digits> <JSON>``. The first line identifies the plan
and its tile sizes, which a resumed run uses again. Each later line lists units and their checksums,
and is appended after the data of these units has been synced. A truncated or damaged line ends the
journal; later lines are ignored.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from math import inf
from operator import le
from pathlib import Path
from typing import Any, NamedTuple

from ckptctl.catalog import MANIFEST
from ckptctl.errors import CkptError, DamagedError, format_option, wrap_os_errors
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.planner.plan import Plan, RecordedRange
from ckptctl.storage.crc import combine_crcs, crc32
from ckptctl.storage.execution.execution_options import MIN_THREAD_BYTES
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.files import source_files
from ckptctl.storage.outcome import NO_OUTCOME, Outcome, OutOfRange, Rounding
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.storage.stand_ins import starts_like_zip
from ckptctl.storage.unfinished import find_partial_output
from ckptctl.tree import TreePath

JOURNAL_VERSION = 5
OTHER_RUN_MESSAGE = "the interrupted run had other options, or the source has changed since"
OTHER_VERSION_MESSAGE = "another version of ckptctl began the interrupted run"
MIN_LIMITS = (MIN_THREAD_BYTES, MIN_THREAD_BYTES, MIN_THREAD_BYTES, 1 << 12)
"""Smallest tile sizes in bytes that a valid journal may contain."""
LOST_FIELD_COUNTS = (0, len(fields(OutOfRange)))
ROUNDING_FIELD_COUNTS = (0, len(fields(Rounding)))
Header = Mapping[str, object]
_Key = tuple[int, int]
CrcParts = list[tuple[int, int, int]]
"""``(offset, size, CRC-32)`` of byte ranges of a record, or of a source range with a checksum."""
SourceRange = tuple[TreePath, RecordedRange]
"""Source directory, and byte range with a recorded checksum of a file in this directory."""


class FinishedUnit(NamedTuple):
    """Checksums and statistics of a unit that a thread has finished.

    Attributes:
        transfer: Index of the transfer.
        number: Index of the tile in the transfer.
        written: CRC-32 of each write of the tile.
        read: CRC-32 of each checked read of the tile.
        lost: Fields of an :class:`~ckptctl.storage.outcome.OutOfRange`, or empty if no element is
            out of range.
        rounding: Fields of a :class:`~ckptctl.storage.outcome.Rounding`, or empty if no element
            was quantized.
    """

    transfer: int
    number: int
    written: Sequence[int]
    read: Sequence[int]
    lost: Sequence[int] = ()
    rounding: Sequence[float] = ()


class CommitResult(NamedTuple):
    """Follow-up work after units have been committed to the ledger.

    Attributes:
        finished_files: Output files, except those in memory, whose records are complete and whose
            frames (headers and trailers) have not been written.
        writeback_due: Output files with many bytes written since the last writeback.
        journal_due: Units to add to the journal, and the files that they wrote. Both are empty
            until *journal_every* bytes have been written since the last entry.
    """

    finished_files: list[str]
    writeback_due: list[str]
    journal_due: tuple[list[FinishedUnit], list[str]]


class LedgerEntries(NamedTuple):
    """Ledger entries of one process, for the process that finishes a shared plan.

    Attributes:
        record_crcs: CRC-32 of each record that one unit has written, by record index.
        parts: Byte ranges of records that several units write, by record index.
        sources: Byte ranges read so far of incompletely read source ranges with checksums.
        written: Bytes written to each output file.
        finished: Output files that this process has written completely.
        outcomes: Out-of-range counts and quantization errors, by transfer index.
        read: Bytes read from source files.
    """

    record_crcs: dict[int, int]
    parts: dict[int, CrcParts]
    sources: dict[SourceRange, CrcParts]
    written: dict[str, int]
    finished: list[str]
    outcomes: dict[int, Outcome]
    read: int = 0


class Ledger:
    """Thread-safe record of the bytes, checksums and statistics of finished units."""

    def __init__(self, plan: Plan, journal_every: int, sync_every: int) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._journal_every = journal_every
        self._sync_every = sync_every
        self._record_crcs: dict[int, int] = {}
        self._record_parts: dict[int, CrcParts] = {}
        self._source_parts: dict[SourceRange, CrcParts] = {}
        self._covered_bytes: Counter[SourceRange] = Counter()
        self._outcomes: dict[int, Outcome] = {}
        self._total_bytes: Counter[str] = Counter()
        for record in plan.records:
            self._total_bytes[record.file] += record.nbytes
        for raw in plan.raw_copies:
            self._total_bytes[raw.target] += raw.nbytes
        self._remaining_bytes = self._total_bytes.copy()
        self._files = {file.path for file in plan.files}
        self._unsynced_bytes: Counter[str] = Counter()
        self._pending: list[FinishedUnit] = []
        self._pending_files: set[str] = set()
        self._pending_bytes = 0
        self.written_bytes = 0
        self.resumed_bytes = 0

    def list_frame_only_files(self) -> list[str]:
        """List the output files that only consist of a frame, such as files without tensors."""
        return [file.path for file in self._plan.files if not self._total_bytes[file.path]]

    def list_incomplete_files(self) -> list[str]:
        """List the output files whose records have not been written completely."""
        with self._lock:
            return [path for path, remaining in self._remaining_bytes.items() if remaining]

    def list_partial_files(self) -> list[str]:
        """List the output files that this process has written partly."""
        with self._lock:
            return [
                path
                for path, remaining in self._remaining_bytes.items()
                if 0 < remaining < self._total_bytes[path]
            ]

    def export_entries(self) -> LedgerEntries:
        """Return the ledger entries of this process, to send them to another process."""
        with self._lock:
            written = {
                p: n - self._remaining_bytes[p]
                for p, n in self._total_bytes.items()
                if n > self._remaining_bytes[p]
            }
            finished = [path for path in written if not self._remaining_bytes[path]]
            outcomes = self._outcomes
            return LedgerEntries(
                self._record_crcs,
                self._record_parts,
                self._source_parts,
                written,
                finished,
                outcomes,
            )

    def add_entries(self, entries: LedgerEntries) -> None:
        """Add the ledger entries of another process that executes the same plan."""
        with self._lock:
            self._record_crcs |= entries.record_crcs
            for record, parts in entries.parts.items():
                self._record_parts.setdefault(record, []).extend(parts)
            for path, nbytes in entries.written.items():
                self._remaining_bytes[path] -= nbytes
                self.written_bytes += nbytes
            for transfer, outcome in entries.outcomes.items():
                self._add_outcome(transfer, outcome)
            complete_ranges = [
                entry
                for key, parts in entries.sources.items()
                if (entry := self._add_range_parts(key, parts))
            ]
        for source_range, parts in complete_ranges:
            self._verify_range(source_range, parts)

    def commit_units(
        self, units: Iterable[tuple[Unit, FinishedUnit]], *, resumed: bool = False
    ) -> CommitResult:
        """Record finished units, and verify the source ranges that are now completely read.

        Args:
            units: Finished units, each with its checksums and statistics.
            resumed: Whether an earlier run finished the units.

        Returns:
            The follow-up work, such as files to finish.

        Raises:
            DamagedError: The checksum of a source differs from the recorded one.
        """
        result = CommitResult([], [], ([], []))
        complete_ranges: list[tuple[SourceRange, CrcParts]] = []
        with self._lock:
            for unit, finished in units:
                self._add_writes(unit, finished, result, resumed)
                complete_ranges += self._add_reads(unit, finished)
            if self._journal_every and self._pending_bytes >= self._journal_every:
                durable = self._pending, sorted(self._pending_files)
                result = CommitResult(result.finished_files, result.writeback_due, durable)
                self._pending, self._pending_files, self._pending_bytes = [], set(), 0
        for source_range, parts in complete_ranges:
            self._verify_range(source_range, parts)
        return result

    def collect_outcomes(self) -> dict[str, Outcome]:
        """Sum out-of-range counts and quantization errors of each output tensor, by tensor name."""
        outcomes_by_name: dict[str, Outcome] = {}
        with self._lock:
            for transfer, outcome in sorted(self._outcomes.items()):
                name = self._plan.transfers[transfer].name
                outcomes_by_name[name] = outcomes_by_name.get(name, NO_OUTCOME) + outcome
        return outcomes_by_name

    def _add_outcome(self, transfer: int, outcome: Outcome) -> None:
        self._outcomes[transfer] = self._outcomes.get(transfer, NO_OUTCOME) + outcome

    def get_record_crc(self, record: int) -> int:
        """Return the CRC-32 of a finished record, or 0 if it is empty or in memory.

        Raises:
            CkptError: Some bytes of the record have not been written.
        """
        if self._plan.records[record].file not in self._files:
            return 0
        if record in self._record_crcs:
            return self._record_crcs[record]
        entry = self._plan.records[record]
        value = _combine_parts(self._record_parts.get(record, []), entry.nbytes)
        if value is None:
            raise CkptError(f"`{entry.name}` was not written completely", where=entry.file)
        return value

    def _add_writes(
        self, unit: Unit, finished: FinishedUnit, result: CommitResult, resumed: bool
    ) -> None:
        records = self._plan.records
        if finished.lost or finished.rounding:
            lost, rounding = OutOfRange(*finished.lost), Rounding(*finished.rounding)
            self._add_outcome(unit.transfer, Outcome(lost, rounding))
        written_bytes = 0
        for write, crc in zip(unit.tile.list_writes(), finished.written, strict=True):
            if write.record >= 0:
                if write.nbytes == records[write.record].nbytes:
                    self._record_crcs[write.record] = crc
                else:
                    part = (write.at, write.nbytes, crc)
                    self._record_parts.setdefault(write.record, []).append(part)
            written_bytes += write.nbytes
            self._remaining_bytes[write.file] -= write.nbytes
            if write.file not in self._files:
                continue
            if not self._remaining_bytes[write.file]:
                result.finished_files.append(write.file)
            elif not resumed:
                self._unsynced_bytes[write.file] += write.nbytes
                if self._unsynced_bytes[write.file] >= self._sync_every:
                    self._unsynced_bytes[write.file] = 0
                    result.writeback_due.append(write.file)
        if resumed:
            self.resumed_bytes += written_bytes
            return
        self.written_bytes += written_bytes
        if self._journal_every:
            self._pending.append(finished)
            self._pending_files.update(write.file for write in unit.tile.writes)
            self._pending_bytes += written_bytes

    def _add_reads(self, unit: Unit, finished: FinishedUnit) -> list[tuple[SourceRange, CrcParts]]:
        """Add the checksums of the reads of a unit, and return the ranges that it completes."""
        complete_ranges: list[tuple[SourceRange, CrcParts]] = []
        root = self._plan.get_root(unit.transfer)
        for read, crc in zip(unit.tile.list_checked_reads(), finished.read, strict=True):
            if read.check is not None:
                part = (read.offset - read.check.offset, read.nbytes, crc)
                if complete_range := self._add_range_parts((root, read.check), [part]):
                    complete_ranges.append(complete_range)
        return complete_ranges

    def _add_range_parts(
        self, source_range: SourceRange, new_parts: CrcParts
    ) -> tuple[SourceRange, CrcParts] | None:
        """Add parts of a source range, and return all parts, or None while some are missing."""
        parts = self._source_parts.setdefault(source_range, [])
        parts += new_parts
        self._covered_bytes[source_range] += sum(nbytes for _, nbytes, _ in new_parts)
        if self._covered_bytes[source_range] != source_range[1].nbytes:
            return None
        return source_range, self._source_parts.pop(source_range)

    def _verify_range(self, source_range: SourceRange, parts: CrcParts) -> None:
        root, recorded = source_range
        computed = _combine_parts(parts, recorded.nbytes)
        if computed != recorded.crc32:
            names = (
                check.name
                for check in self._plan.checks
                if (check.root, check.recorded) == source_range
            )
            name = recorded.name or next(names, recorded.file)
            raise checksum_error(name, root, recorded.file, computed or 0, recorded.crc32)


def checksum_error(
    name: str, root: TreePath, file: str, computed: int, recorded: int
) -> DamagedError:
    """Build the error for a tensor whose CRC-32 differs from the recorded one.

    A zip contains its checksums. The checksums of other files are in the manifest next to them. A
    user who changed a file on purpose can delete the manifest.

    Args:
        name: Tensor name.
        root: Directory that *file* is relative to.
        file: File that contains the tensor.
        computed: Computed CRC-32 of its bytes.
        recorded: Recorded CRC-32 of its bytes.
    """
    hint = "copy the checkpoint again from its source"
    recorded_in = "the file"
    with suppress(CkptError), source_files(root) as files:
        if not starts_like_zip(files, file) and (files.root / MANIFEST).is_file():
            recorded_in = f"`{MANIFEST}`"
            hint += f"; if the file was changed on purpose, delete `{files.root / MANIFEST}`"
    return DamagedError(
        f"the checksum of `{name}` does not match the one recorded in {recorded_in}",
        where=str(root / file),
        why=f"CRC-32 is {computed:08x}, expected {recorded:08x}",
        hint=hint,
    )


def _combine_parts(parts: CrcParts, nbytes: int) -> int | None:
    """Combine the checksums of *parts*, or return None if they do not cover *nbytes* bytes."""
    end, value = 0, 0
    for position, size, crc in sorted(parts):
        if position != end:
            return None
        value = combine_crcs(value, crc, size) if position else crc
        end += size
    return value if end == nbytes else None


class Journal:
    """Journal file of a run, opened for appending.

    Attributes:
        done_units: Units whose data is on disk, by transfer and tile index.
        limits: Tile sizes of the run that started the journal.

    Args:
        path: Path of the journal.
        header: Identity of the plan and its source files. A run can only be resumed if it is equal.
        limits: Tile sizes of this run, which are written to a new journal.
        resume: Whether to load the journal of an earlier run.

    Raises:
        UnfinishedWorkError: An earlier run executed another plan.
    """

    def __init__(self, path: Path, header: Header, limits: TileLimits, *, resume: bool) -> None:
        self._path = path
        self.done_units: dict[_Key, FinishedUnit] = {}
        self.limits = self._current_limits = limits
        self._header_line = _encode_line({"journal": JOURNAL_VERSION, **header, "limits": limits})
        self._lock = threading.Lock()
        self._writing = self._closed = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with wrap_os_errors("open", path):
            self._descriptor = os.open(path, flags, 0o666)
        try:
            size = self._load_entries() if resume else 0
        except BaseException:
            os.close(self._descriptor)
            raise
        self._truncate_file(size)
        self._pending = b"" if size else self._header_line

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        # Do not wait for a write that hangs in the kernel, which closes the file when it returns.
        with self._lock:
            self._closed = True
            if not self._writing:
                os.close(self._descriptor)

    def restart(self) -> None:
        """Discard all entries, because the output files of the earlier run are incomplete."""
        self._pending = self._header_line
        self._truncate_file(0)
        self.done_units = {}
        self.limits = self._current_limits

    def append_units(self, units: Sequence[FinishedUnit]) -> None:
        """Append *units*, whose data is on disk, and sync the journal.

        Nothing is appended if the journal is closed.
        Only one thread may call this at a time.
        """
        with self._lock:
            if self._closed:
                return
            self._writing = True
        try:
            data = self._pending + _encode_line({"units": units})
            with wrap_os_errors("write", self._path):
                while data:
                    data = data[os.write(self._descriptor, data) :]
                os.fsync(self._descriptor)
        finally:
            with self._lock:
                self._writing = False
                if self._closed:
                    os.close(self._descriptor)
        self._pending = b""

    def _truncate_file(self, size: int) -> None:
        with wrap_os_errors("write", self._path):
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)

    def _load_entries(self) -> int:
        """Load the finished units and the tile sizes of an earlier run.

        Returns:
            Size of the valid lines in bytes, or 0 if no earlier run can be resumed.
        """
        with os.fdopen(os.dup(self._descriptor), "rb") as lines:
            first = next(lines, b"")
            header = _parse_line(first)
            if header is None:
                return 0
            limits = _parse_limits(header.get("limits"), self._current_limits.verifies_checksums)
            if (
                limits is None
                or _encode_line({**header, "limits": self._current_limits}) != self._header_line
            ):
                partial_output = find_partial_output(self._path.parent)
                if partial_output is None:
                    return 0
                restart = format_option("--restart")
                raise partial_output.refusal_error(
                    OTHER_RUN_MESSAGE
                    if header.get("journal") == JOURNAL_VERSION
                    else OTHER_VERSION_MESSAGE,
                    f"pass {restart} to discard the partial output and start over",
                )
            self.limits = limits
            valid = len(first)
            for line in lines:
                units = _parse_units(line)
                if units is None:
                    break
                self.done_units.update((unit[:2], unit) for unit in units)
                valid += len(line)
        return valid


def _encode_line(value: Mapping[str, object]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the journal, or return None if it is truncated or damaged."""
    check, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or check != b"%08x" % crc32(text):
        return None
    try:
        return read_nested_or_none(dict[str, Any], json.loads(text))
    except (ValueError, RecursionError):
        return None


def _parse_limits(value: Any, check: bool) -> TileLimits | None:
    """Parse the tile sizes of a journal, or return None if they are invalid.

    They are also invalid if only one of the journal and this run computes checksums (*check*).
    """
    match value:
        case [*sizes, bool(checked)] if checked is check and _are_counts(sizes):
            within = len(sizes) == len(MIN_LIMITS) and all(map(le, MIN_LIMITS, sizes))
            return TileLimits._make(value) if within and all(map(le, sizes, TileLimits())) else None
    return None


def _parse_units(line: bytes) -> list[FinishedUnit] | None:
    content = _parse_line(line)
    units = content.get("units") if content else None
    if not isinstance(units, list):
        return None
    done = [parsed for unit in units if (parsed := _parse_finished_unit(unit))]
    return done if len(done) == len(units) else None


def _parse_finished_unit(value: Any) -> FinishedUnit | None:
    match value:
        case [transfer, number, [*written], [*read], [*lost], [*rounding]] if (
            len(lost) in LOST_FIELD_COUNTS and len(rounding) in ROUNDING_FIELD_COUNTS
        ):
            counts = _are_counts([transfer, number, *written, *read, *lost])
            if counts and all(type(error) is float and 0 <= error < inf for error in rounding):
                return FinishedUnit(transfer, number, written, read, tuple(lost), tuple(rounding))
    return None


def _are_counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
