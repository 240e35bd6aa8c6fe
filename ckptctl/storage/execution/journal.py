"""What a run has durably written, so that a later one need not write it again.

A text file of lines ``<crc32 of the rest, 8 hex digits> <JSON>``. The first names the plan, and how
it is cut into units: whoever goes on cuts it so. Each later one lists units and their checksums,
and is appended only after the data it speaks of has been synced. A torn or damaged line ends the
file: what follows it is not believed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf
from operator import le
from pathlib import Path
from typing import Any, NamedTuple

from ckptctl.errors import spell_option, storage_errors
from ckptctl.planner.copying.tile import Limits
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.options import LEAST
from ckptctl.storage.outcome import OutOfRange, Rounding
from ckptctl.storage.schema import find
from ckptctl.storage.unfinished import left_in

VERSION = 4
OTHER = "the interrupted run had other options, or the source has changed since"
LEAST_SIZES = (LEAST, LEAST, LEAST, 1 << 12)
"""Of limits, in bytes: what so many threads have of buffers that nobody begins more."""
OUTCOMES = (0, len(fields(OutOfRange)))
ROUNDINGS = (0, len(fields(Rounding)))
Header = Mapping[str, object]
_Key = tuple[int, int]


class Done(NamedTuple):
    """A finished unit.

    Attributes:
        transfer: Index of its transfer.
        number: Index of its tile.
        written: CRC-32 of each of its writes.
        read: CRC-32 of each of its checked reads.
        lost: The numbers of an :class:`~ckptctl.storage.outcome.OutOfRange`; empty: nothing.
        rounding: Those of a :class:`~ckptctl.storage.outcome.Rounding`; likewise.
    """

    transfer: int
    number: int
    written: Sequence[int]
    read: Sequence[int]
    lost: Sequence[int] = ()
    rounding: Sequence[float] = ()


class Journal:
    """An append-only journal.

    Attributes:
        done: The units that it vouches for.
        limits: What cut them: those of the run that began it.

    Args:
        path: Its file.
        header: What it is about.
        limits: Those of this run, for a journal that begins.
        resume: Whether to believe what is there.

    Raises:
        UnfinishedWorkError: It is to be believed, and is about something else.
    """

    def __init__(self, path: Path, header: Header, limits: Limits, *, resume: bool) -> None:
        self._path = path
        self.done: dict[_Key, Done] = {}
        self.limits = self._own = limits
        self._header = {"journal": VERSION, **header, "limits": limits}
        self._first = _line(self._header)
        self._lock = threading.Lock()
        self._writing = self._closed = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with storage_errors("open", path):
            self._descriptor = os.open(path, flags, 0o666)
        try:
            size = self._believe() if resume else 0
        except BaseException:
            os.close(self._descriptor)
            raise
        self._cut(size)
        self._pending = b"" if size else self._first

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        # Does not wait for a write that hangs in the kernel: that one closes when it returns.
        with self._lock:
            self._closed = True
            if not self._writing:
                os.close(self._descriptor)

    def restart(self) -> None:
        """Forget everything: the data it speaks of is not there."""
        self._pending = self._first
        self._cut(0)
        self.done = {}
        self.limits = self._own

    def append(self, units: Sequence[Done]) -> None:
        """Add *units*, whose data is on disk, and sync; a closed journal stays as it is.

        For one thread at a time.
        """
        with self._lock:
            if self._closed:
                return
            self._writing = True
        try:
            self._write(memoryview(self._pending + _line({"units": units})))
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

    def _write(self, data: memoryview) -> None:
        with storage_errors("write", self._path):
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)

    def _believe(self) -> int:
        """Fill ``done`` and ``limits``, and return how many bytes of the file are sound."""
        with os.fdopen(os.dup(self._descriptor), "rb") as lines:
            first = next(lines, b"")
            said = _said(first)
            if said is None:
                return 0
            limits = _limits(said.get("limits"), self._own.check)
            if limits is None or _line({**said, "limits": self._own}) != self._first:
                left = left_in(self._path.parent)
                if left is None:
                    return 0
                raise left.refusal(
                    OTHER,
                    f"pass {spell_option('--restart')} to discard the partial output and "
                    "start over",
                )
            self.limits = limits
            sound = len(first)
            for line in lines:
                units = _units(_said(line))
                if units is None:
                    break
                self.done.update((unit[:2], unit) for unit in units)
                sound += len(line)
        return sound


def _line(value: Mapping[str, object]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _said(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None: nothing that any run has written."""
    check, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or check != b"%08x" % crc32(text):
        return None
    try:
        return find(dict[str, Any], json.loads(text))
    except (ValueError, RecursionError):
        return None


def _limits(said: Any, check: bool) -> Limits | None:
    """Return limits that a run may have had: no other buffers are made, nor other steps taken."""
    match said:
        case [*sizes, bool(checked)] if checked is check and _are_counts(sizes):
            within = len(sizes) == len(LEAST_SIZES) and all(map(le, LEAST_SIZES, sizes))
            return Limits._make(said) if within and all(map(le, sizes, Limits())) else None
    return None


def _units(said: Mapping[str, Any] | None) -> list[Done] | None:
    units = said.get("units") if said else None
    if not isinstance(units, list):
        return None
    done = [one for unit in units if (one := _done(unit))]
    return done if len(done) == len(units) else None


def _done(said: Any) -> Done | None:
    match said:
        case [transfer, number, [*written], [*read], [*lost], [*off]] if (
            len(lost) in OUTCOMES and len(off) in ROUNDINGS
        ):
            counts = _are_counts([transfer, number, *written, *read, *lost])
            if counts and all(type(value) is float and 0 <= value < inf for value in off):
                return Done(transfer, number, written, read, tuple(lost), tuple(off))
    return None


def _are_counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
