"""The ranks that torchrun, or srun, started this command on; one process is alone.

torch is imported only where there are several. Rank 0 prints; what fails on any rank is told by it,
and by the rank itself only if rank 0 cannot know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptctl.cli.output import Printer
from ckptctl.errors import CkptError, UsageError, listed
from ckptctl.ranks.coordinator import Alone, Coordinator
from ckptctl.storage.threads import daemon

T = TypeVar("T")
SOON = 10.0
"""Seconds after which ranks that others do not answer say so."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def coordinator(single_process: bool, machine: bool) -> Coordinator:
    """Return the ranks of this command, or a group of one.

    Args:
        single_process: Whether the environment does not count.
        machine: Whether standard error is for a program.

    Raises:
        UsageError: The environment names several, but does not say how to reach them.
        StorageError: They do not answer.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if single_process or not world.isdecimal() or int(world) < 2:
        return Alone()
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            "the environment does not specify how to reach the other ranks",
            why=f"WORLD_SIZE is {world}, but {listed(missing, quote='')} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            hint="start it with torchrun, or pass `--single-process` to run a single process",
        )
    if not _met:
        _met.append(_Ranks(Printer(machine)))
    return _met[0]


def told() -> bool:
    """Return whether rank 0 knows of the failure that ends this command, and prints it."""
    return any(one.rank > 0 and one.told for one in _met)


class Silent(Printer):
    """What ranks other than 0 print: nothing but errors."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def text(self, text: str) -> None:
        """Print nothing."""

    def warning(self, text: str) -> None:
        """Print nothing."""


def output_of(ranks: Coordinator, machine: bool, quiet: bool) -> Printer:
    """Return what prints on this rank; see :class:`Output`."""
    return Printer(machine, quiet) if ranks.rank == 0 else Silent()


class _Ranks:
    """The group that all processes are in.

    Attributes:
        told: Whether ranks have told each other of a failure.
    """

    def __init__(self, output: Printer) -> None:
        from ckptctl.distributed.group import launched

        self._group = _waited_for(launched, output)
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
    """Return what *meet* does, in a thread: torch waits for ranks deaf to SIGTERM and Ctrl-C."""
    from concurrent.futures import Future

    met: Future[T] = Future()

    def work() -> None:
        try:
            met.set_result(meet())
        except BaseException as error:
            met.set_exception(error)

    daemon(work).start()
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
    """Return whether what ranks exchanged is a failure, or says of one."""
    if isinstance(value, tuple):
        return any(map(_tells, value))
    return isinstance(value, CkptError)
