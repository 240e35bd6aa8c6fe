"""Which thread does what next."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import repeat
from pathlib import Path

import pytest

from ckptctl.catalog import build_memory_name
from ckptctl.planner.balance import group_work_by_file
from ckptctl.planner.copying.tile import Tile
from ckptctl.planner.plan import Plan, Transfer
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.execution.lanes import (
    BATCH_BYTES,
    THREADS_PER_FILE,
    Lane,
    LaneScheduler,
    Unit,
    count_useful_threads,
)
from ckptctl.storage.files import MemoryFiles
from tests.transfers import stored, target


def plan(*targets: tuple[str, ...], source: str = "s", dtype: str = "uint8") -> Plan:
    tensor = StridedTensor.from_entry(stored(source, [4])).cast(dtype)
    transfers = tuple(
        Transfer("t", tensor, tuple(target(file, 0, [4]) for file in files)) for files in targets
    )
    return Plan(Path("/"), {}, Path("/t"), False, (), (), transfers, (), "")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (plan(("a",)), THREADS_PER_FILE),
        (plan(("a",), ("a", "b")), 2 * THREADS_PER_FILE),
        (plan(("a",), ("a",)), THREADS_PER_FILE),
        (plan(("a",), dtype="float32"), 16),
        (plan((build_memory_name("x"),)), 16),
    ],
)
def test_threads_per_file_are_limited_to_useful_count(what: Plan, expected: int) -> None:
    (numbers,) = group_work_by_file(what, checks=True)
    memory = {build_memory_name("x")}
    assert count_useful_threads(what, memory, 16, numbers) == expected
    assert count_useful_threads(what, memory, 2, numbers) == 2


def test_surplus_threads_get_no_lane() -> None:
    work = LaneScheduler([Lane(iter(()), max_workers=2)], 3, None)
    crew = [work._claim_lane() for _ in range(3)]
    assert crew[0] is crew[1] is not None and crew[2] is None


UNITS = 32


def simulated(files: int, threads: int, most: int) -> tuple[float, int]:
    """Do so many lanes of equal units, each of which takes 1; return the time and lanes at once."""
    size = BATCH_BYTES
    unit = Unit(0, 0, Tile(size, (), (), (), True), MemoryFiles(b"", Path()))
    work = LaneScheduler(
        [Lane(repeat(unit, UNITS), most, UNITS * size) for _ in range(files)], threads, None
    )
    crew = [work.iterate_batches() for _ in range(threads)]
    events = [(0.0, number) for number in range(threads)]
    end, open_lanes = 0.0, 0
    while events:
        time, number = heappop(events)
        end = max(end, time)
        if next(crew[number], None) is not None:
            heappush(events, (time + 1, number))
        open_lanes = max(open_lanes, len(work._active_lanes))
    return end, open_lanes


@pytest.mark.parametrize(
    ("files", "threads"), [(9, 8), (9, 16), (17, 16), (16, 12), (3, 2), (1, 4), (40, 16), (5, 1)]
)
def test_threads_finish_at_similar_times(files: int, threads: int) -> None:
    end, _ = simulated(files, threads, THREADS_PER_FILE)
    assert end <= files * UNITS / threads + 2


def test_open_lanes_are_bounded_by_threads() -> None:
    _, at_once = simulated(100, 8, THREADS_PER_FILE)
    assert at_once <= 2 * 8
