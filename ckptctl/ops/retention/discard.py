"""Remove the checkpoints of a run after the one from which it goes on.

:func:`plan_discard` decides and changes nothing; :func:`~ckptctl.ops.retention.prune.run_prune`
carries the plan out, by the same trash and under the same lock as any removal.
"""

from __future__ import annotations

import time as clock
from pathlib import Path

from ckptctl.ops.retention.prune import PrunePlan, Verdict
from ckptctl.ops.retention.safety import require_pointers, require_removable, require_root
from ckptctl.ops.runs.listing import Checkpoint, read_run
from ckptctl.planner.retention import Policy
from ckptctl.storage.retirement import leftovers


def plan_discard(root: Path, series: str, step: int, now: float | None = None) -> PrunePlan:
    """Decide what goes so that the run goes on from *step* as if nothing had come after it.

    That are checkpoints with a higher step that are complete or torn. What somebody may be writing,
    what is not understood, links, and what a pointer names stay, and the verdict says why.

    Args:
        root: The run.
        series: Only those whose names have this in common.
        step: The step that stays, as do all before it.
        now: Seconds since the epoch; None: what the clock says.

    Raises:
        CkptError: See :func:`~ckptctl.ops.retention.prune.plan_prune`.
    """
    real = require_root(root)
    require_pointers(real)
    run = read_run(real, clock.time() if now is None else now, series)
    verdicts = tuple(_verdict(one, step) for one in run.checkpoints)
    plan = PrunePlan(real, Policy(), run, verdicts, leftovers=tuple(leftovers(real)))
    require_removable(one.checkpoint.entry.path for one in plan.of("remove"))
    return plan


def _verdict(one: Checkpoint, step: int) -> Verdict:
    if one.candidate.step <= step:
        return Verdict(one, "keep" if one.counts else "skip", (f"not after step {step}",))
    named = tuple(f"named by {pin}" for pin in one.candidate.pinned)
    stays = (*named, *([one.entry.exempt] if one.entry.exempt else []))
    if stays or one.candidate.state not in ("complete", "incomplete"):
        return Verdict(one, "skip", (*stays, one.candidate.problem))
    freed = one.entry.nbytes - one.entry.shared
    return Verdict(one, "remove", (f"after step {step}",), freed)
