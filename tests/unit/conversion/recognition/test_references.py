"""Comparisons with references that several ranks share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

from ckptctl.conversion.recognition.references import (
    Reference,
    ReferenceResult,
    compare_with_reference,
    plan_on_all_ranks,
)
from ckptctl.errors import CkptError, MappingError

WORLD = 3


class Group:
    """Ranks that are threads; collectives other than ``all_gather`` are not needed."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world = rank, WORLD
        self._values, self._barrier = values, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(30)
        gathered = list(self._values)
        self._barrier.wait(30)
        return gathered


def run(plan: Callable[[int], Any]) -> list[Any]:
    """Return what planning returned or raised on each rank."""
    values, barrier = [None] * WORLD, threading.Barrier(WORLD)

    def call(rank: int) -> Any:
        group: Any = Group(rank, values, barrier)
        try:
            return plan_on_all_ranks(group, lambda: plan(rank))
        except CkptError as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        futures = [pool.submit(copy_context().run, call, rank) for rank in range(WORLD)]
        return [future.result(60) for future in futures]


def reference(compared: list[str], error: CkptError | None = None) -> Reference:
    def compare(config: Any, shapes: Any) -> ReferenceResult:
        compared.append(config["model_type"])
        if error:
            raise error
        return ReferenceResult(source=f"of {config['model_type']}")

    return Reference("test", (), compare)


def test_only_rank_zero_compares() -> None:
    compared: list[str] = []
    known = reference(compared)

    def plan(rank: int) -> list[str]:
        found = [compare_with_reference(known, {"model_type": name}, {"x": (1,)}) for name in "ab"]
        return [one.source for one in found]

    assert run(plan) == [["of a", "of b"]] * WORLD
    assert compared == ["a", "b"]


def test_rank_with_other_tensors_compares_them_itself() -> None:
    compared: list[str] = []
    known = reference(compared)

    def plan(rank: int) -> str:
        config = {"model_type": "b" if rank == 1 else "a"}
        return compare_with_reference(known, config, {}).source

    assert run(plan) == ["of a", "of b", "of a"]
    assert compared == ["a", "b"]


@pytest.mark.parametrize("failing", range(WORLD))
def test_failure_before_comparison_is_raised_on_all_ranks(failing: int) -> None:
    compared: list[str] = []
    known = reference(compared)

    def plan(rank: int) -> str:
        if rank == failing:
            raise MappingError("no file")
        return compare_with_reference(known, {"model_type": "a"}, {}).source

    assert [type(error) for error in run(plan)].count(MappingError) == 1
    assert all("no file" in str(error) for error in run(plan))


def test_failed_comparison_is_raised_on_all_ranks() -> None:
    compared: list[str] = []
    known = reference(compared, MappingError("not comparable"))
    found = run(lambda rank: compare_with_reference(known, {"model_type": "a"}, {}).source)
    assert all("not comparable" in str(error) for error in found)
    assert compared == ["a"]


def test_plans_without_comparison_are_built_once() -> None:
    calls: list[int] = []

    def plan(rank: int) -> int:
        calls.append(rank)
        return rank

    assert run(plan) == [0, 1, 2]
    assert sorted(calls) == [0, 1, 2]
