"""The units of work of a plan, and which thread does which of them next.

Threads that write one file wait for each other in the kernel, so every output file has a lane of
its own. A thread stays in its lane while there are others to begin; then it does batch by batch
wherever the most is left for each thread, but only as many do one lane as gain by it. So all lanes
end at about the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from ckptctl.planner.balance import Share
from ckptctl.planner.copying.copies import check, lower
from ckptctl.planner.copying.tile import Limits, Read, Tile, Write
from ckptctl.planner.plan import CheckedRange, Plan, RawCopy
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.sources import Sources

BATCH_BYTES = 1 << 18
BATCH_UNITS = 64
"""What a thread takes at a time, so that small units cost few locks."""
PER_FILE = 4
"""Threads that gain by writing one file; more only burn the time of a core."""


class Unit(NamedTuple):
    """A tile and its name in the journal.

    Attributes:
        transfer: Index of the transfer; raw copies count on from the last one, and checks from
            these.
        number: Index of the tile in the transfer.
        tile: What is to be done.
        files: Where its source files are.
    """

    transfer: int
    number: int
    tile: Tile
    files: SourceFiles


class Lane:
    """The units of one output file, or the checks of a source file, handed out in order.

    Attributes:
        left: Bytes that are not handed out yet, about.
        most: Threads that may work on it at a time.
        workers: Threads that do.
    """

    def __init__(self, units: Iterator[Unit], most: int, left: int = 0) -> None:
        self._units = units
        self.most = most
        self.left = left
        self._lock = threading.Lock()
        self.workers = 0
        self.empty = False

    def take(self) -> list[Unit]:
        """Return the next few units, small ones together; none: the lane is at its end."""
        taken: list[Unit] = []
        total = 0
        with self._lock:
            while total < BATCH_BYTES and len(taken) < BATCH_UNITS and not self.empty:
                unit = next(self._units, None)
                if unit is None:
                    self.empty = True
                    break
                taken.append(unit)
                total += unit.tile.copied
            self.left -= total
        return taken


class Lanes:
    """All lanes of a run.

    Args:
        lanes: In the order in which they are started.
        threads: How many there are; as long as there is a fresh lane for each, they stay in theirs.
        room: Returns once another lane may be started; then all threads work on one as long as
            there is work in it. None: each thread has a lane of its own while there are enough.
    """

    def __init__(self, lanes: list[Lane], threads: int, room: Callable[[], None] | None) -> None:
        self._room = room
        self._threads = threads
        self._fresh = list(reversed(lanes))
        self._busy: list[Lane] = []
        self._lock = threading.Lock()

    def units(self) -> Iterator[tuple[list[Unit], bool]]:
        """Yield batches for one thread, and whether its lane is its own, until nothing is left."""
        while lane := self._claim():
            while batch := lane.take():
                yield batch, lane.workers == 1
                if len(self._fresh) < self._threads:
                    break
            with self._lock:
                lane.workers -= 1
                if lane.empty and lane in self._busy:
                    self._busy.remove(lane)

    def _claim(self) -> Lane | None:
        if self._room is not None:
            with self._lock:
                if busy := self._most_left(self._busy):
                    return busy
            self._room()
        with self._lock:
            next_one = self._fresh[-1:]
            enough = len(self._fresh) >= self._threads or self._room is not None
            lane = self._most_left(next_one if enough and next_one else self._busy + next_one)
            if self._fresh and lane is self._fresh[-1]:
                self._busy.append(self._fresh.pop())
            return lane

    def _most_left(self, lanes: list[Lane]) -> Lane | None:
        """Return the lane with the most to do for each thread, of those that gain by another."""
        gaining = [lane for lane in lanes if not lane.empty and lane.workers < lane.most]
        if not gaining:
            return None
        lane = max(gaining, key=lambda lane: lane.left / (lane.workers + 1))
        lane.workers += 1
        return lane


def most_threads(plan: Plan, memory: Container[str], threads: int, numbers: Sequence[int]) -> int:
    """Return how many of a run's *threads* gain by doing the transfers *numbers* together.

    *memory* has the names of what is filled in memory.
    """
    if threads <= PER_FILE:
        return threads
    transfers = [plan.transfers[one] for one in numbers if one < len(plan.transfers)]
    virtual = plan.computed.keys()
    if not transfers or any(
        transfer.casts or (virtual and not virtual.isdisjoint(transfer.files()))
        for transfer in transfers
    ):
        return threads
    files = {target.file for one in transfers for target in one.targets}
    return threads if any(file in memory for file in files) else PER_FILE * len(files)


def plan_units(
    plan: Plan, number: int, sources: Sources, limits: Limits, share: Share | None
) -> Iterator[Unit]:
    """Yield the units of a transfer, raw copy or check, or the *share* of them, by its number.

    Their order depends on nothing but the arguments.
    """
    transfers, root = plan.transfers, plan.source_root
    if number < len(transfers):
        tiles = lower(transfers[number], plan.records, limits, plan.checked_by(number))
    elif number >= plan.first_check:
        checked = plan.checks[number - plan.first_check]
        root, tiles = checked.root, _check(checked, limits)
    else:
        raw = plan.raw_copies[number - len(transfers)]
        root, tiles = raw.root or root, _raw(raw, limits.flat)
    files = sources.files(root)
    for index, tile in share.own(number, tiles) if share else enumerate(tiles):
        yield Unit(number, index, tile, files)


def _raw(raw: RawCopy, limit: int) -> Iterator[Tile]:
    for done in range(0, raw.nbytes, limit):
        size = min(limit, raw.nbytes - done)
        read = Read(raw.source, raw.offset + done, size, None)
        write = Write(raw.target, raw.target_offset + done, size, 0, -1, 0)
        yield Tile(size, (read,), (), (write,), True)


def _check(range_: CheckedRange, limits: Limits) -> Iterator[Tile]:
    for position, nbytes in range_.gaps:
        recorded = range_.recorded
        yield from check(recorded, recorded.offset + position, nbytes, limits)
