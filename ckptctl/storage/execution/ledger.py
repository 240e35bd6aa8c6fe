"""What has been written so far: checksums of records and sources, bytes left in each file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ckptctl.catalog import MANIFEST
from ckptctl.errors import CkptError, DamagedError
from ckptctl.planner.plan import Plan, RecordedRange
from ckptctl.storage.crc import combine
from ckptctl.storage.execution.journal import Done
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.files import source_files
from ckptctl.storage.outcome import NOTHING, Outcome, OutOfRange, Rounding
from ckptctl.storage.stand_ins import begins_as_zip
from ckptctl.storage.tree import TreePath

Parts = list[tuple[int, int, int]]
"""``(position, bytes, CRC-32)`` of the parts of a record or of a recorded range of a source."""
SourceRange = tuple[TreePath, RecordedRange]
"""A recorded range, and the directory that its file is relative to."""


class News(NamedTuple):
    """What a commit brought about.

    Attributes:
        finished: Output files all of whose bytes but the frame are written; memory is none.
        ripe: Output files with many bytes that no sync has been asked for.
        durable: Units to be journaled, and the files they wrote; empty: not yet.
    """

    finished: list[str]
    ripe: list[str]
    durable: tuple[list[Done], list[str]]


class Books(NamedTuple):
    """What one of several processes entered, for the one that finishes their plan.

    Attributes:
        whole: CRC-32 of records that were written in one piece, by index.
        parts: Of the other records.
        sources: Parts of recorded ranges of sources that are not read completely yet.
        written: Bytes of each output file.
        finished: Output files that need nothing more.
        outcomes: What became of elements that were computed or cast, by transfer.
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
    """The books of a run; safe to use from many threads."""

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
        """Return the output files that have nothing but a frame."""
        return [file.path for file in self._plan.files if not self._all[file.path]]

    def unfinished(self) -> list[str]:
        """Return the output files that still lack bytes."""
        with self._lock:
            return [path for path, left in self._left.items() if left]

    def begun(self) -> list[str]:
        """Return the output files that have some of their bytes, but not all."""
        with self._lock:
            return [path for path, left in self._left.items() if 0 < left < self._all[path]]

    def books(self) -> Books:
        """Return all entries."""
        with self._lock:
            written = {p: n - self._left[p] for p, n in self._all.items() if n > self._left[p]}
            finished = [path for path in written if not self._left[path]]
            outcomes = self._outcomes
            return Books(self._whole, self._parts, self._sources, written, finished, outcomes)

    def add(self, books: Books) -> None:
        """Enter what another process did."""
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
        """Enter finished units."""
        news = News([], [], ([], []))
        complete: list[tuple[SourceRange, Parts]] = []
        with self._lock:
            for unit, done in units:
                self._enter(unit, done, news, resumed)
                complete += self._read(unit, done)
            if self._journal_every and self._pending_bytes >= self._journal_every:
                news = news._replace(durable=(self._pending, sorted(self._pending_files)))
                self._pending, self._pending_files, self._pending_bytes = [], set(), 0
        for place, parts in complete:
            self._check(place, parts)
        return news

    def outcomes(self) -> dict[str, Outcome]:
        """Return what became of elements that were computed or cast, by the tensor's name."""
        found: dict[str, Outcome] = {}
        with self._lock:
            for transfer, outcome in sorted(self._outcomes.items()):
                name = self._plan.transfers[transfer].name
                found[name] = found.get(name, NOTHING) + outcome
        return found

    def _note(self, transfer: int, outcome: Outcome) -> None:
        self._outcomes[transfer] = self._outcomes.get(transfer, NOTHING) + outcome

    def crc(self, record: int) -> int:
        """Return the CRC-32 of a finished record; 0 for an empty one, and for memory."""
        if self._plan.records[record].file not in self._files:
            return 0
        if record in self._whole:
            return self._whole[record]
        entry = self._plan.records[record]
        value = _joined(self._parts.get(record, []), entry.nbytes)
        if value is None:
            raise CkptError(f"`{entry.name}` was not written completely", where=entry.file)
        return value

    def _enter(self, unit: Unit, done: Done, news: News, resumed: bool) -> None:
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

    def _read(self, unit: Unit, done: Done) -> list[tuple[SourceRange, Parts]]:
        """Enter the checked reads; return the recorded ranges that are complete now."""
        complete: list[tuple[SourceRange, Parts]] = []
        root = self._plan.root_of(unit.transfer)
        for read, crc in zip(unit.tile.checked(), done.read, strict=True):
            if read.check is not None:
                part = (read.offset - read.check.offset, read.nbytes, crc)
                found = self._cover((root, read.check), [part])
                complete += [found] if found else []
        return complete

    def _cover(self, place: SourceRange, more: Parts) -> tuple[SourceRange, Parts] | None:
        """Enter parts of a recorded range; return it if it is complete now."""
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

    A zip records its checksums itself. Those of any other file stand in the manifest next to it,
    which a user who changed the file on purpose can remove.

    Args:
        name: The tensor.
        root: The directory that *file* is relative to.
        file: The file that holds its bytes.
        computed: The CRC-32 of these bytes.
        recorded: The CRC-32 that is recorded of them.
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
    """Return the CRC-32 of *parts* one after the other, None unless they are all of *nbytes*."""
    end, value = 0, 0
    for at, size, crc in sorted(parts):
        if at != end:
            return None
        value = combine(value, crc, size) if at else crc
        end += size
    return value if end == nbytes else None
