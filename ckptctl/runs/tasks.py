"""Division of a run's checkpoints among the tasks of a job array, without coordination.

Every task computes the same division from the run itself, and takes its own part. Sources of the
variables: ``man sbatch`` (job arrays), and the documentation of Kubernetes on indexed jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptctl.errors import UsageError, format_option

SLURM_ID = "SLURM_ARRAY_TASK_ID"
SLURM_FIRST, SLURM_STEP = "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"
SLURM_COUNT = "SLURM_ARRAY_TASK_COUNT"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One of several tasks, which processes its own part of a run.

    Attributes:
        number: Number of the task, from 1 to *count*.
        count: Number of tasks.
        origin: Environment variable that determines the number, or an empty string.
    """

    number: int
    count: int
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def find_task(text: str | None, environment: Mapping[str, str]) -> Task | None:
    """Return the task that ``--task`` or the environment selects, or None if there is none.

    Args:
        text: Value of ``--task``, or None if only the environment can select a task.
        environment: Environment variables of the process.

    Raises:
        UsageError: The environment does not determine a task, or contradicts ``--task``.
    """
    number, _, count = (text or "").partition("/")
    if number:
        return Task(int(number), int(count))
    if SLURM_ID in environment:
        return _find_slurm_task(count, environment)
    if KUBERNETES_INDEX in environment:
        if not count:
            raise UsageError(
                "the number of tasks is unknown",
                where=KUBERNETES_INDEX,
                why="Kubernetes sets only the index of a pod, which begins with 0",
                hint=f"pass {format_option('--task /N')} with the job's `completions` as N, or "
                f"{format_option('--task 1/1')} to process all checkpoints",
            )
        number = str(_read_number(environment, KUBERNETES_INDEX) + 1)
        return _require_task(int(number), int(count), KUBERNETES_INDEX)
    if count:
        raise UsageError(
            "the number of this task is unknown",
            where=format_option(f"--task {text}"),
            why=f"neither {SLURM_ID} nor {KUBERNETES_INDEX} is set",
            hint=f"pass {format_option('--task I/N')}",
        )
    return None


def _find_slurm_task(count: str, environment: Mapping[str, str]) -> Task:
    """Return the task of a Slurm array, whose IDs may begin with any number and have a step.

    *count* is the number of tasks in ``--task``, or empty to use the size of the array.
    """
    first = _read_number(environment, SLURM_FIRST)
    step = _read_number(environment, SLURM_STEP) if SLURM_STEP in environment else 1
    size = _read_number(environment, SLURM_COUNT)
    if count and int(count) != size:
        raise UsageError(
            f"{format_option(f'--task /{count}')} contradicts the size of the Slurm array",
            where=SLURM_COUNT,
            why=f"the array has {size} tasks",
            hint=f"pass {format_option('--task I/N')} if the array is only a part of the tasks",
        )
    distance = _read_number(environment, SLURM_ID) - first
    if step < 1 or distance % step:
        raise _uneven_array_error(environment)
    return _require_task(distance // step + 1, size, SLURM_ID)


def _require_task(number: int, count: int, variable: str) -> Task:
    """Return a task, or raise if its number is out of range."""
    if 1 <= number <= count:
        return Task(number, count, variable)
    raise UsageError(
        f"task {number} is not one of 1 to {count}",
        where=variable,
        why="the IDs of the array do not increase in equal steps" if variable == SLURM_ID else None,
        hint=f"pass {format_option('--task I/N')}",
    )


def _uneven_array_error(environment: Mapping[str, str]) -> UsageError:
    return UsageError(
        "the number of this task is unknown",
        where=SLURM_ID,
        why=f"{environment[SLURM_ID]} is not {environment[SLURM_FIRST]} plus a multiple of "
        f"{environment.get(SLURM_STEP, '1')}",
        hint=f"pass {format_option('--task I/N')}",
    )


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise UsageError(
            f"{name} is not set",
            why="it is needed to determine the number of this task",
            hint=f"pass {format_option('--task I/N')}",
        )
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"`{text}` is not a number", where=name)
    return int(text)


def divide_evenly(sizes: Iterable[tuple[T, str, int]], count: int) -> Sequence[list[T]]:
    """Divide items into *count* parts with similar sizes, and keep their order in each part.

    The largest item goes to the smallest part, then the second largest, and so on (LPT, Graham
    1969). Equal inputs give equal parts.

    Args:
        sizes: Items, each with a unique name and its size in bytes.
        count: Number of parts.
    """
    items = list(sizes)
    by_size = sorted(range(len(items)), key=lambda index: (-items[index][2], items[index][1]))
    # Items without bytes also cost time, so the number of items decides between equal parts.
    loads = [(0, 0, part) for part in range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for index in by_size:
        nbytes, length, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (nbytes + items[index][2], length + 1, part))
    return [[items[index][0] for index in sorted(part)] for part in parts]
