"""The ranks that work together, as everything here sees them: gather, share, wait, fail together.

One process without a process group is a group of one, for which all of it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

from ckptctl.errors import CkptError, UsageError

T = TypeVar("T")
R = TypeVar("R")


class Coordinator(Protocol):
    """A group of ranks; every method is called by all of them, in the same order.

    Attributes:
        rank: Number of this process among them.
        world: How many there are.
    """

    rank: int
    world: int

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, None elsewhere."""

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value."""

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this rank's one of the values that rank 0 has."""


class Alone:
    """A group of one."""

    rank = 0
    world = 1

    def all_gather(self, value: T) -> list[T]:
        """See :class:`Coordinator`."""
        return [value]

    def gather(self, value: T) -> list[T] | None:
        """See :class:`Coordinator`."""
        return [value]

    def broadcast(self, value: T | None) -> T:
        """See :class:`Coordinator`."""
        return cast(T, value)

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`Coordinator`."""
        assert values is not None
        return values[0]


class RankError(CkptError):
    """Another rank failed, so this one has stopped, too."""

    def __init__(self, rank: int, error: CkptError) -> None:
        super().__init__(
            f"rank {rank}: {error.what}", where=error.where, why=error.why, hint=error.hint
        )
        self.exit_code = error.exit_code
        self.code = error.code


def together(ranks: Coordinator, work: Callable[[], T]) -> T:
    """Do *work* on every rank; when it fails on one of them, raise on all.

    Like that of all functions here, the work uses no collective itself.
    """
    return work() if ranks.world == 1 else telling(ranks, lambda: (work(), None))[0]


def telling(ranks: Coordinator, work: Callable[[], tuple[T, R]]) -> tuple[T, list[R]]:
    """Do *work* on every rank, as :func:`together`, and send a part of each result to all."""
    result, error = _attempt(work)
    found = ranks.all_gather((result[1] if result else None, sendable(error)))
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(found):
        if other is not None:
            raise RankError(rank, other)
    assert result
    return result[0], [cast(R, told) for told, _ in found]


def on_first(ranks: Coordinator, work: Callable[[], T]) -> T | None:
    """Do *work* on rank 0 alone, where its result is returned; when it fails, raise on all."""
    return together(ranks, lambda: work() if ranks.rank == 0 else None)


def sendable(error: BaseException | None) -> CkptError | None:
    """Return an error in a form in which other ranks can be told of it."""
    if error is None or isinstance(error, CkptError):
        return error
    if isinstance(error, KeyboardInterrupt):
        stopped = CkptError("interrupted")
        stopped.exit_code, stopped.code = 130, "interrupted"
        return stopped
    return CkptError(f"{type(error).__name__}: {error}")


def through_first(
    ranks: Coordinator, work: Callable[[], T], answer: Callable[[list[T]], Sequence[R]]
) -> R:
    """Do *work* on every rank and let rank 0 answer; when anything fails, raise on all.

    *answer* is called on rank 0 alone, with the results of all ranks, and returns a value for each.
    """
    result, error = _attempt(work)
    found = ranks.gather((result, sendable(error)))
    answers: list[tuple[R | None, int, CkptError | None]] | None = None
    own: BaseException | None = None
    if found is not None:
        answers, own = _answers(found, answer)
    mine, failed, other = ranks.scatter(answers)
    if error is not None or own is not None:
        raise error or own or AssertionError
    if other is not None:
        raise RankError(failed, other)
    return cast(R, mine)


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:
        return None, failure


def _answers(
    found: Sequence[tuple[T | None, CkptError | None]], answer: Callable[[list[T]], Sequence[R]]
) -> tuple[list[tuple[R | None, int, CkptError | None]], BaseException | None]:
    """Return the answer for each rank, and the error of rank 0 itself."""
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            return [(None, rank, failure)] * len(found), None
    parts, error = _attempt(lambda: answer([cast(T, result) for result, _ in found]))
    if parts is None:
        return [(None, 0, sendable(error))] * len(found), error
    return [(part, 0, None) for part in parts], None


def format_ranks(numbers: Sequence[int]) -> str:
    """Name ranks in a message, the first eight of many."""
    named = ", ".join(map(str, numbers[:8]))
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{', …' if len(numbers) > 8 else ''}"


def require_same(ranks: Coordinator, said: Mapping[str, object]) -> None:
    """Prove that all ranks say the same; the keys of *said* are for the message."""
    if ranks.world == 1:
        return
    found = ranks.all_gather({name: repr(value) for name, value in said.items()})
    together(ranks, lambda: _compare(found))


def _compare(found: Sequence[Mapping[str, str]]) -> None:
    for rank, other in enumerate(found):
        for name in dict.fromkeys([*found[0], *other]):
            values = [one.get(name, "not set") for one in (found[0], other)]
            if values[0] != values[1]:
                raise UsageError(
                    f"ranks 0 and {rank} have different settings",
                    where=name,
                    why=f"{values[0]} on rank 0, {values[1]} on rank {rank}",
                    hint="run the same command line on all ranks, with access to the same files",
                )
