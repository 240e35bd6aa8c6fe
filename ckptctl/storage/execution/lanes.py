"""Units of work of a plan, and their assignment to threads.

Threads that write the same file wait for each other in the kernel, so every output file gets its
own lane. A thread stays in its lane while some lanes have not been started. Afterwards, it takes
batches from the lane with the most remaining bytes per thread, up to the number of threads that a
lane benefits from, so that all lanes finish at about the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from ckptctl.planner.balance import WorkShare
from ckptctl.planner.copying.copies import iterate_check_tiles, tile_transfer
from ckptctl.planner.copying.tile import Read, Tile, TileLimits, Write
from ckptctl.planner.plan import CheckedRange, Plan, RawCopy
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.sources import Sources

BATCH_BYTES = 1 << 18
BATCH_UNITS = 64
"""Maximum number of units per batch. Batches of small units reduce lock contention."""
THREADS_PER_FILE = 4
"""Maximum number of threads that write one file, because more threads are not faster."""


class Unit(NamedTuple):
    """Tile of a transfer, raw copy or check, with the indices that identify it in the journal.

    Attributes:
        transfer: Index of the transfer. Indices of raw copies and of checks follow in this order.
        number: Index of the tile in the transfer.
        tile: Reads and writes to execute.
        files: Source files that the tile reads.
    """

    transfer: int
    number: int
    tile: Tile
    files: SourceFiles


class Lane:
    """Queue of the units of one output file, or of the checks of a source file.

    Attributes:
        remaining_bytes: Approximate number of bytes in units that no thread has taken yet.
        max_workers: Maximum number of threads that may work on the lane at a time.
        workers: Number of threads that currently work on the lane.
        exhausted: Whether all units have been taken.
    """

    def __init__(self, units: Iterator[Unit], max_workers: int, remaining_bytes: int = 0) -> None:
        self._units = units
        self.max_workers = max_workers
        self.remaining_bytes = remaining_bytes
        self._lock = threading.Lock()
        self.workers = 0
        self.exhausted = False

    def take_batch(self) -> list[Unit]:
        """Remove and return the next batch of units, which is empty if the lane is exhausted."""
        batch: list[Unit] = []
        total = 0
        with self._lock:
            while total < BATCH_BYTES and len(batch) < BATCH_UNITS and not self.exhausted:
                unit = next(self._units, None)
                if unit is None:
                    self.exhausted = True
                    break
                batch.append(unit)
                total += unit.tile.copied_nbytes
            self.remaining_bytes -= total
        return batch


class LaneScheduler:
    """Assignment of the lanes of a run to its threads.

    Args:
        lanes: Lanes in the order in which they are started.
        threads: Number of threads. While at least as many lanes have not been started, each thread
            finishes its lane before it starts another one.
        wait_for_room: Waits until another lane may be started, for example until earlier files are
            uploaded. Threads then finish the started lanes before they start a new one. If
            *wait_for_room* is None, new lanes are started without waiting.
    """

    def __init__(
        self, lanes: list[Lane], threads: int, wait_for_room: Callable[[], None] | None
    ) -> None:
        self._wait_for_room = wait_for_room
        self._threads = threads
        self._new_lanes = list(reversed(lanes))
        self._active_lanes: list[Lane] = []
        self._lock = threading.Lock()

    def iterate_batches(self) -> Iterator[tuple[list[Unit], bool]]:
        """Yield batches for the calling thread, and whether it is the only thread in the lane."""
        while lane := self._claim_lane():
            while batch := lane.take_batch():
                yield batch, lane.workers == 1
                if len(self._new_lanes) < self._threads:
                    break
            with self._lock:
                lane.workers -= 1
                if lane.exhausted and lane in self._active_lanes:
                    self._active_lanes.remove(lane)

    def _claim_lane(self) -> Lane | None:
        if self._wait_for_room is not None:
            with self._lock:
                if active_lane := self._join_longest_lane(self._active_lanes):
                    return active_lane
            self._wait_for_room()
        with self._lock:
            next_lane = self._new_lanes[-1:]
            prefers_new_lane = (
                len(self._new_lanes) >= self._threads or self._wait_for_room is not None
            )
            lane = self._join_longest_lane(
                next_lane if prefers_new_lane and next_lane else self._active_lanes + next_lane
            )
            if self._new_lanes and lane is self._new_lanes[-1]:
                self._active_lanes.append(self._new_lanes.pop())
            return lane

    def _join_longest_lane(self, lanes: list[Lane]) -> Lane | None:
        """Join the lane with the most remaining bytes per thread, or return None.

        Only lanes that one more thread speeds up are suitable. The calling thread is counted as a
        worker of the returned lane.
        """
        eligible_lanes = [
            lane for lane in lanes if not lane.exhausted and lane.workers < lane.max_workers
        ]
        if not eligible_lanes:
            return None
        lane = max(eligible_lanes, key=lambda lane: lane.remaining_bytes / (lane.workers + 1))
        lane.workers += 1
        return lane


def count_useful_threads(
    plan: Plan, in_memory_files: Container[str], threads: int, transfer_indices: Sequence[int]
) -> int:
    """Return how many of *threads* speed up the transfers with the indices *transfer_indices*.

    *in_memory_files* contains the names of output files in memory.
    """
    if threads <= THREADS_PER_FILE:
        return threads
    transfers = [
        plan.transfers[number] for number in transfer_indices if number < len(plan.transfers)
    ]
    computed_files = plan.computed.keys()
    if not transfers or any(
        transfer.is_cast
        or (computed_files and not computed_files.isdisjoint(transfer.list_files()))
        for transfer in transfers
    ):
        return threads
    files = {target.file for transfer in transfers for target in transfer.targets}
    return (
        threads if any(file in in_memory_files for file in files) else THREADS_PER_FILE * len(files)
    )


def plan_units(
    plan: Plan, number: int, sources: Sources, limits: TileLimits, share: WorkShare | None
) -> Iterator[Unit]:
    """Yield the units of the transfer, raw copy or check with the index *number*.

    If *share* is not None, only the units in this share are yielded. The order of the units depends
    only on the arguments.
    """
    transfers, root = plan.transfers, plan.source_root
    if number < len(transfers):
        tiles = tile_transfer(
            transfers[number], plan.records, limits, plan.get_checked_tensors(number)
        )
    elif number >= plan.first_check_number:
        checked = plan.checks[number - plan.first_check_number]
        root, tiles = checked.root, _split_check(checked, limits)
    else:
        raw_copy = plan.raw_copies[number - len(transfers)]
        root, tiles = raw_copy.root or root, _split_raw_copy(raw_copy, limits.max_unit_bytes)
    files = sources.get_files(root)
    for index, tile in share.iterate_tiles(number, tiles) if share else enumerate(tiles):
        yield Unit(number, index, tile, files)


def _split_raw_copy(raw: RawCopy, limit: int) -> Iterator[Tile]:
    for position in range(0, raw.nbytes, limit):
        size = min(limit, raw.nbytes - position)
        read = Read(raw.source, raw.offset + position, size, None)
        write = Write(raw.target, raw.target_offset + position, size, 0, -1, 0)
        yield Tile(size, (read,), (), (write,), True)


def _split_check(checked: CheckedRange, limits: TileLimits) -> Iterator[Tile]:
    for position, nbytes in checked.gaps:
        recorded = checked.recorded
        yield from iterate_check_tiles(recorded, recorded.offset + position, nbytes, limits)
