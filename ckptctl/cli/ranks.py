"""Communication between the ranks of a command that torchrun or srun started.

torch is imported only if there are several ranks. Rank 0 prints results and reports the failures
of all ranks. Another rank reports its own failure only if rank 0 cannot know of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptctl.cli.output import Printer
from ckptctl.errors import CkptError, UsageError, quote_names
from ckptctl.ranks.coordinator import RankCollectives, SingleProcess
from ckptctl.storage.threads import create_daemon

T = TypeVar("T")
SLOW_RANK_NOTICE_SECONDS = 10.0
"""Seconds after which a rank that waits for the others prints a notice."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def count_ranks() -> int:
    """Return the number of ranks of this job, according to torchrun's environment variables."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdecimal() else 1


def join_ranks(single_process: bool, machine: bool) -> RankCollectives:
    """Join the ranks of this command, or return a group of one process.

    Args:
        single_process: Whether to ignore torchrun's environment variables.
        machine: Whether stderr is read by a program.

    Raises:
        UsageError: The environment sets WORLD_SIZE but not how to reach the other ranks.
        StorageError: The other ranks do not respond.
    """
    world = count_ranks()
    if single_process or world < 2:
        return SingleProcess()
    missing = [name for name in TORCHRUN_VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            "the environment does not specify how to reach the other ranks",
            why=f"WORLD_SIZE is {world}, but {quote_names(missing, quote='')} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            hint="start it with torchrun, or pass `--single-process` to run a single process",
        )
    if not _joined_ranks:
        _joined_ranks.append(_TorchRanks(Printer(machine)))
    return _joined_ranks[0]


def is_reported_by_rank_zero() -> bool:
    """Return whether rank 0 has received this failure and will print it."""
    return any(ranks.rank > 0 and ranks.failure_is_shared for ranks in _joined_ranks)


class SilentPrinter(Printer):
    """Printer of ranks other than 0, which prints only errors."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def print_text(self, text: str) -> None:
        """Print nothing."""

    def print_warning(self, text: str) -> None:
        """Print nothing."""


def make_rank_printer(ranks: RankCollectives, machine: bool, quiet: bool) -> Printer:
    """Make the printer of this rank. Ranks other than 0 print only errors."""
    return Printer(machine, quiet) if ranks.rank == 0 else SilentPrinter()


class _TorchRanks:
    """Collective operations on the torch process group of all ranks.

    Attributes:
        failure_is_shared: Whether the ranks have exchanged a failure.
    """

    def __init__(self, output: Printer) -> None:
        from ckptctl.distributed.group import init_group_from_env

        self._group = _join_with_notice(init_group_from_env, output)
        self.rank = self._group.rank
        self.world = self._group.world
        self.failure_is_shared = False

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        gathered = self._group.all_gather(value)
        self.failure_is_shared = self.failure_is_shared or any(map(_has_failure, gathered))
        return gathered

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, or None on other ranks."""
        return self._group.gather(value)

    def broadcast(self, value: T | None) -> T:
        """Return the value of rank 0 on every rank."""
        return self._group.broadcast(value)

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this rank's element of *values*, which only rank 0 passes."""
        received = self._group.scatter(values)
        self.failure_is_shared = self.failure_is_shared or _has_failure(received)
        return received


_joined_ranks: list[_TorchRanks] = []


def _join_with_notice(join_group: Callable[[], T], output: Printer) -> T:
    """Call *join_group*, and print a warning while it waits long for other ranks.

    The call runs in a thread, because torch waits without handling Ctrl-C or SIGTERM.
    """
    from concurrent.futures import Future

    future: Future[T] = Future()

    def set_future() -> None:
        try:
            future.set_result(join_group())
        except BaseException as error:
            future.set_exception(error)

    create_daemon(set_future).start()
    try:
        return future.result(SLOW_RANK_NOTICE_SECONDS)
    except TimeoutError:
        output.print_warning(
            f"waiting for the other ranks (this is rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']}, according to torchrun's environment variables); "
            "pass `--single-process` to run a single process inside such a job"
        )
    return future.result()


def _has_failure(value: object) -> bool:
    """Return whether a value that ranks exchanged is or contains a failure."""
    if isinstance(value, tuple):
        return any(map(_has_failure, value))
    return isinstance(value, CkptError)
