"""Removal of checkpoints that no retention rule keeps, or of checkpoints of given steps.

:func:`plan_prune` selects checkpoints by a retention policy, :func:`plan_discard` and
:func:`plan_delete` by step. Planning changes nothing. :func:`run_prune` executes a plan under a
lock and skips checkpoints that have changed since planning. Commands and `CheckpointManager` share
this module.
"""

from __future__ import annotations

import os
import time as clock
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from ckptctl import formats
from ckptctl.errors import (
    CkptError,
    PartialError,
    RefusedError,
    SourceNotFoundError,
    StorageError,
    format_option,
    quote_names,
)
from ckptctl.planner.retention import (
    Action,
    Decision,
    Policy,
    decide_retention,
    find_out_of_order_pair,
)
from ckptctl.results import Inline, JsonField, Result
from ckptctl.runs.entries import is_run, read_entry
from ckptctl.runs.health import (
    CHECKPOINT_FIELDS,
    RECENT_CHANGE_SECONDS,
    Checkpoint,
    check_health,
    read_nonnumeric_metrics,
)
from ckptctl.runs.listing import RunFolder, read_run
from ckptctl.runs.protections import (
    CheckpointProtection,
    Pointers,
    RunView,
    find_protections,
    has_pointer_to_entry,
)
from ckptctl.runs.run_store import open_run_store
from ckptctl.runs.thinning import ThinningPlan, plan_thinning, run_thinning
from ckptctl.storage.file_system import list_mounts_in
from ckptctl.storage.paths import build_path_hint, parse_path, require_local, resolve_links
from ckptctl.storage.trash import TRASH_FOLDER
from ckptctl.storage.two_phase_delete import TwoPhaseDelete
from ckptctl.tree import TreePath
from ckptctl.units import format_rfc3339, pluralize

DRY_RUN = JsonField("whether this is a plan; if true, `done`, `failed` and `freed` are absent")


@dataclass(frozen=True, slots=True)
class PruneDecision(Decision[Checkpoint], Result, order=f"{CHECKPOINT_FIELDS} action keep reasons"):
    """Decision on one checkpoint.

    Attributes:
        nbytes: Bytes that will be freed. Files with other hard links are not counted.
        thinning: Optimizer state to remove instead of the checkpoint, or None.
    """

    checkpoint: Annotated[Checkpoint, Inline()]
    nbytes: Annotated[int, JsonField("bytes to free", name="freed")] = 0
    thinning: ThinningPlan | None = None

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return self.checkpoint.name

    @property
    def outcome(
        self,
    ) -> Annotated[Literal["keep", "remove", "thin", "skip"], JsonField(name="action")]:
        """`keep`, `remove`, `thin` or `skip` (not touched and not counted)."""
        return "thin" if self.thinning else self.action

    @property
    def keep(self) -> Annotated[bool, JsonField()]:
        """Whether the checkpoint still exists afterwards."""
        return self.outcome != "remove"

    @property
    def dropped(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Names of the tensors removed by thinning."""
        return self.thinning.dropped if self.thinning else ()


@dataclass(frozen=True, slots=True)
class PrunePlan(
    Result,
    order="dry_run thin root series decisions kept removed thinned skipped bytes leftovers others",
):
    """Plan of a prune, with a decision for every checkpoint.

    Attributes:
        policy: Rules that keep checkpoints.
        run: Checkpoints and other entries of the run.
    """

    root: Annotated[TreePath, JsonField("absolute path")]
    policy: Policy
    run: Annotated[
        RunFolder,
        Inline("series"),
        JsonField("names of other entries, except hidden ones; they are not touched", of="others"),
    ]
    decisions: Annotated[
        tuple[PruneDecision, ...], JsonField("decision for each checkpoint, by series and step")
    ]
    thin: Annotated[bool, JsonField("whether only optimizer state is removed")] = False
    leftovers: Annotated[
        tuple[str, ...],
        JsonField("files that an earlier run left in the trash; they are also removed"),
    ] = ()

    @property
    def dry_run(self) -> Annotated[bool, DRY_RUN]:
        """Always true for a plan."""
        return True

    @property
    def kept(self) -> Annotated[int, JsonField("number of kept checkpoints")]:
        """Number of kept checkpoints."""
        return len(self.list_decisions("keep"))

    @property
    def removed(
        self,
    ) -> Annotated[int, JsonField("number of removed checkpoints, including thinned ones")]:
        """Number of removed or thinned checkpoints."""
        return len(self.list_decisions("remove"))

    @property
    def skipped(self) -> Annotated[int, JsonField("number of skipped checkpoints")]:
        """Number of skipped checkpoints."""
        return len(self.list_decisions("skip"))

    def list_decisions(self, action: Action) -> tuple[PruneDecision, ...]:
        """Return the decisions with *action*."""
        return tuple(decision for decision in self.decisions if decision.action == action)

    @property
    def nbytes(self) -> Annotated[int, JsonField(name="bytes")]:
        """Total bytes to free."""
        return sum(decision.nbytes for decision in self.decisions)

    @property
    def thinned(self) -> Annotated[int, JsonField()]:
        """Number of thinned checkpoints."""
        return sum(decision.thinning is not None for decision in self.decisions)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.list_decisions("remove") and not self.leftovers


@dataclass(frozen=True, slots=True)
class PruneResult(Result):
    """Result of a prune."""

    plan: Annotated[PrunePlan, Inline()]
    done: Annotated[tuple[str, ...], JsonField("names of removed or thinned checkpoints")]
    failed: Annotated[
        Mapping[str, Annotated[CkptError, JsonField("error")]],
        JsonField("removals that failed, by name"),
    ]
    freed: Annotated[int, JsonField("bytes freed")]

    @property
    def dry_run(self) -> Annotated[bool, DRY_RUN]:
        """Always false for a result."""
        return False

    def require_no_failures(self) -> None:
        """Raise the first failure, if any.

        Raises:
            PartialError: Some checkpoints were removed.
            StorageError: No checkpoint was removed.
            RefusedError: No checkpoint was removed, because it would not be safe.
        """
        if not self.failed:
            return
        name, error = next(iter(self.failed.items()))
        kind: type[CkptError] = PartialError if self.done else StorageError
        if not self.done and isinstance(error, RefusedError):
            kind = RefusedError
        raise kind(
            f"{pluralize(len(self.failed), 'checkpoint')} could not be removed",
            where=quote_names(list(self.failed)),
            why=f"`{name}`: {error.what}" + (f", {error.where}" if error.where else ""),
            hint="run the same command again to finish",
        )

    @property
    def thinned(self) -> int:
        """Number of checkpoints whose optimizer state was removed."""
        done = {*self.done}
        return sum(
            decision.thinning is not None and decision.name in done
            for decision in self.plan.decisions
        )


# --- plan ---------------------------------------------------------------------------------------


class Trainer(NamedTuple):
    """Training process that saves into a run.

    Attributes:
        series: Common part of the names of its checkpoints, or None to include all checkpoints.
        in_use: Names of the checkpoints that it uses, which are kept.
        pending_saves: Number of checkpoints that it is about to save.
    """

    series: str | None = None
    in_use: Collection[str] = ()
    pending_saves: int = 0


def plan_prune(
    root: str | TreePath,
    policy: Policy,
    *,
    force: bool = False,
    thin: bool = False,
    replaced: bool = False,
    trainer: Trainer | None = None,
    now: float | None = None,
) -> PrunePlan:
    """Decide which checkpoints of a run to remove, without changing anything.

    Args:
        root: A folder of checkpoints.
        policy: Rules that keep checkpoints.
        force: Whether to use the order of steps if times disagree, and to allow a checkpoint as
            *root*.
        thin: Whether to remove only optimizer state.
        replaced: Whether all checkpoints may be removed, because a complete copy exists elsewhere.
        trainer: Training process that saves into the run, if any. Tensors are then not compared
            with a model type.
        now: Current time in seconds since the epoch, or None to use the clock.

    Raises:
        SourceNotFoundError: The directory does not exist.
        FormatError: The directory contains no checkpoints.
        RefusedError: Removing checkpoints would not be safe.
        UsageError: A metric is unknown.
    """
    now = clock.time() if now is None else now
    if not replaced:
        policy.require_rules()
    real = _resolve_safe_root(parse_path(root), force=force)
    if thin:
        require_local(
            real,
            f"{format_option('--thin')} is not supported for URLs",
            hint="use `ckptctl convert` to write only the weights",
            error=RefusedError,
        )
    job = trainer or Trainer()
    run = read_run(real, now, job.series, in_use=job.in_use, model=trainer is None)
    run.pointers.require_interpretable()
    if not force and (out_of_order := find_out_of_order_pair(run.checkpoints)):
        newer, older = out_of_order
        raise RefusedError(
            "step order and modification times disagree",
            where=f"`{older.name}` and `{newer.name}`",
            why=f"written {format_rfc3339(older.time)} and {format_rfc3339(newer.time)}; the "
            "folder may contain "
            f"two runs, or `{newer.entry.newest_file}` was added to `{newer.name}` later",
            hint=f"pass {format_option('--force')} to use the order of the steps",
        )
    policy = policy.resolve_metrics_and_patterns(run.checkpoints)
    if not replaced:
        policy.require_match(run.checkpoints, growing=trainer is not None)
    decisions = decide_retention(
        run.checkpoints, policy, now, replaced=replaced, pending_saves=job.pending_saves
    )
    return _build_plan(real, policy, run, decisions, thin)


def plan_discard(root: TreePath, series: str, step: int, now: float | None = None) -> PrunePlan:
    """Plan to remove all checkpoints after *step*, so that the run can resume from it.

    Only checkpoints that are complete or show an incomplete write are removed. Protected
    checkpoints stay, with the reason in the decision. Abandoned checkpoints are not protected.
    """
    return _plan_removal(root, series, lambda other: other > step, f"after step {step}", (), now)


def plan_delete(root: TreePath, series: str, step: int, in_use: Collection[str] = ()) -> PrunePlan:
    """Plan to remove the checkpoint of *step* regardless of rules.

    Checkpoints named in *in_use*, which a running job uses, are protected.

    Raises:
        RefusedError: The checkpoint is protected, or no other checkpoint is complete.
    """
    plan = _plan_removal(root, series, lambda other: other == step, f"step {step}", in_use)
    for decision in plan.list_decisions("skip"):
        if decision.checkpoint.step == step:
            raise RefusedError(
                "this checkpoint cannot be removed",
                where=str(decision.checkpoint.path),
                why="; ".join(decision.reasons),
            )
    if not plan.list_decisions("keep") and any(
        candidate.checkpoint.complete for candidate in plan.list_decisions("remove")
    ):
        raise RefusedError(
            "the newest complete checkpoint cannot be removed",
            where=str(plan.list_decisions("remove")[0].checkpoint.path),
            why="there is no other checkpoint to resume from",
            hint="remove the folder yourself if you want to delete it",
        )
    return plan


def _plan_removal(
    root: TreePath,
    series: str,
    is_selected_step: Callable[[int], bool],
    why: str,
    in_use: Collection[str] = (),
    now: float | None = None,
) -> PrunePlan:
    """Plan to remove all unprotected checkpoints whose step satisfies *is_selected_step*.

    *why* is the reason that the decisions state.
    """
    real = _resolve_safe_root(root)
    run = read_run(real, now, series, in_use=in_use, protect_abandoned=False, model=False)
    run.pointers.require_interpretable()

    def decide_by_step(checkpoint: Checkpoint) -> Decision[Checkpoint]:
        if not is_selected_step(checkpoint.step):
            return Decision(
                checkpoint, "keep" if checkpoint.is_counted else "skip", (f"not {why}",)
            )
        if checkpoint.pinned or checkpoint.exempt:
            pins = (f"named by {pin}" for pin in checkpoint.pinned)
            return Decision(
                checkpoint,
                "skip",
                tuple(filter(None, (*pins, checkpoint.skip_reason, checkpoint.problem))),
            )
        return Decision(checkpoint, "remove", (why,))

    return _build_plan(real, Policy(), run, map(decide_by_step, run.checkpoints))


def _resolve_safe_root(root: TreePath, *, force: bool = False) -> TreePath:
    """Resolve *root*, or raise if its entries must not be removed.

    *root* must not be a link, ``/``, the home directory or a parent of the home directory. Unless
    *force* is true, it must not be a checkpoint. No file may exist at the path of the trash folder.
    """
    store = open_run_store(root)
    store.require_changeable()
    store.refresh_listing()
    if root.is_symlink():
        raise RefusedError(
            "this is a symbolic link",
            where=str(root),
            hint=f"pass its target, `{resolve_links(root)}`",
        )
    if not root.is_dir():
        raise SourceNotFoundError("no such directory", where=str(root), hint=build_path_hint(root))
    real, homes = resolve_links(root), [Path("/")]
    with suppress(RuntimeError):  # a process need not have a home directory
        homes.append(Path.home())
    if any(resolve_links(home).is_relative_to(real) for home in homes):
        raise RefusedError(
            "refusing to remove anything from the home directory, `/`, or a parent of them",
            where=str(real),
        )
    folder = real / TRASH_FOLDER
    if os.path.lexists(folder) and not folder.is_symlink() and not folder.is_dir():
        raise RefusedError(
            f"`{TRASH_FOLDER}` is not a folder",
            where=str(folder),
            why="removed checkpoints are first moved into a folder of that name",
            hint="move or remove it; ckptctl did not create it",
        )
    sniffed = {} if force else formats.sniff_formats(real)
    # A folder is not a checkpoint just because a pointer names one of its entries.
    if sniffed and not has_pointer_to_entry(real):
        hints = [f"did you mean the run `{real.parent}`?"] if read_entry(real) else []
        if is_run(real):
            hints.append(f"pass {format_option('--force')} to remove checkpoints inside `{real}`")
        raise RefusedError(
            "this is a checkpoint, not a folder of checkpoints",
            where=str(root),
            why=", ".join(f"{name}: {evidence}" for name, evidence in sniffed.items()),
            hint=" ".join(hints) or "pass the folder that contains the checkpoints",
        )
    return real


def _build_plan(
    root: TreePath,
    policy: Policy,
    run: RunFolder,
    decisions: Iterable[Decision[Checkpoint]],
    thin: bool = False,
) -> PrunePlan:
    """Build the prune plan from *decisions*, or raise if executing it would be unsafe."""
    prune_decisions = tuple(_build_prune_decision(decision, policy, thin) for decision in decisions)
    plan = PrunePlan(
        root, policy, run, prune_decisions, thin, tuple(open_run_store(root).list_leftovers())
    )
    working_folder: Path | None = None
    with suppress(OSError):
        working_folder = Path.cwd()
    for decision in plan.list_decisions("remove"):
        path = decision.checkpoint.path
        mounted = list_mounts_in(Path(path))
        if mounted:
            raise RefusedError(
                "another file system is mounted inside a checkpoint",
                where=str(mounted[0]),
                why=f"`{path.name}` would be removed",
                hint="unmount it, or keep that checkpoint",
            )
        if working_folder and working_folder.is_relative_to(path):
            raise RefusedError(
                "the working directory would be removed",
                where=str(path),
                hint="change to another directory first",
            )
    return plan


def _build_prune_decision(
    decision: Decision[Checkpoint], policy: Policy, thin: bool
) -> PruneDecision:
    """Build the prune decision for a checkpoint, including the bytes to free and any thinning."""
    checkpoint, action, reasons = decision.checkpoint, decision.action, decision.reasons
    if action != "remove":
        return PruneDecision(checkpoint, action, reasons)
    nonnumeric_metrics = (
        read_nonnumeric_metrics(checkpoint.path, checkpoint.record) if policy.best else {}
    )
    for best in policy.best:
        if (
            best.metric in nonnumeric_metrics and best.metric not in checkpoint.metrics
        ):  # it may be the best
            reason = (
                f"its metric `{best.metric}` is not a number: {nonnumeric_metrics[best.metric]}"
            )
            return PruneDecision(checkpoint, "skip", (reason,))
    if not thin or not checkpoint.complete:
        nbytes = checkpoint.entry.nbytes - checkpoint.entry.shared_bytes
        return PruneDecision(checkpoint, action, reasons, nbytes)
    thinning = plan_thinning(checkpoint)
    if isinstance(thinning, str):
        return PruneDecision(checkpoint, "skip", (thinning,))
    return PruneDecision(checkpoint, action, reasons, thinning.freed, thinning)


# --- execute ------------------------------------------------------------------------------------


def run_prune(plan: PrunePlan) -> PruneResult:
    """Execute *plan*, from the oldest to the newest checkpoint.

    If the plan removes nothing, only the trash is emptied.
    """
    done_names: list[str] = []
    failed: dict[str, CkptError] = {}
    freed = 0
    store = open_run_store(plan.root)
    if plan.is_idle:
        store.remove_leftovers()
        return PruneResult(plan, (), {}, 0)
    store.refresh_listing()
    with store.lock_for_deletion() as deletion:
        _require_kept_unchanged(plan)
        pointers = Pointers.read(plan.root)
        pointers.require_interpretable()
        protected = find_protections(RunView(plan.root, plan.run.checkpoints, pointers))
        for decision in plan.list_decisions("remove"):
            path = decision.checkpoint.path
            if not path.exists() and not path.is_symlink():
                continue  # another process has removed it
            require_unchanged = partial(
                _require_unchanged, decision, protected.get(decision.name, CheckpointProtection())
            )
            try:
                _require_no_recent_change(
                    decision,
                    deletion.read_clock() - max(plan.policy.min_age, RECENT_CHANGE_SECONDS),
                )
                if decision.thinning:
                    require_unchanged()
                    assert isinstance(deletion, TwoPhaseDelete), "it is refused behind URLs"
                    run_thinning(decision.thinning, deletion)
                else:
                    deletion.delete(
                        decision.name, decision.checkpoint.entry.identity, require_unchanged
                    )
            except CkptError as error:
                failed[decision.name] = error
            else:
                done_names.append(decision.name)
                freed += decision.nbytes
        trash_error = CkptError("it could not be deleted permanently", where=str(deletion.folder))
        failed |= {
            name: trash_error for name in deletion.list_left_in_trash() if name not in failed
        }
    return PruneResult(plan, tuple(done_names), failed, freed)


def _require_kept_unchanged(plan: PrunePlan) -> None:
    """Raise if a kept checkpoint was removed or damaged after planning."""
    for decision in plan.list_decisions("keep"):
        planned_entry = decision.checkpoint.entry
        entry = read_entry(planned_entry.path)
        why = ""
        if entry is None or not entry.identity.is_same_inode(planned_entry.identity):
            why = "a checkpoint that should be kept no longer exists"
        elif not entry.is_same(planned_entry):
            why = check_health(planned_entry.path, model=False).problem
        if why:
            raise RefusedError(
                "the run changed in the meantime",
                where=str(planned_entry.path),
                why=why,
                hint="run it again",
            )


def _require_no_recent_change(decision: PruneDecision, latest_change: float) -> None:
    """Raise if an incomplete checkpoint was changed after *latest_change* (file system time)."""
    if not decision.checkpoint.complete and decision.checkpoint.entry.last_modified > latest_change:
        raise RefusedError(
            "another process may still be writing the checkpoint",
            where=str(decision.checkpoint.path),
            why="the clock of its file system is behind the clock of this machine",
        )


def _require_unchanged(decision: PruneDecision, protected: CheckpointProtection) -> None:
    entry = decision.checkpoint.entry
    entry.require_unchanged()
    new = [pin for pin in protected.pinned if pin not in decision.checkpoint.pinned]
    if new:
        raise RefusedError(f"{new[0]} now names the checkpoint", where=str(entry.path))
