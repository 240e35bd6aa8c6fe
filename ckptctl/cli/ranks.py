"""The ranks that torchrun, or srun, started this command on; one process is alone.

torch is imported only where there are several. Rank 0 prints; what fails on any rank is told by it,
and by the rank itself only if rank 0 cannot know.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from ckptctl.cli.output import Output
from ckptctl.errors import CkptError, UsageError
from ckptctl.ops.ranks.coordinator import Alone, Coordinator

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@cache
def coordinator() -> Coordinator:
    """Return the ranks of this command.

    Raises:
        UsageError: The environment names several, but does not say how to reach them.
        StorageError: They do not answer.
    """
    if _number("WORLD_SIZE", 1) < 2:
        return Alone()
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            "the environment does not say where the other ranks are",
            why=f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, {', '.join(missing)} not set",
            hint="start it with torchrun, or set what torchrun sets",
        )
    return _Ranks()


def told() -> bool:
    """Return whether rank 0 knows of the failure that ends this command, and prints it."""
    found = coordinator() if coordinator.cache_info().currsize else None
    return isinstance(found, _Ranks) and found.rank > 0 and found.told


class Silent(Output):
    """What ranks other than 0 print: nothing but errors."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def text(self, text: str) -> None:
        """Print nothing."""

    def warning(self, text: str) -> None:
        """Print nothing."""


def output_of(ranks: Coordinator, machine: bool, quiet: bool) -> Output:
    """Return what prints on this rank; see :class:`Output`."""
    return Output(machine, quiet) if ranks.rank == 0 else Silent()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


class _Ranks:
    """The group that all processes are in.

    Attributes:
        told: Whether ranks have told each other of a failure.
    """

    def __init__(self) -> None:
        from ckptctl.distributed.group import launched

        self._group = launched()
        self.rank = self._group.rank
        self.world = self._group.world
        self.told = False

    def all_gather(self, value: T) -> list[T]:
        """See :class:`Coordinator`."""
        found = self._group.all_gather(value)
        self.told = self.told or any(map(_tells, found))
        return found

    def gather(self, value: T) -> list[T] | None:
        """See :class:`Coordinator`."""
        return self._group.gather(value)

    def broadcast(self, value: T | None) -> T:
        """See :class:`Coordinator`."""
        return self._group.broadcast(value)

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`Coordinator`."""
        found = self._group.scatter(values)
        self.told = self.told or _tells(found)
        return found


def _tells(value: object) -> bool:
    """Return whether what ranks exchanged is a failure, or says of one."""
    if isinstance(value, tuple):
        return any(map(_tells, value))
    return isinstance(value, CkptError)
