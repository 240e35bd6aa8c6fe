"""Interface to a group of ranks, and work that succeeds or fails on all of them.

A single process without a process group is a group of one, for which collectives cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

from ckptctl.errors import CkptError, UsageError

T = TypeVar("T")
R = TypeVar("R")


class RankCollectives(Protocol):
    """Group of ranks whose methods are collectives, called by all ranks in the same order.

    Attributes:
        rank: Rank of this process, from 0.
        world: Number of ranks.
    """

    rank: int
    world: int

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, or None on other ranks."""

    def broadcast(self, value: T | None) -> T:
        """Return the value of rank 0 on every rank."""

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this rank's element of *values*, which only rank 0 passes."""


class SingleProcess:
    """Group with a single rank, whose collectives do not communicate."""

    rank = 0
    world = 1

    def all_gather(self, value: T) -> list[T]:
        """See :class:`RankCollectives`."""
        return [value]

    def gather(self, value: T) -> list[T] | None:
        """See :class:`RankCollectives`."""
        return [value]

    def broadcast(self, value: T | None) -> T:
        """See :class:`RankCollectives`."""
        return cast(T, value)

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`RankCollectives`."""
        assert values is not None
        return values[0]


class RankError(CkptError):
    """Failure of another rank, raised on this one."""

    def __init__(self, rank: int, error: CkptError) -> None:
        super().__init__(
            f"rank {rank}: {error.what}", where=error.where, why=error.why, hint=error.hint
        )
        self.exit_code = error.exit_code
        self.code = error.code


def run_on_all_ranks(ranks: RankCollectives, work: Callable[[], T]) -> T:
    """Run *work* on every rank, and raise on all ranks if it fails on any.

    As for all functions of this module, *work* must not use collectives.
    """
    return work() if ranks.world == 1 else run_and_all_gather(ranks, lambda: (work(), None))[0]


def run_and_all_gather(
    ranks: RankCollectives, work: Callable[[], tuple[T, R]]
) -> tuple[T, list[R]]:
    """Run *work* on every rank, and all-gather the second element of its result.

    If *work* fails on any rank, all ranks raise.
    """
    result, error = _run_and_catch(work)
    outcomes = ranks.all_gather((result[1] if result else None, to_sendable_error(error)))
    if error is not None:
        raise error
    for rank, (_, remote_error) in enumerate(outcomes):
        if remote_error is not None:
            raise RankError(rank, remote_error)
    assert result
    return result[0], [cast(R, part) for part, _ in outcomes]


def run_on_rank_zero(ranks: RankCollectives, work: Callable[[], T]) -> T | None:
    """Run *work* on rank 0 and return its result there, or None elsewhere.

    If it fails, all ranks raise.
    """
    return run_on_all_ranks(ranks, lambda: work() if ranks.rank == 0 else None)


def to_sendable_error(error: BaseException | None) -> CkptError | None:
    """Convert an exception to a `CkptError` that can be pickled for other ranks."""
    if error is None or isinstance(error, CkptError):
        return error
    if isinstance(error, KeyboardInterrupt):
        interrupted = CkptError("interrupted")
        interrupted.exit_code, interrupted.code = 130, "interrupted"
        return interrupted
    return CkptError(f"{type(error).__name__}: {error}")


def gather_and_scatter(
    ranks: RankCollectives, work: Callable[[], T], answer: Callable[[list[T]], Sequence[R]]
) -> R:
    """Gather results of *work* on rank 0, and scatter the values that *answer* computes there.

    *answer* is called with the results of all ranks and returns one value per rank. If anything
    fails, all ranks raise.
    """
    result, error = _run_and_catch(work)
    outcomes = ranks.gather((result, to_sendable_error(error)))
    answers: list[tuple[R | None, int, CkptError | None]] | None = None
    rank_zero_error: BaseException | None = None
    if outcomes is not None:
        answers, rank_zero_error = _compute_answers(outcomes, answer)
    own_answer, failed_rank, remote_error = ranks.scatter(answers)
    if error is not None or rank_zero_error is not None:
        raise error or rank_zero_error or AssertionError
    if remote_error is not None:
        raise RankError(failed_rank, remote_error)
    return cast(R, own_answer)


def _run_and_catch(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as failure:
        return None, failure


def _compute_answers(
    outcomes: Sequence[tuple[T | None, CkptError | None]], answer: Callable[[list[T]], Sequence[R]]
) -> tuple[list[tuple[R | None, int, CkptError | None]], BaseException | None]:
    """Return one entry to scatter per rank, and the exception that rank 0 must raise or None."""
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            return [(None, rank, failure)] * len(outcomes), None
    answers, error = _run_and_catch(lambda: answer([cast(T, result) for result, _ in outcomes]))
    if answers is None:
        return [(None, 0, to_sendable_error(error))] * len(outcomes), error
    return [(own_answer, 0, None) for own_answer in answers], None


def format_ranks(rank_numbers: Sequence[int]) -> str:
    """Format rank numbers for a message, with an ellipsis after the first eight."""
    listing = ", ".join(map(str, rank_numbers[:8]))
    return (
        f"rank{'s' if len(rank_numbers) > 1 else ''} "
        f"{listing}{', …' if len(rank_numbers) > 8 else ''}"
    )


def require_same_settings(ranks: RankCollectives, settings: Mapping[str, object]) -> None:
    """Raise on all ranks if their settings differ.

    Values are compared by their `repr`. The error message names the keys of settings that differ.
    """
    if ranks.world == 1:
        return
    all_settings = ranks.all_gather({name: repr(value) for name, value in settings.items()})
    run_on_all_ranks(ranks, lambda: _compare_settings(all_settings))


def _compare_settings(all_settings: Sequence[Mapping[str, str]]) -> None:
    for rank, rank_settings in enumerate(all_settings):
        for name in dict.fromkeys([*all_settings[0], *rank_settings]):
            values = [
                settings.get(name, "not set") for settings in (all_settings[0], rank_settings)
            ]
            if values[0] != values[1]:
                raise UsageError(
                    f"ranks 0 and {rank} have different settings",
                    where=name,
                    why=f"{values[0]} on rank 0, {values[1]} on rank {rank}",
                    hint="run the same command line on all ranks, with access to the same files",
                )
