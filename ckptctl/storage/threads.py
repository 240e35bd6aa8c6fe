"""How many threads a process takes when nobody says: its part of the cores of its host."""

from __future__ import annotations

import os

MOST = 4
LAUNCHERS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "SLURM_STEP_TASKS_PER_NODE",  # srun; like "4(x2)"
)
"""Where launchers say how many processes they start on each host."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processes_here() -> int | None:
    """Return how many processes the launcher has started on this host; None: it does not say."""
    for name in LAUNCHERS:
        digits = os.environ.get(name, "").partition("(")[0].partition(",")[0]
        if digits.isdecimal() and int(digits):
            return int(digits)
    return None


def default_threads(processes: int = 1) -> int:
    """Return the number of threads of one of several processes: its cores, at most four.

    More threads than cores make a save of many ranks slower: those that write one file wait for
    each other in the kernel, and that takes the time of the others.

    Args:
        processes: How many there are, where no launcher says how many of them are on this host.
    """
    return max(1, min(MOST, cores() // (processes_here() or processes)))
