"""Which thread does what next."""

from __future__ import annotations

import pytest

from ckptctl.catalog import memory_name
from ckptctl.planner.balance import lanes
from ckptctl.planner.plan import Operand, Plan, Side, Transfer
from ckptctl.storage.execution.lanes import PER_FILE, Lane, Lanes, most_threads

ROWS = ((0,),)


def operand(file: str) -> Operand:
    return Operand(file, 0, (0,), (4,), (1,), 4)


def plan(*targets: tuple[str, ...], source: str = "s", dtype: str = "uint8") -> Plan:
    transfers = tuple(
        Transfer(
            "t",
            "s",
            (4,),
            Side(ROWS, (operand(source),)),
            Side(ROWS, tuple(map(operand, files))),
            "uint8",
            dtype,
        )
        for files in targets
    )
    return Plan("/", {}, "/t", False, (), (), transfers, (), "")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (plan(("a",)), PER_FILE),
        (plan(("a",), ("a", "b")), 2 * PER_FILE),
        (plan(("a",), ("a",)), PER_FILE),
        (plan(("a",), dtype="float32"), 16),
        (plan((memory_name("x"),)), 16),
    ],
)
def test_as_many_threads_write_a_file_as_gain_by_it(what: Plan, expected: int) -> None:
    (numbers,) = lanes(what, checks=True)
    assert most_threads(what, 16, numbers) == expected
    assert most_threads(what, 2, numbers) == 2


def test_threads_that_would_not_gain_end() -> None:
    work = Lanes([Lane(iter(()), most=2)], None)
    crew = [work._claim() for _ in range(3)]
    assert crew[0] is crew[1] is not None and crew[2] is None
