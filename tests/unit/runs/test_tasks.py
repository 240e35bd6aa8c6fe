"""Division of a run among tasks, and the variables of schedulers that select one."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from ckptctl.errors import UsageError
from ckptctl.run_options import check_task, parse_step_range
from ckptctl.runs.tasks import divide_evenly, find_task


def slurm(task: int, first: int, last: int, step: int = 1) -> dict[str, str]:
    """Return the variables that sbatch sets for ``--array=FIRST-LAST:STEP``."""
    values = {
        "ID": task,
        "MIN": first,
        "MAX": last,
        "STEP": step,
        "COUNT": len(range(first, last + 1, step)),
    }
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {}, None),
        ("2/8", {}, "2/8"),
        ("2/8", slurm(1, 1, 4), "2/8"),
        (None, slurm(1, 1, 4), "1/4"),
        (None, slurm(4, 1, 4), "4/4"),
        (None, slurm(0, 0, 3), "1/4"),
        (None, slurm(17, 5, 20, 4), "4/4"),
        ("/4", slurm(2, 0, 3), "3/4"),
        ("/4", {"JOB_COMPLETION_INDEX": "0"}, "1/4"),
        ("/4", {"JOB_COMPLETION_INDEX": "3"}, "4/4"),
        ("1/1", {"JOB_COMPLETION_INDEX": "3"}, "1/1"),
    ],
)
def test_task_is_found(
    text: str | None, environment: Mapping[str, str], expected: str | None
) -> None:
    task = find_task(text, environment)
    assert (str(task) if task else None) == expected


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("/4", {}, "number of this task is unknown"),
        (None, {"JOB_COMPLETION_INDEX": "0"}, "number of tasks is unknown"),
        ("/4", {"JOB_COMPLETION_INDEX": "4"}, "task 5 is not one of 1 to 4"),
        ("/4", {"JOB_COMPLETION_INDEX": "x"}, "`x` is not a number"),
        ("/5", slurm(2, 0, 3), "contradicts the size of the Slurm array"),
        (None, {"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_MIN is not set"),
        (None, {**slurm(1, 1, 3), "SLURM_ARRAY_TASK_ID": "-1"}, "is not a number"),
        # --array=1,3,7
        (None, {**slurm(7, 1, 7), "SLURM_ARRAY_TASK_COUNT": "3"}, "task 7 is not one of 1 to 3"),
        (None, {**slurm(3, 1, 7, 4), "SLURM_ARRAY_TASK_COUNT": "3"}, "task is unknown"),
        (None, {**slurm(1, 1, 3), "SLURM_ARRAY_TASK_STEP": "0"}, "task is unknown"),
    ],
)
def test_unclear_task_is_a_usage_error(
    text: str | None, environment: Mapping[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        find_task(text, environment)


@pytest.mark.parametrize(
    "text", ["", "/", "1", "1/", "a/b", "1/0", "/0", "0/1", "5/4", "1 /2", "١/٢"]
)
def test_malformed_task_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        check_task(text)


def test_parts_are_disjoint_balanced_and_do_not_depend_on_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.choice([0, 7, rng.randint(1, 1000)]) for _ in range(rng.randint(0, 40))]
        items = [(name, f"{name}", size) for name, size in enumerate(sizes)]
        count = rng.randint(1, 12)
        parts = divide_evenly(items, count)
        assert sorted(name for part in parts for name in part) == list(range(len(items)))
        assert all(part == sorted(part) for part in parts), "the order of the run is kept"
        loads = [sum(sizes[name] for name in part) for part in parts]
        # Graham's bound of LPT
        best = max([sum(sizes) / count, *sizes, 0])
        assert max(loads) <= 4 / 3 * best + max([0, *sizes]) / 3 + 1e-9
        shuffled = rng.sample(items, len(items))
        again = divide_evenly(shuffled, count)
        assert [sorted(part) for part in again] == [sorted(part) for part in parts]


def test_equal_checkpoints_are_divided_by_number() -> None:
    for size in (0, 100):
        parts = divide_evenly([(n, f"step-{n}", size) for n in range(10)], 4)
        assert sorted(map(len, parts)) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("100", [100]),
        ("100:300:100", [100, 200, 300]),
        ("100:299:100", [100, 200]),
        (":2", [0, 1, 2]),
        ("5:5", [5]),
        ("0:4:", [0, 1, 2, 3, 4]),
    ],
)
def test_step_range_includes_its_last_step(text: str, steps: list[int]) -> None:
    assert list(parse_step_range(text) or ()) == steps
    assert parse_step_range("step-*") is None and parse_step_range("1e3") is None
    assert 10**18 in (parse_step_range("7:") or ())


def test_long_range_is_a_usage_error() -> None:
    for text in ("9" * 5000, f":{'9' * 5000}", f"1:2:{'9' * 5000}"):
        with pytest.raises(UsageError, match="too long for a range of steps"):
            parse_step_range(text)
