"""The ranks of a command that was started by torchrun or srun.

torch is imported only if there are several ranks. Rank 0 prints results and reports the failures
of all ranks. Another rank reports its own failure only if rank 0 cannot know of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptctl.cli.output import Printer
from ckptctl.errors import CkptError, UsageError, quote_names
from ckptctl.ranks.coordinator import Coordinator, SingleProcess
from ckptctl.storage.threads import create_daemon

T = TypeVar("T")
SOON = 10.0
"""Seconds after which a rank that waits for the others prints a notice."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def coordinator(single_process: bool, machine: bool) -> Coordinator:
    """Join the ranks of this command, or return a group of one process.

    Args:
        single_process: Ignore torchrun's environment variables.
        machine: Whether stderr is read by a program.

    Raises:
        UsageError: The environment sets WORLD_SIZE but not how to reach the other ranks.
        StorageError: The other ranks do not respond.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if single_process or not world.isdecimal() or int(world) < 2:
        return SingleProcess()
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            "the environment does not specify how to reach the other ranks",
            why=f"WORLD_SIZE is {world}, but {quote_names(missing, quote='')} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            hint="start it with torchrun, or pass `--single-process` to run a single process",
        )
    if not _met:
        _met.append(_Ranks(Printer(machine)))
    return _met[0]


def told() -> bool:
    """Return whether rank 0 already has this failure and will print it."""
    return any(one.rank > 0 and one.told for one in _met)


class Silent(Printer):
    """Printer of ranks other than 0, which prints only errors."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def text(self, text: str) -> None:
        """Print nothing."""

    def warning(self, text: str) -> None:
        """Print nothing."""


def output_of(ranks: Coordinator, machine: bool, quiet: bool) -> Printer:
    """Make the printer of this rank. Ranks other than 0 print only errors."""
    return Printer(machine, quiet) if ranks.rank == 0 else Silent()


class _Ranks:
    """The process group of all ranks.

    Attributes:
        told: Whether the ranks have exchanged a failure.
    """

    def __init__(self, output: Printer) -> None:
        from ckptctl.distributed.group import init_group_from_env

        self._group = _waited_for(init_group_from_env, output)
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


_met: list[_Ranks] = []


def _waited_for(meet: Callable[[], T], output: Printer) -> T:
    """Call *meet* in a thread, because torch waits without handling Ctrl-C or SIGTERM."""
    from concurrent.futures import Future

    met: Future[T] = Future()

    def work() -> None:
        try:
            met.set_result(meet())
        except BaseException as error:
            met.set_exception(error)

    create_daemon(work).start()
    try:
        return met.result(SOON)
    except TimeoutError:
        output.warning(
            f"waiting for the other ranks (this is rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']}, according to torchrun's environment variables); "
            "pass `--single-process` to run a single process inside such a job"
        )
    return met.result()


def _tells(value: object) -> bool:
    """Return whether a value that ranks exchanged is or contains a failure."""
    if isinstance(value, tuple):
        return any(map(_tells, value))
    return isinstance(value, CkptError)
