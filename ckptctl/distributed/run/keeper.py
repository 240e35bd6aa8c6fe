"""Management of a run folder by rank 0.

Rank 0 finds the newest checkpoint, records from which checkpoint training resumed, calls hooks and
removes old checkpoints.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ckptctl.distributed.background.async_save import AsyncSaver
from ckptctl.distributed.background.save_thread import SaveFuture
from ckptctl.distributed.positions import list_visited_checkpoints
from ckptctl.distributed.run.finals import FinalModels, Finished
from ckptctl.distributed.saving.destination import sweep_leftovers
from ckptctl.distributed.saving.save import write_collectively
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict
from ckptctl.errors import CkptError, RefusedError, quote_names
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.planner.lineage import Lineage
from ckptctl.planner.retention import Policy
from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.runs.entries import RunEntry, is_run, list_entries, read_entry
from ckptctl.runs.health import Checkpoint, examine_entry, read_metrics
from ckptctl.runs.listing import find_newest_checkpoint, read_run
from ckptctl.runs.names import parse_name
from ckptctl.runs.notes import encode_run_record, read_run_record
from ckptctl.runs.removal import (
    PruneResult,
    Trainer,
    plan_delete,
    plan_discard,
    plan_prune,
    run_prune,
)
from ckptctl.runs.run_store import open_run_store
from ckptctl.storage.paths import resolve_links
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

PublishHook = Callable[[Any], object]
STEP_SERIES = "step-"
STALE_SECONDS = 60.0
"""Seconds without writes after which leftovers of a killed save are removed."""
DestinationStatus = Literal["free", "saved", "damaged"]
"""Whether a save's destination is free, already saved, or damaged and thus replaceable."""

_log = logging.getLogger("ckptctl")


class ResumePoint(NamedTuple):
    """Checkpoint from which training can resume."""

    entry: TreePath
    path: TreePath  # path to load: the checkpoint, or its only part if it has one
    step: int
    time: float  # when it was saved, in seconds since the epoch
    skipped: Mapping[str, str] = {}  # names of newer incomplete checkpoints, with reasons
    doubts: tuple[str, ...] = ()  # why another one might be the newest


class RunCheckpoints:
    """Checkpoints ``step-N`` of a run, as managed by rank 0."""

    def __init__(
        self,
        root: TreePath,
        policy: Policy,
        hooks: Sequence[PublishHook],
        *,
        sync: bool,
        room_first: bool = False,
    ) -> None:
        self.root = root
        self._room_first = room_first
        self.policy = policy
        self._hooks = hooks
        self._sync = sync
        self._store = open_run_store(root)
        self._removal: threading.Thread | None = None
        self._lineage: Lineage | None = None
        self._resumed_name, self._saved_name = "", ""
        self._is_resume_point_known = (
            False  # whether the resume point is known: loaded here, or a new run
        )
        self.final_models = FinalModels(root, sync=sync)
        self._damaged: dict[str, str] = {}  # checkpoints that proved damaged during a load, and how

    def find_newest(
        self, series: str | None = None, *, log_warnings: bool = True
    ) -> ResumePoint | None:
        """Find the newest complete checkpoint, or None if the run has no checkpoint.

        If *log_warnings* is set, newer checkpoints that are skipped are logged, and so is any doubt
        that the chosen checkpoint is the newest one.

        Raises:
            SourceNotFoundError: Checkpoints exist, but none of them is complete.
            UnsupportedError: The verdict on the newest checkpoint is unknown.
        """
        run_entries = self._list_entries()
        if not any(series in (None, entry.parsed_name.series) for entry in run_entries):
            for model in self.final_models.list_models():
                _log.warning("%s has no checkpoint, but has published %s", self.root, model.path)
            return None
        listing = find_newest_checkpoint(
            self.root, series=series, damaged_names=self._damaged, model=False
        )
        checkpoint = listing.chosen
        skipped = {entry.name: entry.problem for entry in listing.skipped}
        messages = (
            [f"{checkpoint.path} is missing `{checkpoint.lacks}`, which most checkpoints have"]
            if checkpoint.lacks
            else []
        )
        messages += [f"skipped {self.root / name}: {problem}" for name, problem in skipped.items()]
        messages += [f"{self.root}: {doubt}" for doubt in listing.doubts]
        for line in messages if log_warnings else ():
            _log.warning("%s", line)
        return ResumePoint(
            checkpoint.path,
            _choose_load_path(checkpoint),
            checkpoint.step,
            checkpoint.time,
            skipped,
            listing.doubts,
        )

    def mark_damaged(self, resume_point: ResumePoint, evidence: CkptError) -> None:
        """Record that a checkpoint proved damaged during a load, although no file is missing."""
        self._damaged[resume_point.entry.name] = _format_error(evidence)

    def find_step(self, step: int) -> ResumePoint | None:
        """Find the checkpoint of *step*, preferably ``step-N``, or None if it does not exist.

        Raises:
            RefusedError: Several checkpoints have that step.
        """
        run_entries = self._list_entries()
        matches = [
            entry
            for entry in run_entries
            if entry.parsed_name.order[0] == step and entry.is_counted
        ]
        matches = [
            entry for entry in matches if entry.path == self.root / f"{STEP_SERIES}{step}"
        ] or matches
        if len(matches) > 1:
            raise RefusedError(
                f"{pluralize(len(matches), 'checkpoint has', 'checkpoints have')} step {step}",
                where=str(self.root),
                why=quote_names([entry.path.name for entry in matches]),
                hint="load one of them with `ckptctl.load`",
            )
        if not matches:
            return None
        chosen = examine_entry(matches[0], time.time(), model=False)
        return ResumePoint(chosen.path, _choose_load_path(chosen), step, matches[0].time)

    def has_step(self, step: int) -> bool:
        """Return whether a complete or incomplete checkpoint ``step-N`` of *step* exists."""
        self.refresh()
        return (self.root / f"{STEP_SERIES}{step}").is_dir()

    def refresh(self) -> None:
        """Discard cached listings of the run folder, so that the next one shows current files."""
        self._store.refresh_listing()

    def _list_entries(self) -> list[RunEntry]:
        """List the current entries of the run folder, which are none before the first save."""
        self.refresh()
        return list_entries(self.root) if is_run(self.root) else []

    def list_steps(self) -> list[int]:
        """List the steps of complete checkpoints, in ascending order."""
        if not self._list_entries():
            return []
        checkpoints = read_run(self.root, model=False).checkpoints
        return sorted({checkpoint.step for checkpoint in checkpoints if checkpoint.complete})

    def check_destination(self, path: TreePath, *, is_own: bool) -> DestinationStatus:
        """Return the status of a save's destination.

        Args:
            path: Destination.
            is_own: Whether the run has saved that step or resumed from it.

        Raises:
            RefusedError: A checkpoint exists that must not be replaced.
        """
        self.refresh()
        if self._store.is_name_free(path.name):
            return "free"
        entry = read_entry(path)
        now = time.time()
        existing = examine_entry(entry, now, model=False) if entry and not entry.link else None
        problem = self._damaged.get(path.name) or (existing.problem if existing else "")
        is_known_damaged = path.name in self._damaged
        if existing and (is_known_damaged or (existing.torn and not existing.writing)):
            _log.warning("replacing %s: %s", path, problem)
            return "damaged"
        if existing and existing.complete and is_own:
            return "saved"
        raise RefusedError(
            "a checkpoint of that step already exists",
            where=str(path),
            why=problem or "this run neither saved it nor resumed from it",
            hint="remove it with `delete(step)`, or remove all later ones with "
            "`load(state, step, discard_newer=True)`; or save with `overwrite=True`",
        )

    def save(
        self,
        state: StateDict,
        path: TreePath,
        ranks: RankCollectives,
        saver: AsyncSaver | None,
        options: Mapping[str, Any],
    ) -> SaveFuture:
        """Save *state* to *path* on all ranks, in the background if *saver* is not None.

        Rank 0 makes room before the save, and removes old checkpoints after it is published.
        """
        before, after = (self.make_room, self.handle_published) if ranks.rank == 0 else (None, None)
        if saver is not None:
            return saver.save(state, path, on_staged=before, on_published=after, **options)
        if before:
            before(path)
        write_collectively(state, path, ranks, SaveOptions(**options))
        if after:
            after(path)
        return SaveFuture(path).mark_published()

    def make_room(self, path: TreePath) -> None:
        """Remove leftovers of killed saves, and with ``make_room`` also unneeded checkpoints."""
        try:
            self.refresh()
            for name in self._store.list_unfinished_saves():
                step_name = parse_name(name)
                if step_name and step_name.series == STEP_SERIES and name != path.name:
                    self._sweep_leftovers(self.root / name)
        except OSError as error:
            _log.warning("cannot list %s: %s", self.root, error)
        removes = not self.policy.is_empty and self.policy.last != 0
        if self._room_first and removes and is_run(self.root):
            self.wait()
            self._remove_unkept(coming=1)

    def _sweep_leftovers(self, target: TreePath) -> None:
        try:
            if sweep_leftovers(target, STALE_SECONDS):
                _log.info("removed files left over from a killed save of %s", target)
        except RefusedError as error:  # a save is running there, or the files are not from ckptctl
            _log.debug("%s", _format_error(error))
        except CkptError as error:
            _log.warning(
                "files left over from a killed save of %s could not be removed: %s",
                target,
                _format_error(error),
            )

    def delete(self, step: int) -> None:
        """Remove the checkpoint ``step-N``.

        Raises:
            RefusedError: The checkpoint is protected.
        """
        self.wait()
        plan = plan_delete(
            resolve_links(self.root),
            STEP_SERIES,
            step,
            in_use=(self._resumed_name, self._saved_name),
        )
        result = run_prune(plan)
        result.require_no_failures()
        self._log_removals(result)

    def prepare_first_save(self, step: int) -> int | None:
        """Find and record the checkpoint from which the run resumed, before the first save.

        Returns:
            Step of the last checkpoint of this run that the process loaded or saved without this
            manager, or None if there is none.

        Raises:
            RefusedError: No earlier step was loaded, and a complete checkpoint of a later step
                exists.
        """
        if self._is_resume_point_known:
            return None
        self.refresh()
        candidates = filter(
            None, (read_entry(self.root / name) for name in list_visited_checkpoints(self.root))
        )
        last = next((entry for entry in candidates if not entry.is_staging), None)
        if last and last.parsed_name.order[0] <= step:
            number = last.parsed_name.order[0]
            self.record_resume(last.path, number)
            return number if last.parsed_name.series == STEP_SERIES else None
        later = [
            entry.path.name
            for entry in self._list_entries()
            if entry.parsed_name.series == STEP_SERIES
            and entry.parsed_name.order[0] > step
            and examine_entry(entry, time.time()).complete
        ]
        if later:
            raise RefusedError(
                f"step {step} is lower than that of {quote_names(later)}, "
                "and no earlier step was loaded",
                where=str(self.root),
                why="the run went back to an earlier step, or it is another run; "
                "`load_latest` would resume from the highest step",
                hint="use `load(state, step=…)` to resume from an earlier step, with "
                "`discard_newer=True` to remove the later ones; or save to another folder",
            )
        self._is_resume_point_known = True
        return None

    def record_resume(self, path: TreePath, step: int) -> None:
        """Record the checkpoint from which training resumes."""
        self._is_resume_point_known = True
        lineage = read_run_record(path).lineage
        self._lineage = lineage.resume_at(step, self._find_newest_save())
        self._resumed_name, self._saved_name = path.name, ""
        if self._lineage.resumed[-1].abandons_saves:
            self._write_record(path, read_metrics(path), lineage._replace(left=self._lineage.save))

    def record_resume_elsewhere(self, step: int) -> None:
        """Record that training resumes from a save of *step* outside of the run folder."""
        self._is_resume_point_known = True
        before = [
            entry
            for entry in self._list_entries()
            if entry.parsed_name.series == STEP_SERIES and entry.is_counted
        ]
        before = [entry for entry in before if entry.parsed_name.order[0] <= step]
        if before:
            self.record_resume(max(before, key=lambda entry: entry.parsed_name.order).path, step)
            self._resumed_name = ""

    def build_sidecar_files(
        self, metric_values: Mapping[str, float], extra_members: Mapping[str, object] | None = None
    ) -> Mapping[str, bytes]:
        """Return the run record of the next checkpoint, by the name of its sidecar file."""
        self._lineage = (self._lineage or Lineage(self._find_newest_save())).next_save()
        return {RUN_FILE: encode_run_record(metric_values, self._lineage, extra_members)}

    def handle_published(self, path: TreePath) -> None:
        """Call the hooks for a new checkpoint, and start to remove old checkpoints."""
        self._saved_name = path.name
        self._damaged.pop(path.name, None)
        self.call_hooks(path)
        if not self.policy.is_empty and self.policy.last != 0:
            self._remove_in_background()

    def add_metrics(self, path: TreePath, added_metrics: Mapping[str, float]) -> None:
        """Add metrics to the run record of the checkpoint at *path*, next to existing metrics."""
        if added_metrics:
            self.refresh()
            self._write_record(
                path, {**read_metrics(path), **added_metrics}, read_run_record(path).lineage
            )

    def _write_record(
        self, path: TreePath, metric_values: Mapping[str, float], lineage: Lineage
    ) -> None:
        """Replace the run record of a checkpoint, unless its existing record cannot be read."""
        existing = read_run_record(path)
        try:
            if existing.error:
                raise CkptError(f"the existing one cannot be read: {existing.error.what}")
            record = encode_run_record(metric_values, lineage, existing.members)
            self._store.replace_file(f"{path.name}/{RUN_FILE}", record, sync=self._sync)
        except (CkptError, OSError) as error:
            _log.error("`%s` of %s was not written: %s", RUN_FILE, path, error)

    def call_hooks(self, path: TreePath) -> None:
        """Call every hook with *path*, and log errors that hooks raise."""
        for hook in self._hooks:
            try:
                hook(path)
            except Exception:
                _log.exception("a hook failed for %s", path)

    def record_final(self, out: TreePath, model: Finished | None) -> None:
        """Record the trained model at *out*, call the hooks, and remove replaced checkpoints.

        *model* is the existing record of the model, or None if the model was just published.
        """
        if model is None:
            step_name = parse_name(self._saved_name or self._resumed_name)
            model = Finished(out, step_name.order[0] if step_name else None)
            self.final_models.record_model(model)
        if not model.hooks_called:
            self.call_hooks(out)
            self.final_models.record_model(replace(model, hooks_called=True))
        if self.policy.last == 0 and self._list_entries():
            self.remove_replaced()

    def remove_replaced(self) -> None:
        """Remove the checkpoints that the policy drops once the final model is published."""
        self.wait()
        self._remove_unkept(replaced=True)

    def wait(self) -> None:
        """Wait until the removal of old checkpoints has finished."""
        if self._removal is not None:
            self._removal.join()

    def _remove_in_background(self) -> None:
        """Start to remove old checkpoints in a non-daemon thread.

        An executor would already be shut down at interpreter exit, when the last save may still be
        running.
        """
        earlier = self._removal

        def remove_unkept() -> None:
            if earlier is not None:
                earlier.join()
            self._remove_unkept()

        thread = threading.Thread(target=remove_unkept, name="ckptctl-prune", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the system has no threads left
            remove_unkept()
        else:
            self._removal = thread

    def _remove_unkept(self, *, replaced: bool = False, coming: int = 0) -> None:
        in_use = (self._resumed_name, self._saved_name)
        if replaced or (coming and self._saved_name):  # on a full disk, protect only the last save
            in_use = ("", "" if replaced else self._saved_name)
        try:
            plan = plan_prune(
                resolve_links(self.root),
                self.policy,
                replaced=replaced,
                trainer=Trainer(STEP_SERIES, in_use, coming),
            )
            result = run_prune(plan)
        except Exception as error:  # including exceptions of the user's rules
            _log.warning("nothing was removed from %s: %s", self.root, _format_error(error))
            return
        for decision in plan.list_decisions("skip"):
            if decision.checkpoint.record.error:
                _log.warning(
                    "%s is kept: %s", decision.checkpoint.path, "; ".join(decision.reasons)
                )
        self._log_removals(result)

    def discard_after(self, step: int) -> None:
        """Remove checkpoints of steps later than *step*, and log which of them are not removed."""
        plan = plan_discard(resolve_links(self.root), STEP_SERIES, step)
        for decision in plan.list_decisions("skip"):
            if decision.checkpoint.step > step:
                reasons = "; ".join(filter(None, decision.reasons))
                _log.warning("%s is kept: %s", decision.checkpoint.path, reasons)
        self._log_removals(run_prune(plan))

    def list_later(self, step: int) -> list[str]:
        """List the names of checkpoints of steps later than *step*."""
        step_entries = (
            entry for entry in self._list_entries() if entry.parsed_name.series == STEP_SERIES
        )
        return [
            entry.path.name
            for entry in step_entries
            if entry.parsed_name.order[0] > step and entry.is_counted
        ]

    def _find_newest_save(self) -> int:
        """Return the highest save number that the run's records contain."""
        newest_known = self._lineage.save if self._lineage else 0
        paths = (
            candidate.path
            for candidate in self._list_entries()
            if candidate.parsed_name.series == STEP_SERIES
        )
        return max(
            [newest_known, *(read_run_record(candidate).lineage.save for candidate in paths)]
        )

    def _log_removals(self, result: PruneResult) -> None:
        for name in result.done:
            _log.info("removed %s", self.root / name)
        for name, failure in result.failed.items():
            _log.warning("%s could not be removed: %s", self.root / name, _format_error(failure))


def _choose_load_path(checkpoint: Checkpoint) -> TreePath:
    return checkpoint.parts[0] if len(checkpoint.parts) == 1 else checkpoint.path


def _format_error(error: Exception) -> str:
    if not isinstance(error, CkptError):
        return f"{type(error).__name__}: {error}"
    return error.line
