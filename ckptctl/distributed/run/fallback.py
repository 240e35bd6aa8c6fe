"""Fallback to an older checkpoint if the newest one proves damaged during the load.

A checkpoint with all files can still contain wrong bytes. Evidence of damage on any rank is a wrong
checksum, a truncated file, or zeros in place of data. All ranks then load the next older
checkpoint. Unsupported formats, mismatches with the state and read errors are not evidence of
damage, and are raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal, NamedTuple

from ckptctl.distributed.group import UnreachableError
from ckptctl.distributed.run.keeper import ResumePoint, RunCheckpoints
from ckptctl.errors import CkptError, CoverageError, DamagedError, RefusedError, quote_names
from ckptctl.ranks.coordinator import (
    RankCollectives,
    RankError,
    run_on_rank_zero,
    to_sendable_error,
)
from ckptctl.save_load.loading.load_options import LoadReport

Fallback = Literal["older", "raise"]
DAMAGE_CODES = (DamagedError.code, CoverageError.code)
_log = logging.getLogger("ckptctl")


class LoadAttempt(NamedTuple):
    """Outcome of a collective load, with either this rank's report or the errors by rank."""

    report: LoadReport | None
    failures: Mapping[int, CkptError]
    missing: tuple[str, ...]  # on any rank


def attempt_load(
    ranks: RankCollectives, load: Callable[[], LoadReport], skippable_codes: Collection[str]
) -> LoadAttempt:
    """Call *load* on all ranks, and return the outcome of all ranks.

    Errors whose code is in *skippable_codes* are returned, not raised.

    Raises:
        CkptError: A rank failed with another code. The error is raised on every rank.
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
    if any(failure.code not in skippable_codes for failure in failures.values()):
        raise error or RankError(*next(iter(failures.items())))
    missing = dict.fromkeys(name for _, names in outcomes for name in names)
    return LoadAttempt(None if failures else report, failures, tuple(missing))


def load_newest(
    ranks: RankCollectives,
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
    while resume_point := ranks.broadcast(run_on_rank_zero(ranks, keeper.find_newest)):
        if fallback == "raise":
            return resume_point, load(resume_point)
        attempt = attempt_load(ranks, partial(load, resume_point), DAMAGE_CODES)
        if attempt.report is None:
            evidence = next(iter(attempt.failures.values()))
            _log.error("%s is damaged: %s", resume_point.entry, evidence)
            run_on_rank_zero(ranks, partial(keeper.mark_damaged, resume_point, evidence))
            damaged = resume_point
            continue
        if damaged and attempt.missing:
            raise RefusedError(
                "the state may contain elements of a damaged checkpoint",
                where=str(damaged.entry),
                why="it was partly filled from the damaged checkpoint; the complete "
                f"`{resume_point.entry.name}` does not contain {quote_names(attempt.missing)}",
                hint="create the state again, and load that step",
            )
        return resume_point, attempt.report
    return None
