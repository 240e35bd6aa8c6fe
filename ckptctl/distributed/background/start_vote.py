"""Vote of all ranks before a background save, which starts on all of them or none."""

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
    """Status of the last save, on one rank or combined over all."""

    busy: bool
    failed: bool
    unable: bool = False


class StartVote:
    """Votes of all ranks on the training thread, each one exchange of a few numbers."""

    def __init__(self, ranks: Coordinator) -> None:
        self._ranks = ranks

    def situation(
        self, own: Situation, meaning: Sequence[object], plan: bytes = b""
    ) -> tuple[Situation, bool]:
        """Combine the status of all ranks, and return whether they have the same plan.

        Raises:
            RefusedError: The ranks pass different paths or options.
        """
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
        """Run *work* on every rank. If it fails on any, *undo* it on the others and raise on all.

        It is also undone if the exchange fails.
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
        """Raise on every rank the error of the rank that has one."""
        together(self._ranks, done.result)
        raise CkptError("a rank failed without reporting an error")


def attempt(work: Callable[[], T]) -> Future[T]:
    """Run *work*, and return its result or exception as a future."""
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as failure:
        done.set_exception(failure)
    return done


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
