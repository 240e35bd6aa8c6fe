"""The vote of all ranks before a save in the background: they begin it, all or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, NoReturn, TypeVar

from ckptctl.distributed.group import all_reduce_max
from ckptctl.errors import CkptError, RefusedError
from ckptctl.ranks.coordinator import Coordinator, together

T = TypeVar("T")


class Situation(NamedTuple):
    """The state of the last save on any rank."""

    busy: bool
    failed: bool
    unable: bool = False


class StartVote:
    """Votes of all ranks: one exchange of a few numbers each, on the thread that trains."""

    def __init__(self, ranks: Coordinator) -> None:
        self._ranks = ranks

    def situation(
        self, own: Situation, meaning: Sequence[object], plan: bytes = b""
    ) -> tuple[Situation, bool]:
        """Return the situation of all ranks together, and whether they have the same plan."""
        numbers = [_number(repr(tuple(meaning)).encode("utf-8", "surrogatepass")), _number(plan)]
        found = all_reduce_max(self._ranks, [*own, *numbers, *(-number for number in numbers)])
        same = [found[-4] == -found[-2], found[-3] == -found[-1]]
        if not same[0]:
            said = self._ranks.all_gather(tuple(meaning))
            other = next(rank for rank, one in enumerate(said) if one != said[0])
            raise RefusedError(
                "the ranks disagree on how to save",
                why=f"rank 0: {said[0]}, rank {other}: {said[other]}",
                hint="pass the same path and options on every rank",
            )
        return Situation(*map(bool, found[:-4])), same[1] and bool(plan)

    def all_or_none(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Do *work* on every rank; if it fails on any, *undo* it on the others and raise on all.

        It is undone, too, when the ranks cannot be asked.
        """
        done = attempt(work)
        error = done.exception()
        failed = True
        try:
            failed = any(all_reduce_max(self._ranks, [error is not None]))
        finally:
            if failed and error is None:
                undo(done.result())
        if failed:
            self.fail(done)
        return done.result()

    def fail(self, done: Future[T]) -> NoReturn:
        """Raise the error of any rank on every rank; there is one that has an error."""
        together(self._ranks, done.result)
        raise CkptError("a rank failed without reporting an error")


def attempt(work: Callable[[], T]) -> Future[T]:
    """Return the result of *work*, or the exception."""
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as failure:
        done.set_exception(failure)
    return done


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
