"""Fallback to an older checkpoint if the newest one proves damaged during the load.

A checkpoint with all files can still contain wrong bytes. Evidence of damage on any rank is a wrong
checksum, a truncated file, or zeros in place of data; all ranks then load the next checkpoint.
Unsupported formats, mismatches with the state and read errors are no evidence, and are raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal, NamedTuple

from ckptctl.distributed.group import UnreachableError
from ckptctl.distributed.run.keeper import ResumePoint, RunCheckpoints
from ckptctl.errors import CkptError, CoverageError, DamagedError, RefusedError, quote_names
from ckptctl.ranks.coordinator import Coordinator, RankError, run_on_rank_zero, to_sendable_error
from ckptctl.save_load.loading.load_options import LoadReport

Fallback = Literal["older", "raise"]
DAMAGE_CODES = (DamagedError.code, CoverageError.code)
_log = logging.getLogger("ckptctl")


class LoadAttempt(NamedTuple):
    """Outcome of a load on all ranks, with this rank's report or the errors of failed ranks."""

    report: LoadReport | None
    failures: Mapping[int, CkptError]
    missing: tuple[str, ...]  # on any rank


def attempt_load(
    ranks: Coordinator, load: Callable[[], LoadReport], skippable: Collection[str]
) -> LoadAttempt:
    """Load on all ranks, and return errors with *skippable* codes to all of them.

    Raises:
        CkptError: A rank has another error. It is raised on every rank.
    """
    report: LoadReport | None = None
    error: BaseException | None = None
    try:
        report = load()
    except UnreachableError:
        raise
    except BaseException as failure:
        error = failure
    outcomes = ranks.all_gather((to_sendable_error(error), report.missing if report else ()))
    failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure}
    if any(failure.code not in skippable for failure in failures.values()):
        raise error or RankError(*next(iter(failures.items())))
    missing = dict.fromkeys(name for _, names in outcomes for name in names)
    return LoadAttempt(None if failures else report, failures, tuple(missing))


def load_newest(
    ranks: Coordinator,
    keeper: RunCheckpoints,
    load: Callable[[ResumePoint], LoadReport],
    fallback: Fallback = "older",
) -> tuple[ResumePoint, LoadReport] | None:
    """Load the newest checkpoint that is complete on all ranks, or return None if none exists.

    Raises:
        RefusedError: The damaged checkpoint may have filled tensors that the next one does not
            contain.
        CkptError: The checkpoint cannot be loaded for another reason than damage. The error is
            raised on every rank.
    """
    damaged: ResumePoint | None = None
    while start := ranks.broadcast(run_on_rank_zero(ranks, keeper.find_newest)):
        if fallback == "raise":
            return start, load(start)
        attempt = attempt_load(ranks, partial(load, start), DAMAGE_CODES)
        if attempt.report is None:
            evidence = next(iter(attempt.failures.values()))
            _log.error("%s is damaged: %s", start.entry, evidence)
            run_on_rank_zero(ranks, partial(keeper.mark_damaged, start, evidence))
            damaged = start
            continue
        if damaged and attempt.missing:
            raise RefusedError(
                "the state may contain elements of a damaged checkpoint",
                where=str(damaged.entry),
                why="it was partly filled from the damaged checkpoint; the complete "
                f"`{start.entry.name}` does not contain {quote_names(attempt.missing)}",
                hint="create the state again, and load that step",
            )
        return start, attempt.report
    return None
