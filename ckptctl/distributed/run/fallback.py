"""What training goes on from where the newest checkpoint proves to be damaged while it is loaded.

That it is there in full says little of its bytes. Evidence is a checksum that differs, a file that
is cut off or zeros where its index has something: on any rank. All ranks load the next one then.
What is not understood, does not fit the state, or cannot be read now is no evidence, and is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from ckptctl.distributed.group import UnreachableError
from ckptctl.distributed.run.keeper import Keeper, Start
from ckptctl.errors import CkptError, CoverageError, DamagedError, RefusedError, listed
from ckptctl.ops.loading.options import LoadReport
from ckptctl.ops.ranks.coordinator import Coordinator, RankError, on_first, sendable

Fallback = Literal["older", "raise"]
EVIDENCE = (DamagedError.code, CoverageError.code)
_log = logging.getLogger("ckptctl")


class _Outcome(NamedTuple):
    """What became of a load on one rank."""

    error: CkptError | None
    missing: tuple[str, ...] = ()

    @property
    def damaged(self) -> bool:
        return self.error is not None and self.error.code in EVIDENCE


def load_newest(
    ranks: Coordinator,
    keeper: Keeper,
    load: Callable[[Start], LoadReport],
    fallback: Fallback = "older",
) -> tuple[Start, LoadReport] | None:
    """Load the newest checkpoint that proves whole on all ranks; None: there is none yet.

    Raises:
        CkptError: It cannot be loaded, for another reason than damage; on every rank.
    """
    before: Start | None = None
    while True:
        start = ranks.broadcast(on_first(ranks, keeper.newest))
        if start is None:
            return None
        report, error = _attempt(partial(load, start))
        own = _Outcome(sendable(error), report.missing if report else ())
        alone = fallback == "raise" or isinstance(error, UnreachableError)
        said = [own] if alone else ranks.all_gather(own)
        failures = {rank: one.error for rank, one in enumerate(said) if one.error}
        if report and not failures:
            if before:
                _require_filled(before, start, [name for one in said for name in one.missing])
            return start, report
        if fallback == "raise" or not all(said[rank].damaged for rank in failures):
            raise error or RankError(*next(iter(failures.items())))
        evidence = next(iter(failures.values()))
        _log.error("%s is damaged: %s", start.entry, evidence)
        on_first(ranks, partial(keeper.distrust, start, evidence))
        before = start


def _attempt(
    load: Callable[[], LoadReport],
) -> tuple[LoadReport | None, BaseException | None]:
    try:
        return load(), None
    except BaseException as error:
        return None, error


def _require_filled(damaged: Start, start: Start, missing: list[str]) -> None:
    """Refuse to go on with tensors that the damaged checkpoint may have filled, and no other."""
    if missing:
        names = list(dict.fromkeys(missing))
        raise RefusedError(
            "the state may contain elements of a damaged checkpoint",
            where=str(damaged.entry),
            why="it was partly filled from the damaged checkpoint; the complete "
            f"`{start.entry.name}` does not contain {listed(names)}",
            hint="create the state again, and load that step",
        )
