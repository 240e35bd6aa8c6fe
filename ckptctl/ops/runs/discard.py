"""Remove given steps of a run, whatever rules say: those after another one, or one alone.

Plans are made here, which :func:`ckptctl.ops.runs.removal.run_prune` carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from ckptctl.errors import RefusedError
from ckptctl.ops.runs.health import Checkpoint
from ckptctl.ops.runs.listing import read_run
from ckptctl.ops.runs.protections import require_pointers
from ckptctl.ops.runs.refusals import require_root
from ckptctl.ops.runs.removal import PruneDecision, PrunePlan, plan_of, priced
from ckptctl.planner.retention import Decision, Policy


def plan_discard(root: Path, series: str, step: int, now: float | None = None) -> PrunePlan:
    """Decide what goes so that the run goes on from *step* as if nothing had come after it.

    That are checkpoints with a higher step that are complete or torn. What is protected stays, and
    the decision says why; what the run left behind goes.
    """
    return _plan_removal(root, series, lambda other: other > step, f"after step {step}", (), now)


def plan_delete(root: Path, series: str, step: int, in_use: Collection[str] = ()) -> PrunePlan:
    """Plan to remove the checkpoint of *step*, whatever rules say; *in_use* as in `plan_prune`.

    Raises:
        RefusedError: It is protected, or no other one is complete.
    """
    plan = _plan_removal(root, series, lambda other: other == step, f"step {step}", in_use)
    for decision in plan.of("skip"):
        if decision.checkpoint.step == step:
            raise RefusedError(
                "this checkpoint cannot be removed",
                where=str(decision.checkpoint.path),
                why="; ".join(decision.reasons),
            )
    if not plan.of("keep") and any(one.checkpoint.complete for one in plan.of("remove")):
        raise RefusedError(
            "the newest complete checkpoint cannot be removed",
            where=str(plan.of("remove")[0].checkpoint.path),
            why="there is no other checkpoint to resume from",
            hint="remove the folder yourself if you want to delete it",
        )
    return plan


def _plan_removal(
    root: Path,
    series: str,
    meant: Callable[[int], bool],
    why: str,
    in_use: Collection[str] = (),
    now: float | None = None,
) -> PrunePlan:
    """Plan to remove those of *meant* steps that are complete or torn, and not protected."""
    real = require_root(root)
    require_pointers(real)
    run = read_run(real, now, series, in_use=in_use, branches=False, model=False)
    decisions = [
        _discarded(one, why)
        if meant(one.step)
        else PruneDecision(one, "keep" if one.counts else "skip", (f"not {why}",))
        for one in run.checkpoints
    ]
    return plan_of(real, Policy(), run, decisions)


def _discarded(checkpoint: Checkpoint, why: str) -> PruneDecision:
    if checkpoint.pinned or checkpoint.exempt:
        named = (f"named by {pin}" for pin in checkpoint.pinned)
        return PruneDecision(
            checkpoint, "skip", tuple(filter(None, (*named, checkpoint.aside, checkpoint.problem)))
        )
    return priced(Decision(checkpoint, "remove", (why,)))
