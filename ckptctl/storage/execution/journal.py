"""Progress of a run: a ledger in memory, and a journal on disk to resume from.

The ledger counts bytes of files and combines checksums of records and sources. The journal is a
text file of lines ``<crc32 of the rest, 8 hex digits> <JSON>``. The first line identifies the plan
and its division into units, which a resumed run repeats. Each later line lists units and their
checksums, and is only appended after their data has been synced. A truncated or damaged line ends
the journal; later lines are ignored.
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
from ckptctl.errors import CkptError, DamagedError, spell_option, storage_errors
from ckptctl.planner.copying.tile import Limits
from ckptctl.planner.plan import Plan, RecordedRange
from ckptctl.storage.crc import combine, crc32
from ckptctl.storage.execution.execution_options import LEAST
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.files import source_files
from ckptctl.storage.outcome import NOTHING, Outcome, OutOfRange, Rounding
from ckptctl.storage.schema import find
from ckptctl.storage.stand_ins import begins_as_zip
from ckptctl.storage.unfinished import left_in
from ckptctl.tree import TreePath

VERSION = 5
OTHER_RUN = "the interrupted run had other options, or the source has changed since"
OTHER_VERSION = "another version of ckptctl began the interrupted run"
LEAST_SIZES = (LEAST, LEAST, LEAST, 1 << 12)
"""Smallest valid limits in bytes, for the largest number of threads."""
OUTCOMES = (0, len(fields(OutOfRange)))
ROUNDINGS = (0, len(fields(Rounding)))
Header = Mapping[str, object]
_Key = tuple[int, int]
Parts = list[tuple[int, int, int]]
"""``(position, bytes, CRC-32)`` of parts of a record or of a recorded range of a source."""
SourceRange = tuple[TreePath, RecordedRange]
"""Directory and recorded range of a file in it."""


class Done(NamedTuple):
    """A finished unit.

    Attributes:
        transfer: Index of its transfer.
        number: Index of its tile.
        written: CRC-32 of each of its writes.
        read: CRC-32 of each of its checked reads.
        lost: Fields of an :class:`~ckptctl.storage.outcome.OutOfRange`, or empty.
        rounding: Fields of a :class:`~ckptctl.storage.outcome.Rounding`, or empty.
    """

    transfer: int
    number: int
    written: Sequence[int]
    read: Sequence[int]
    lost: Sequence[int] = ()
    rounding: Sequence[float] = ()


class News(NamedTuple):
    """Consequences of a commit.

    Attributes:
        finished: Output files that are complete except for their frames, without memory.
        ripe: Output files with many bytes written since the last writeback.
        durable: Units to be journaled and the files that they wrote, empty if not due yet.
    """

    finished: list[str]
    ripe: list[str]
    durable: tuple[list[Done], list[str]]


class Books(NamedTuple):
    """Ledger entries of one process, for the process that finishes a shared plan.

    Attributes:
        whole: CRC-32 of records written by one unit, by index.
        parts: Parts of the other records.
        sources: Parts of incompletely read recorded ranges of sources.
        written: Bytes written to each output file.
        finished: Output files that are finished.
        outcomes: Outcome of computed and cast elements, by transfer.
        read: Bytes read from source files.
    """

    whole: dict[int, int]
    parts: dict[int, Parts]
    sources: dict[SourceRange, Parts]
    written: dict[str, int]
    finished: list[str]
    outcomes: dict[int, Outcome]
    read: int = 0


class Ledger:
    """Thread-safe record of the progress of a run."""

    def __init__(self, plan: Plan, journal_every: int, sync_every: int) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._journal_every = journal_every
        self._sync_every = sync_every
        self._whole: dict[int, int] = {}
        self._parts: dict[int, Parts] = {}
        self._sources: dict[SourceRange, Parts] = {}
        self._covered: Counter[SourceRange] = Counter()
        self._outcomes: dict[int, Outcome] = {}
        self._all: Counter[str] = Counter()
        for record in plan.records:
            self._all[record.file] += record.nbytes
        for raw in plan.raw_copies:
            self._all[raw.target] += raw.nbytes
        self._left = self._all.copy()
        self._files = {file.path for file in plan.files}
        self._unsynced: Counter[str] = Counter()
        self._pending: list[Done] = []
        self._pending_files: set[str] = set()
        self._pending_bytes = 0
        self.written = 0
        self.resumed = 0

    def untouched(self) -> list[str]:
        """List the output files that only consist of a frame."""
        return [file.path for file in self._plan.files if not self._all[file.path]]

    def unfinished(self) -> list[str]:
        """List the output files with missing bytes."""
        with self._lock:
            return [path for path, left in self._left.items() if left]

    def begun(self) -> list[str]:
        """List the output files that are only written in part."""
        with self._lock:
            return [path for path, left in self._left.items() if 0 < left < self._all[path]]

    def books(self) -> Books:
        """Return all entries of this process."""
        with self._lock:
            written = {p: n - self._left[p] for p, n in self._all.items() if n > self._left[p]}
            finished = [path for path in written if not self._left[path]]
            outcomes = self._outcomes
            return Books(self._whole, self._parts, self._sources, written, finished, outcomes)

    def add(self, books: Books) -> None:
        """Add the entries of another process."""
        with self._lock:
            self._whole |= books.whole
            for record, parts in books.parts.items():
                self._parts.setdefault(record, []).extend(parts)
            for path, nbytes in books.written.items():
                self._left[path] -= nbytes
                self.written += nbytes
            for transfer, outcome in books.outcomes.items():
                self._note(transfer, outcome)
            complete = [
                entry for key, parts in books.sources.items() if (entry := self._cover(key, parts))
            ]
        for place, parts in complete:
            self._check(place, parts)

    def commit(self, units: Iterable[tuple[Unit, Done]], *, resumed: bool = False) -> News:
        """Add finished units."""
        news = News([], [], ([], []))
        complete: list[tuple[SourceRange, Parts]] = []
        with self._lock:
            for unit, done in units:
                self._enter_writes(unit, done, news, resumed)
                complete += self._enter_reads(unit, done)
            if self._journal_every and self._pending_bytes >= self._journal_every:
                durable = self._pending, sorted(self._pending_files)
                news = News(news.finished, news.ripe, durable)
                self._pending, self._pending_files, self._pending_bytes = [], set(), 0
        for place, parts in complete:
            self._check(place, parts)
        return news

    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcome of computed and cast elements, by tensor name."""
        found: dict[str, Outcome] = {}
        with self._lock:
            for transfer, outcome in sorted(self._outcomes.items()):
                name = self._plan.transfers[transfer].name
                found[name] = found.get(name, NOTHING) + outcome
        return found

    def _note(self, transfer: int, outcome: Outcome) -> None:
        self._outcomes[transfer] = self._outcomes.get(transfer, NOTHING) + outcome

    def crc(self, record: int) -> int:
        """Return the CRC-32 of a finished record, or 0 if it is empty or in memory."""
        if self._plan.records[record].file not in self._files:
            return 0
        if record in self._whole:
            return self._whole[record]
        entry = self._plan.records[record]
        value = _joined(self._parts.get(record, []), entry.nbytes)
        if value is None:
            raise CkptError(f"`{entry.name}` was not written completely", where=entry.file)
        return value

    def _enter_writes(self, unit: Unit, done: Done, news: News, resumed: bool) -> None:
        records = self._plan.records
        if done.lost or done.rounding:
            lost, rounding = OutOfRange(*done.lost), Rounding(*done.rounding)
            self._note(unit.transfer, Outcome(lost, rounding))
        total = 0
        for write, crc in zip(unit.tile.written(), done.written, strict=True):
            if write.record >= 0:
                if write.nbytes == records[write.record].nbytes:
                    self._whole[write.record] = crc
                else:
                    part = (write.at, write.nbytes, crc)
                    self._parts.setdefault(write.record, []).append(part)
            total += write.nbytes
            self._left[write.file] -= write.nbytes
            if write.file not in self._files:
                continue
            if not self._left[write.file]:
                news.finished.append(write.file)
            elif not resumed:
                self._unsynced[write.file] += write.nbytes
                if self._unsynced[write.file] >= self._sync_every:
                    self._unsynced[write.file] = 0
                    news.ripe.append(write.file)
        if resumed:
            self.resumed += total
            return
        self.written += total
        if self._journal_every:
            self._pending.append(done)
            self._pending_files.update(write.file for write in unit.tile.writes)
            self._pending_bytes += total

    def _enter_reads(self, unit: Unit, done: Done) -> list[tuple[SourceRange, Parts]]:
        """Add the checked reads, and return the recorded ranges that are now complete."""
        complete: list[tuple[SourceRange, Parts]] = []
        root = self._plan.root_of(unit.transfer)
        for read, crc in zip(unit.tile.checked(), done.read, strict=True):
            if read.check is not None:
                part = (read.offset - read.check.offset, read.nbytes, crc)
                if covered := self._cover((root, read.check), [part]):
                    complete.append(covered)
        return complete

    def _cover(self, place: SourceRange, more: Parts) -> tuple[SourceRange, Parts] | None:
        """Add parts of a recorded range, and return it if it is now complete, or None."""
        parts = self._sources.setdefault(place, [])
        parts += more
        self._covered[place] += sum(nbytes for _, nbytes, _ in more)
        if self._covered[place] != place[1].nbytes:
            return None
        return place, self._sources.pop(place)

    def _check(self, place: SourceRange, parts: Parts) -> None:
        root, recorded = place
        found = _joined(parts, recorded.nbytes)
        if found != recorded.crc32:
            names = (one.name for one in self._plan.checks if (one.root, one.recorded) == place)
            name = recorded.name or next(names, recorded.file)
            raise checksum_error(name, root, recorded.file, found or 0, recorded.crc32)


def checksum_error(
    name: str, root: TreePath, file: str, computed: int, recorded: int
) -> DamagedError:
    """Build the error for a tensor whose CRC-32 is not the recorded one.

    A zip contains its checksums. Those of any other file are in the manifest next to it, which a
    user who changed the file on purpose can remove.

    Args:
        name: Tensor name.
        root: Directory that *file* is relative to.
        file: File that contains the tensor.
        computed: Computed CRC-32 of its bytes.
        recorded: Recorded CRC-32 of its bytes.
    """
    hint = "copy the checkpoint again from its source"
    by = "the file"
    with suppress(CkptError), source_files(root) as files:
        if not begins_as_zip(files, file) and (files.root / MANIFEST).is_file():
            by = f"`{MANIFEST}`"
            hint += f"; if the file was changed on purpose, delete `{files.root / MANIFEST}`"
    return DamagedError(
        f"the checksum of `{name}` does not match the one recorded in {by}",
        where=str(root / file),
        why=f"CRC-32 is {computed:08x}, expected {recorded:08x}",
        hint=hint,
    )


def _joined(parts: Parts, nbytes: int) -> int | None:
    """Combine the CRC-32 of adjacent *parts*, or return None unless they cover *nbytes* bytes."""
    end, value = 0, 0
    for at, size, crc in sorted(parts):
        if at != end:
            return None
        value = combine(value, crc, size) if at else crc
        end += size
    return value if end == nbytes else None


class Journal:
    """Append-only journal.

    Attributes:
        done: Units recorded as durable.
        limits: Tile sizes of the run that started the journal.

    Args:
        path: Journal file.
        header: Description of the plan and its sources.
        limits: Tile sizes of this run, for a new journal.
        resume: Whether to load the journal of an earlier run.

    Raises:
        UnfinishedWorkError: An earlier run executed another plan.
    """

    def __init__(self, path: Path, header: Header, limits: Limits, *, resume: bool) -> None:
        self._path = path
        self.done: dict[_Key, Done] = {}
        self.limits = self._own = limits
        self._first = _line({"journal": VERSION, **header, "limits": limits})
        self._lock = threading.Lock()
        self._writing = self._closed = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with storage_errors("open", path):
            self._descriptor = os.open(path, flags, 0o666)
        try:
            size = self._load() if resume else 0
        except BaseException:
            os.close(self._descriptor)
            raise
        self._cut(size)
        self._pending = b"" if size else self._first

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        # Do not wait for a write that hangs in the kernel, which closes the file when it returns.
        with self._lock:
            self._closed = True
            if not self._writing:
                os.close(self._descriptor)

    def restart(self) -> None:
        """Discard all entries, because their data is missing."""
        self._pending = self._first
        self._cut(0)
        self.done = {}
        self.limits = self._own

    def append(self, units: Sequence[Done]) -> None:
        """Append *units*, whose data is on disk, and sync, unless the journal is closed.

        Only one thread may call this at a time.
        """
        with self._lock:
            if self._closed:
                return
            self._writing = True
        try:
            data = self._pending + _line({"units": units})
            with storage_errors("write", self._path):
                while data:
                    data = data[os.write(self._descriptor, data) :]
                os.fsync(self._descriptor)
        finally:
            with self._lock:
                self._writing = False
                if self._closed:
                    os.close(self._descriptor)
        self._pending = b""

    def _cut(self, size: int) -> None:
        with storage_errors("write", self._path):
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)

    def _load(self) -> int:
        """Load ``done`` and ``limits``, and return the number of valid bytes of the file."""
        with os.fdopen(os.dup(self._descriptor), "rb") as lines:
            first = next(lines, b"")
            header = _parse_line(first)
            if header is None:
                return 0
            limits = _parse_limits(header.get("limits"), self._own.check)
            if limits is None or _line({**header, "limits": self._own}) != self._first:
                left = left_in(self._path.parent)
                if left is None:
                    return 0
                restart = spell_option("--restart")
                raise left.refusal(
                    OTHER_RUN if header.get("journal") == VERSION else OTHER_VERSION,
                    f"pass {restart} to discard the partial output and start over",
                )
            self.limits = limits
            valid = len(first)
            for line in lines:
                units = _parse_units(line)
                if units is None:
                    break
                self.done.update((unit[:2], unit) for unit in units)
                valid += len(line)
        return valid


def _line(value: Mapping[str, object]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line, or return None if it is damaged."""
    check, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or check != b"%08x" % crc32(text):
        return None
    try:
        return find(dict[str, Any], json.loads(text))
    except (ValueError, RecursionError):
        return None


def _parse_limits(value: Any, check: bool) -> Limits | None:
    """Parse the limits in a header, or return None if they are not valid."""
    match value:
        case [*sizes, bool(checked)] if checked is check and _are_counts(sizes):
            within = len(sizes) == len(LEAST_SIZES) and all(map(le, LEAST_SIZES, sizes))
            return Limits._make(value) if within and all(map(le, sizes, Limits())) else None
    return None


def _parse_units(line: bytes) -> list[Done] | None:
    content = _parse_line(line)
    units = content.get("units") if content else None
    if not isinstance(units, list):
        return None
    done = [parsed for unit in units if (parsed := _parse_done(unit))]
    return done if len(done) == len(units) else None


def _parse_done(value: Any) -> Done | None:
    match value:
        case [transfer, number, [*written], [*read], [*lost], [*off]] if (
            len(lost) in OUTCOMES and len(off) in ROUNDINGS
        ):
            counts = _are_counts([transfer, number, *written, *read, *lost])
            if counts and all(type(part) is float and 0 <= part < inf for part in off):
                return Done(transfer, number, written, read, tuple(lost), tuple(off))
    return None


def _are_counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
