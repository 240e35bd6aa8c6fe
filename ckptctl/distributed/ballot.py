"""What all ranks agree on before a save in the background: do they begin it, all or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ckptctl.distributed.group import Group
from ckptctl.errors import RefusedError
from ckptctl.ops.coordinator import Coordinator, together

T = TypeVar("T")


class Situation(NamedTuple):
    """What is true of any rank.

    Attributes:
        busy: Its last save is still going on.
        failed: Its last save failed, and it has not raised that yet.
    """

    busy: bool
    failed: bool


class Ballot:
    """Votes of all ranks: one exchange of a few numbers each, on the thread that trains.

    Args:
        ranks: The group; no save in the background uses it.
    """

    def __init__(self, ranks: Coordinator) -> None:
        self._ranks = ranks

    def situation(self, own: Situation, meaning: Sequence[object]) -> Situation:
        """Return what is true of any rank.

        Args:
            own: What is true of this one.
            meaning: Where and how it is about to save.

        Raises:
            RefusedError: The ranks are about to save in different ways; on every rank.
        """
        number = _number(meaning)
        *found, largest, smallest = self._highest([*own, number, -number])
        if largest != -smallest:
            raise self._disagreement(meaning)
        return Situation(*map(bool, found))

    def all_or_none(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Do *work* on every rank; if it fails on any, *undo* it on the others and raise on all.

        Raises:
            CkptError: What this rank's work raised, or another's.
        """
        done: list[T] = []
        error: BaseException | None = None
        try:
            done.append(work())
        except BaseException as failure:
            error = failure
        if any(self._highest([error is not None])):
            for result in done:
                undo(result)
            together(self._ranks, lambda: _reraise(error))
        return done[0]

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        if not isinstance(self._ranks, Group):
            return list(numbers)
        # Not `all_gather` of objects: those are sent twice, and by every rank to every other.
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._ranks.group)
        return [int(number) for number in found.tolist()]

    def _disagreement(self, meaning: Sequence[object]) -> RefusedError:
        said = self._ranks.all_gather(tuple(meaning))
        other = next(rank for rank, one in enumerate(said) if one != said[0])
        return RefusedError(
            "the ranks are about to save in different ways",
            why=f"rank 0: {said[0]}, rank {other}: {said[other]}",
            hint="call it with the same path and options on every rank",
        )


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _number(meaning: Sequence[object]) -> int:
    digest = hashlib.blake2b(repr(tuple(meaning)).encode("utf-8", "surrogatepass"), digest_size=7)
    return int.from_bytes(digest.digest(), "big")
