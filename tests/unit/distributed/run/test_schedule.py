"""When a run is saved: steps, rank 0's clock, and what a function says; ranks agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptctl.distributed.run import schedule
from ckptctl.distributed.run.manager_options import ManagerOptions
from ckptctl.distributed.run.schedule import Schedule
from ckptctl.errors import CkptError, UsageError
from ckptctl.ranks.coordinator import RankCollectives, SingleProcess


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.steady, self.date = 1000.0, 1e9

    def monotonic(self) -> float:
        return self.steady

    def time(self) -> float:
        return self.date

    def sleep(self, seconds: float) -> None:
        self.steady += seconds
        self.date += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    stand_in = Clock()
    monkeypatch.setattr(schedule, "time", stand_in)
    yield stand_in


class Made(Schedule):
    """A schedule of rules, and what it asks for."""

    def __init__(self, **rules: Any) -> None:
        self.saving, self.there = False, False
        self.ranks: RankCollectives | None = SingleProcess()
        options = ManagerOptions(**rules)
        super().__init__(options, lambda: self.saving, lambda: self.there, self.other_ranks)

    def other_ranks(self) -> RankCollectives:
        assert self.ranks is not None
        return self.ranks

    def asks(self, step: int, ranks: RankCollectives | None = None) -> bool:
        self.ranks = ranks or self.ranks
        return self.is_due(step)


def of(made: Made, *steps: int) -> list[int]:
    """Return those of *steps* that are due, and save them."""
    due = []
    for step in steps:
        if made.asks(step):
            due.append(step)
            made.record_save()
    return due


def test_step_rules_need_no_communication() -> None:
    asked = (0, 3, 499, 500, 501, 1000)
    made = Made(save_every=500, save_steps=[3])
    made.ranks = None
    assert [step for step in asked if made.is_due(step)] == [3, 500, 1000]
    assert not Made().is_due(500)


def test_skipped_multiple_triggers_one_save() -> None:
    """Once, whatever is asked twice, and not because training begins or goes on behind one."""
    assert of(Made(save_every=100), 130, 160, 190, 220, 220, 250, 400, 401) == [220, 220, 400]
    made = Made(save_every=100)
    made.record_resume(195, 0.0)
    assert of(made, 205, 250) == [205]
    made.record_resume(50, 0.0)
    assert of(made, 60, 90, 110) == [110]


def test_interval_counts_from_last_save(clock: Clock) -> None:
    made = Made(save_interval="30m", save_every=10)
    assert of(made, 1) == []
    clock.sleep(1799)
    assert of(made, 2, 10) == [10]
    clock.sleep(1799)
    assert of(made, 11) == []
    clock.sleep(1)
    made.saving = True
    assert of(made, 12) == []
    made.saving = False
    assert of(made, 13, 14) == [13]


def test_zero_interval_saves_at_every_step_unless_busy(clock: Clock) -> None:
    made = Made(save_interval=0)
    assert of(made, 1, 2) == [1, 2]
    made.saving = True
    assert of(made, 3) == []


@pytest.mark.parametrize("jump", [1e9, -1e9, 3600.0])
def test_clock_jump_does_not_trigger_save(clock: Clock, jump: float) -> None:
    made = Made(save_interval=60)
    made.record_save()
    clock.date += jump
    assert of(made, 1) == []
    clock.steady += 60
    assert of(made, 2, 3) == [2]


@pytest.mark.parametrize(("age", "left"), [(20.0, 40.0), (-1e9, 60.0), (1e9, 0.0), (60.0, 0.0)])
def test_interval_continues_from_resumed_save(clock: Clock, age: float, left: float) -> None:
    """A date that is wrong costs an interval at most."""
    made = Made(save_interval=60)
    made.record_resume(5, clock.date - age)
    if left:
        clock.sleep(left - 1)
        assert of(made, 6) == []
        clock.sleep(1)
    assert of(made, 7, 8) == [7]


def test_save_first_applies_only_to_empty_run() -> None:
    assert of(Made(save_first=True), 0, 1) == [0]
    made = Made(save_first=True)
    made.there = True
    assert of(made, 7, 8) == []


class Two(SingleProcess):
    """This process, as a rank, beside another one whose answers are known."""

    world = 2

    def __init__(self, rank: int, other: tuple[object, object]) -> None:
        self.rank, self._other = rank, other

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self._other] if self.rank == 0 else [self._other, value]


def said(step: int, *, wanted: bool = False) -> tuple[object, None]:
    return schedule._RankVote(step, wanted, True), None


def test_rank_0_clock_decides(clock: Clock) -> None:
    made = Made(save_interval=60)
    clock.sleep(1000)
    assert not made.asks(1, Two(1, said(1)))
    assert made.asks(1, Two(0, said(1)))
    made.record_save()
    assert made.asks(2, Two(1, said(2, wanted=True)))


def test_save_if_on_any_rank_triggers_save() -> None:
    asked: list[int] = []

    def third(step: int) -> bool:
        asked.append(step)
        return step == 3

    made = Made(save_if=third)
    assert of(made, 1, 2, 3) == [3]
    assert asked == [1, 2, 3]
    assert made.asks(4, Two(0, said(4, wanted=True)))
    assert not made.asks(5, Two(0, said(5)))


def test_save_if_error_is_raised_on_every_rank() -> None:
    with pytest.raises(ZeroDivisionError):
        Made(save_if=lambda step: 1 // 0).asks(1)
    with pytest.raises(CkptError, match="rank 1: ZeroDivisionError"):
        Made(save_if=bool).asks(1, Two(0, (None, CkptError("ZeroDivisionError: 1 // 0"))))


def test_ranks_at_different_steps_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="same step"):
        Made(save_if=bool).asks(1, Two(0, said(2)))


@pytest.mark.parametrize(
    "rules",
    [
        {"save_every": 0},
        {"save_interval": "soon"},
        {"save_interval": -1},
        {"save_steps": [True]},
        {"save_steps": 5},
        {"save_steps": ["a"]},
        {"save_if": 5},
    ],
)
def test_invalid_schedule_rules_are_usage_errors(rules: Any) -> None:
    with pytest.raises(UsageError):
        ManagerOptions(**rules)


def test_save_steps_accepts_torch_tensor() -> None:
    assert of(Made(save_steps=torch.tensor([2, 4])), 1, 2) == [2]
