"""Vote of all ranks before a background save, which starts on all of them or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, NoReturn, TypeVar

from ckptctl.distributed.group import all_reduce_max
from ckptctl.errors import CkptError, RefusedError
from ckptctl.ranks.coordinator import RankCollectives, run_on_all_ranks

T = TypeVar("T")


class SaverStatus(NamedTuple):
    """Status of the last save, either of one rank or combined over all ranks."""

    busy: bool
    failed: bool
    unable: bool = False


class StartVote:
    """Collective decisions of all ranks on whether a background save can start.

    The training thread makes each decision in a single exchange of a few numbers.
    """

    def __init__(self, ranks: RankCollectives) -> None:
        self._ranks = ranks

    def exchange_status(
        self, status: SaverStatus, agreed_options: Sequence[object], plan: bytes = b""
    ) -> tuple[SaverStatus, bool]:
        """Combine the status of all ranks, and check whether all have the same cached plan.

        Raises:
            RefusedError: The ranks pass different paths or options.
        """
        numbers = [
            _hash_to_int(repr(tuple(agreed_options)).encode("utf-8", "surrogatepass")),
            _hash_to_int(plan),
        ]
        maxima = all_reduce_max(self._ranks, [*status, *numbers, *(-number for number in numbers)])
        agreements = [maxima[-4] == -maxima[-2], maxima[-3] == -maxima[-1]]
        if not agreements[0]:
            all_options = self._ranks.all_gather(tuple(agreed_options))
            other_rank = next(
                rank for rank, options in enumerate(all_options) if options != all_options[0]
            )
            raise RefusedError(
                "the ranks disagree on how to save",
                why=f"rank 0: {all_options[0]}, rank {other_rank}: {all_options[other_rank]}",
                hint="pass the same path and options on every rank",
            )
        return SaverStatus(*map(bool, maxima[:-4])), agreements[1] and bool(plan)

    def run_all_or_none(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Run *work* on every rank. If it fails on any rank, call *undo* on the others and raise.

        *work* is also undone if the exchange between the ranks fails.
        """
        outcome = capture_outcome(work)
        error = outcome.exception()
        failed = True
        try:
            failed = any(all_reduce_max(self._ranks, [error is not None]))
        finally:
            if failed and error is None:
                undo(outcome.result())
        if failed:
            self.raise_on_all_ranks(outcome)
        return outcome.result()

    def raise_on_all_ranks(self, outcome: Future[T]) -> NoReturn:
        """Raise an error on every rank, given the *outcome* of this rank."""
        run_on_all_ranks(self._ranks, outcome.result)
        raise CkptError("a rank failed without reporting an error")


def capture_outcome(work: Callable[[], T]) -> Future[T]:
    """Run *work*, and return its result or exception as a future."""
    outcome: Future[T] = Future()
    try:
        outcome.set_result(work())
    except BaseException as failure:
        outcome.set_exception(failure)
    return outcome


def _hash_to_int(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
