"""Remove the checkpoints of a run that no rule keeps.

:func:`plan_prune` decides and changes nothing; :func:`run_prune` carries out that plan, under a
lock, and leaves alone what has changed since. The commands and the manager of the training library
both come here.
"""

from __future__ import annotations

import os
import time as clock
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.errors import CkptError, RefusedError
from ckptctl.ops.retention.safety import (
    require_match,
    require_order,
    require_pointers,
    require_policy,
    require_removable,
    require_root,
    with_known_metrics,
)
from ckptctl.ops.runs.completeness import health
from ckptctl.ops.runs.entries import entry_at
from ckptctl.ops.runs.listing import AT_WORK, Checkpoint, Run, members, read_run
from ckptctl.ops.runs.pointers import Pins, pins
from ckptctl.planner.retention import Action, Candidate, Decision, Policy, decide
from ckptctl.storage.remote.path import named
from ckptctl.storage.retirement import Retirement, leftovers, retiring, tidy

if TYPE_CHECKING:
    from ckptctl.ops.retention.thin import Thinning

AT_WORK_WITH = "the run that is at work"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        action: ``keep``, ``remove``, ``thin``, or ``skip``: it is left alone and does not count.
        reasons: Why.
        nbytes: Bytes that are freed: those of files that have no other hard link.
        thinning: What is left out of it, for ``thin``.
    """

    checkpoint: Checkpoint
    action: Action
    reasons: tuple[str, ...]
    nbytes: int = 0
    thinning: Thinning | None = None

    @property
    def name(self) -> str:
        """Return its name in the run."""
        return self.checkpoint.candidate.name

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            **self.checkpoint.to_json(),
            "action": "thin" if self.thinning else self.action,
            "keep": self.action != "remove" or self.thinning is not None,
            "reasons": list(self.reasons),
            "freed": self.nbytes,
            "dropped": list(self.thinning.dropped) if self.thinning else [],
        }


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What pruning will do.

    Attributes:
        root: The run, resolved.
        policy: What is kept.
        run: What there is.
        verdicts: What becomes of it, by series and step.
        thin: Whether checkpoints lose their optimizer state instead of being removed.
        leftovers: What an earlier run has left in the trash.
    """

    root: Path
    policy: Policy
    run: Run
    verdicts: tuple[Verdict, ...]
    thin: bool = False
    leftovers: tuple[str, ...] = ()

    def of(self, action: Action) -> tuple[Verdict, ...]:
        """Return those of which *action* becomes."""
        return tuple(one for one in self.verdicts if one.action == action)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are freed."""
        return sum(one.nbytes for one in self.verdicts)

    @property
    def thinned(self) -> int:
        """Return how many of those that are removed keep their weights."""
        return sum(one.thinning is not None for one in self.verdicts)

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to do."""
        return not self.of("remove") and not self.leftovers

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "root": str(self.root),
            "series": list(self.run.series),
            "decisions": [one.to_json() for one in self.verdicts],
            "kept": len(self.of("keep")),
            "removed": len(self.of("remove")),
            "thinned": self.thinned,
            "skipped": len(self.of("skip")),
            "bytes": self.nbytes,
            "leftovers": list(self.leftovers),
            "others": list(self.run.others),
        }


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What pruning did.

    Attributes:
        plan: What it was to do.
        done: Names of what was removed, or thinned.
        failed: Why others were not, by their names.
        freed: Bytes.
    """

    plan: PrunePlan
    done: tuple[str, ...]
    failed: Mapping[str, CkptError]
    freed: int

    @property
    def thinned(self) -> int:
        """Return how many of what was done kept their weights."""
        done = {*self.done}
        return sum(one.thinning is not None and one.name in done for one in self.plan.verdicts)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        failed = {name: error.to_json() for name, error in self.failed.items()}
        return {"done": list(self.done), "failed": failed, "freed": self.freed}


def plan_prune(
    root: str | Path,
    policy: Policy,
    *,
    force: bool = False,
    thin: bool = False,
    replaced: bool = False,
    series: str | None = None,
    in_use: Collection[str] = (),
    now: float | None = None,
) -> PrunePlan:
    """Decide what is removed from a run; changes nothing.

    Args:
        root: A folder of checkpoints.
        policy: What is kept.
        force: Go by the steps where times say otherwise, and look into a checkpoint.
        thin: Take optimizer state away instead of removing.
        replaced: Whether something complete elsewhere stands for all of them: none has to stay.
        series: Look at those alone whose names have this in common; None: at all.
        in_use: Names of those with which a run is at work: they are kept.
        now: Seconds since the epoch; None: what the clock says.

    Raises:
        SourceNotFoundError: There is no such directory.
        FormatError: There are no checkpoints in it.
        RefusedError: It would not be safe.
        UsageError: A metric is not known.
    """
    now = clock.time() if now is None else now
    if not replaced:
        require_policy(policy)
    real = require_root(named(root), force=force)
    require_pointers(real)
    run = read_run(real, now, series)
    candidates = [_in_use(one.candidate, in_use) for one in run.checkpoints]
    if not force:
        require_order(run.checkpoints)
    policy = with_known_metrics(policy, candidates)
    if not replaced:
        require_match(candidates, policy)
    decisions = decide(candidates, policy, now, replaced=replaced)
    by_name = {one.candidate.name: one for one in run.checkpoints}
    verdicts = tuple(_verdict(by_name[one.candidate.name], one, thin) for one in decisions)
    plan = PrunePlan(real, policy, run, verdicts, thin, tuple(leftovers(real)))
    require_removable(one.checkpoint.entry.path for one in plan.of("remove"))
    return plan


def _in_use(one: Candidate, names: Collection[str]) -> Candidate:
    return replace(one, pinned=(*one.pinned, AT_WORK_WITH)) if one.name in names else one


def _verdict(found: Checkpoint, decision: Decision, thin: bool) -> Verdict:
    if decision.action != "remove":
        return Verdict(found, decision.action, decision.reasons)
    if not thin or not found.complete:
        freed = found.entry.nbytes - found.entry.shared
        return Verdict(found, "remove", decision.reasons, freed)
    from ckptctl.ops.retention.thin import plan_thinning

    thinning = plan_thinning(found)
    if isinstance(thinning, str):
        return Verdict(found, "skip", (thinning,))
    return Verdict(found, "remove", decision.reasons, thinning.freed, thinning)


def run_prune(plan: PrunePlan) -> PruneResult:
    """Carry out *plan*, the oldest checkpoint first; of one with nothing to do, sweep the trash.

    Raises:
        RefusedError: Another run is at work there, or what was to be kept is not there any more.
    """
    done: list[str] = []
    failed: dict[str, CkptError] = {}
    freed = 0
    if plan.idle:
        tidy(plan.root)
        return PruneResult(plan, (), {}, 0)
    with retiring(plan.root) as retirement:
        _require_kept(plan)
        pinned = _pins(plan)
        for one in plan.of("remove"):
            if not os.path.lexists(one.checkpoint.entry.path):
                continue  # somebody else has removed it
            try:
                _require_unchanged(one, pinned.get(one.name, ()))
                _require_old(one, retirement.now() - max(plan.policy.min_age, AT_WORK))
                freed += _remove(retirement, one)
            except CkptError as error:
                failed[one.name] = error
            else:
                done.append(one.name)
        failed |= {name: _stuck(retirement) for name in retirement.left() if name not in failed}
    return PruneResult(plan, tuple(done), failed, freed)


def _pins(plan: PrunePlan) -> Pins:
    require_pointers(plan.root)
    return pins(members(plan.root, (one.checkpoint for one in plan.verdicts)))


def _remove(retirement: Retirement, one: Verdict) -> int:
    """Remove or thin one checkpoint; return the bytes that are freed."""
    if not one.thinning:
        retirement.retire(one.name, one.checkpoint.entry.identity)
        return one.nbytes
    from ckptctl.ops.retention.thin import run_thinning

    run_thinning(one.thinning, retirement)
    return one.nbytes


def _stuck(retirement: Retirement) -> CkptError:
    return CkptError("it could not be removed for good", where=str(retirement.folder))


def _require_kept(plan: PrunePlan) -> None:
    """Refuse if a checkpoint because of which others may go is gone meanwhile, or torn."""
    for one in plan.of("keep"):
        known = one.checkpoint.entry
        entry = entry_at(known.path)
        why = ""
        if entry is None or not entry.identity.one_with(known.identity):
            why = "it was to be kept and is not there any more"
        elif not entry.same(known):
            why = health(known.path).problem
        if why:
            raise RefusedError(
                "the run has changed since it was looked at",
                where=str(known.path),
                why=why,
                hint="run it again",
            )


def _require_old(one: Verdict, before: float) -> None:
    """Refuse what is not complete and was changed of late, as the file system's clock has it."""
    if not one.checkpoint.complete and one.checkpoint.entry.touched > before:
        raise RefusedError(
            "it may still be being written",
            where=str(one.checkpoint.entry.path),
            why="by the clock of its file system, which is behind that of this machine",
        )


def _require_unchanged(one: Verdict, pinned: Sequence[str]) -> None:
    entry = one.checkpoint.entry
    now = entry_at(entry.path)
    if now is None or not now.same(entry):
        raise RefusedError("it has changed since it was looked at", where=str(entry.path))
    new = [pin for pin in pinned if pin not in one.checkpoint.candidate.pinned]
    if new:
        raise RefusedError(f"{new[0]} names it by now", where=str(entry.path))
