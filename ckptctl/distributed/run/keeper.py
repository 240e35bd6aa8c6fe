"""Folder of a run, as rank 0 manages it: newest checkpoint, branches, hooks and removals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ckptctl.distributed.background.async_save import AsyncSaver
from ckptctl.distributed.background.save_thread import SaveFuture
from ckptctl.distributed.positions import positions_in
from ckptctl.distributed.run.finals import Finals, Finished
from ckptctl.distributed.saving.destination import sweep_left
from ckptctl.distributed.saving.save import write
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict
from ckptctl.errors import CkptError, RefusedError, quote_names
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.planner.lineage import Lineage
from ckptctl.planner.retention import Policy
from ckptctl.ranks.coordinator import Coordinator
from ckptctl.runs.entries import RunEntry, is_run, list_entries, read_entry
from ckptctl.runs.health import Checkpoint, examine_entry, read_metrics
from ckptctl.runs.listing import find_newest, read_run
from ckptctl.runs.names import parse_name
from ckptctl.runs.notes import encode_record, read_run_record
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

Hook = Callable[[Any], object]
SERIES = "step-"
KILLED = 60.0
"""Seconds without writes after which leftovers of a killed save are removed."""
Standing = Literal["free", "saved", "damaged"]
"""Status of a save's destination: free, already saved, or damaged and replaceable."""

_log = logging.getLogger("ckptctl")


class Start(NamedTuple):
    """Checkpoint from which training can resume."""

    entry: TreePath
    path: TreePath  # path to load: the checkpoint itself, or its only part
    step: int
    time: float  # when it was saved, in seconds since the epoch
    skipped: Mapping[str, str] = {}  # names of newer incomplete checkpoints, with reasons
    doubts: tuple[str, ...] = ()  # why another one might be the newest


class Keeper:
    """Checkpoints ``step-N`` of a run, whose management never fails a save."""

    def __init__(
        self,
        root: TreePath,
        policy: Policy,
        hooks: Sequence[Hook],
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
        self._resumed, self._saved = "", ""
        self._knows_start = False  # whether this manager loaded, or the run began with it
        self.finals = Finals(root, sync=sync)
        self._torn: dict[str, str] = {}  # checkpoints that proved damaged during a load, and how

    def newest(self, series: str | None = None, *, tell: bool = True) -> Start | None:
        """Find the newest complete checkpoint, or None without any.

        If *tell* is set, skipped checkpoints and doubts are logged.

        Raises:
            SourceNotFoundError: Checkpoints exist, but none of them is complete.
            UnsupportedError: The verdict on the newest checkpoint is unknown.
        """
        there = self._entries()
        if not any(series in (None, one.parsed_name.series) for one in there):
            for model in self.finals.all():
                _log.warning("%s has no checkpoint, but has published %s", self.root, model.path)
            return None
        looked = find_newest(self.root, series=series, damaged_names=self._torn, model=False)
        found = looked.chosen
        skipped = {one.name: one.problem for one in looked.skipped}
        said = (
            [f"{found.path} is missing `{found.lacks}`, which most checkpoints have"]
            if found.lacks
            else []
        )
        said += [f"skipped {self.root / name}: {problem}" for name, problem in skipped.items()]
        said += [f"{self.root}: {doubt}" for doubt in looked.doubts]
        for line in said if tell else ():
            _log.warning("%s", line)
        return Start(found.path, _loaded(found), found.step, found.time, skipped, looked.doubts)

    def distrust(self, start: Start, evidence: CkptError) -> None:
        """Record that a checkpoint is damaged, although no file is missing."""
        self._torn[start.entry.name] = _said(evidence)

    def of_step(self, step: int) -> Start | None:
        """Find the checkpoint of *step*, preferably ``step-N``, or None.

        Raises:
            RefusedError: Several checkpoints have that step.
        """
        there = self._entries()
        found = [one for one in there if one.parsed_name.order[0] == step and one.is_counted]
        found = [one for one in found if one.path == self.root / f"{SERIES}{step}"] or found
        if len(found) > 1:
            raise RefusedError(
                f"{pluralize(len(found), 'checkpoint has', 'checkpoints have')} step {step}",
                where=str(self.root),
                why=quote_names([one.path.name for one in found]),
                hint="load one of them with `ckptctl.load`",
            )
        if not found:
            return None
        chosen = examine_entry(found[0], time.time(), model=False)
        return Start(chosen.path, _loaded(chosen), step, found[0].time)

    def has(self, step: int) -> bool:
        """Return whether a checkpoint ``step-N`` exists, complete or not."""
        self.refresh()
        return (self.root / f"{SERIES}{step}").is_dir()

    def refresh(self) -> None:
        """Drop cached listings, so that current files are seen."""
        self._store.refresh_listing()

    def _entries(self) -> list[RunEntry]:
        """List the current entries, or none before the first save."""
        self.refresh()
        return list_entries(self.root) if is_run(self.root) else []

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints, in ascending order."""
        if not self._entries():
            return []
        there = read_run(self.root, model=False).checkpoints
        return sorted({one.step for one in there if one.complete})

    def standing(self, path: TreePath, *, own: bool) -> Standing:
        """Return the status of a save's destination.

        Args:
            path: Destination.
            own: Whether the run has saved that step or resumed from it.

        Raises:
            RefusedError: A checkpoint exists that must not be replaced.
        """
        self.refresh()
        if self._store.is_free(path.name):
            return "free"
        entry = read_entry(path)
        now = time.time()
        there = examine_entry(entry, now, model=False) if entry and not entry.link else None
        problem = self._torn.get(path.name) or (there.problem if there else "")
        known = path.name in self._torn
        if there and (known or (there.torn and not there.writing)):
            _log.warning("replacing %s: %s", path, problem)
            return "damaged"
        if there and there.complete and own:
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
        ranks: Coordinator,
        saver: AsyncSaver | None,
        options: Mapping[str, Any],
    ) -> SaveFuture:
        """Save to *path*, in the background with a *saver*. All ranks call it.

        Rank 0 makes room before the save, and removes old checkpoints after it is published.
        """
        before, after = (self.make_room, self.published) if ranks.rank == 0 else (None, None)
        if saver is not None:
            return saver.save(state, path, on_staged=before, on_published=after, **options)
        if before:
            before(path)
        write(state, path, ranks, SaveOptions(**options))
        if after:
            after(path)
        return SaveFuture(path).publish()

    def make_room(self, path: TreePath) -> None:
        """Remove leftovers of killed saves, and with ``make_room`` also unneeded checkpoints."""
        try:
            self.refresh()
            for name in self._store.list_unfinished_saves():
                named = parse_name(name)
                if named and named.series == SERIES and name != path.name:
                    self._sweep(self.root / name)
        except OSError as error:
            _log.warning("cannot list %s: %s", self.root, error)
        removes = not self.policy.is_empty and self.policy.last != 0
        if self._room_first and removes and is_run(self.root):
            self.wait()
            self._remove(coming=1)

    def _sweep(self, target: TreePath) -> None:
        try:
            if sweep_left(target, KILLED):
                _log.info("removed files left over from a killed save of %s", target)
        except RefusedError as error:  # a save is running there, or the files are not from ckptctl
            _log.debug("%s", _said(error))
        except CkptError as error:
            _log.warning(
                "files left over from a killed save of %s could not be removed: %s",
                target,
                _said(error),
            )

    def delete(self, step: int) -> None:
        """Remove the checkpoint ``step-N``.

        Raises:
            RefusedError: It is protected.
        """
        self.wait()
        plan = plan_delete(
            resolve_links(self.root), SERIES, step, in_use=(self._resumed, self._saved)
        )
        result = run_prune(plan)
        result.require_all()
        self._tell(result)

    def begin_saving(self, step: int) -> int | None:
        """Find the checkpoint from which the run resumed, before the first save.

        Returns:
            Step of the last checkpoint of this run that the process loaded or saved without this
            manager, or None.

        Raises:
            RefusedError: No earlier step was loaded, and a complete checkpoint of a later step
                exists.
        """
        if self._knows_start:
            return None
        self.refresh()
        known = filter(None, (read_entry(self.root / name) for name in positions_in(self.root)))
        last = next((one for one in known if not one.staging), None)
        if last and last.parsed_name.order[0] <= step:
            number = last.parsed_name.order[0]
            self.resume_from(last.path, number)
            return number if last.parsed_name.series == SERIES else None
        later = [
            one.path.name
            for one in self._entries()
            if one.parsed_name.series == SERIES
            and one.parsed_name.order[0] > step
            and examine_entry(one, time.time()).complete
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
        self._knows_start = True
        return None

    def resume_from(self, path: TreePath, step: int) -> None:
        """Record the checkpoint from which training resumes."""
        self._knows_start = True
        found = read_run_record(path).lineage
        self._lineage = found.resume_at(step, self._newest_save())
        self._resumed, self._saved = path.name, ""
        if self._lineage.resumed[-1].abandons_saves:
            self._note(path, read_metrics(path), found._replace(left=self._lineage.save))

    def resume_elsewhere(self, step: int) -> None:
        """Record that training resumes from a save of *step* outside of the run folder."""
        self._knows_start = True
        before = [
            one for one in self._entries() if one.parsed_name.series == SERIES and one.is_counted
        ]
        before = [one for one in before if one.parsed_name.order[0] <= step]
        if before:
            self.resume_from(max(before, key=lambda one: one.parsed_name.order).path, step)
            self._resumed = ""

    def beside(
        self, rated: Mapping[str, float], more: Mapping[str, object] | None = None
    ) -> Mapping[str, bytes]:
        """Return the record of the checkpoint to publish as a sidecar file."""
        self._lineage = (self._lineage or Lineage(self._newest_save())).next_save()
        return {RUN_FILE: encode_record(rated, self._lineage, more)}

    def published(self, path: TreePath) -> None:
        """Call the hooks for a new checkpoint, and start to remove old ones."""
        self._saved = path.name
        self._torn.pop(path.name, None)
        self.call_hooks(path)
        if not self.policy.is_empty and self.policy.last != 0:
            self._remove_later()

    def rate(self, path: TreePath, rated: Mapping[str, float]) -> None:
        """Add metrics to those of a checkpoint."""
        if rated:
            self.refresh()
            self._note(path, {**read_metrics(path), **rated}, read_run_record(path).lineage)

    def _note(self, path: TreePath, rated: Mapping[str, float], lineage: Lineage) -> None:
        """Replace the record of a checkpoint, unless the existing one cannot be read."""
        known = read_run_record(path)
        try:
            if known.error:
                raise CkptError(f"the existing one cannot be read: {known.error.what}")
            record = encode_record(rated, lineage, known.members)
            self._store.replace_file(f"{path.name}/{RUN_FILE}", record, sync=self._sync)
        except (CkptError, OSError) as error:
            _log.error("`%s` of %s was not written: %s", RUN_FILE, path, error)

    def call_hooks(self, path: TreePath) -> None:
        """Call every hook with *path*, and log their errors."""
        for hook in self._hooks:
            try:
                hook(path)
            except Exception:
                _log.exception("a hook failed for %s", path)

    def finish(self, out: TreePath, there: Finished | None) -> None:
        """Record a trained model, call its hooks, and remove checkpoints that it replaces."""
        if there is None:
            named = parse_name(self._saved or self._resumed)
            there = Finished(out, named.order[0] if named else None)
            self.finals.note(there)
        if not there.hooks_called:
            self.call_hooks(out)
            self.finals.note(replace(there, hooks_called=True))
        if self.policy.last == 0 and self._entries():
            self.replaced()

    def replaced(self) -> None:
        """Remove checkpoints that the policy does not keep after the final model is published."""
        self.wait()
        self._remove(replaced=True)

    def wait(self) -> None:
        """Wait for removals."""
        if self._removal is not None:
            self._removal.join()

    def _remove_later(self) -> None:
        """Start to remove in a non-daemon thread, because executors end before the last save."""
        earlier = self._removal

        def work() -> None:
            if earlier is not None:
                earlier.join()
            self._remove()

        thread = threading.Thread(target=work, name="ckptctl-prune", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the system has no threads left
            work()
        else:
            self._removal = thread

    def _remove(self, *, replaced: bool = False, coming: int = 0) -> None:
        in_use = (self._resumed, self._saved)
        if replaced or (coming and self._saved):  # on a full disk, protect only the last save
            in_use = ("", "" if replaced else self._saved)
        try:
            plan = plan_prune(
                resolve_links(self.root),
                self.policy,
                replaced=replaced,
                trainer=Trainer(SERIES, in_use, coming),
            )
            result = run_prune(plan)
        except Exception as error:  # including those of the user's rules
            _log.warning("nothing was removed from %s: %s", self.root, _said(error))
            return
        for one in plan.list_decisions("skip"):
            if one.checkpoint.record.error:
                _log.warning("%s is kept: %s", one.checkpoint.path, "; ".join(one.reasons))
        self._tell(result)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, and log those that stay."""
        plan = plan_discard(resolve_links(self.root), SERIES, step)
        for one in plan.list_decisions("skip"):
            if one.checkpoint.step > step:
                reasons = "; ".join(filter(None, one.reasons))
                _log.warning("%s is kept: %s", one.checkpoint.path, reasons)
        self._tell(run_prune(plan))

    def later_than(self, step: int) -> list[str]:
        """List the names of checkpoints of later steps."""
        found = (one for one in self._entries() if one.parsed_name.series == SERIES)
        return [
            one.path.name for one in found if one.parsed_name.order[0] > step and one.is_counted
        ]

    def _newest_save(self) -> int:
        """Return the number of the run's newest known save."""
        known = self._lineage.save if self._lineage else 0
        there = (one.path for one in self._entries() if one.parsed_name.series == SERIES)
        return max([known, *(read_run_record(one).lineage.save for one in there)])

    def _tell(self, result: PruneResult) -> None:
        for name in result.done:
            _log.info("removed %s", self.root / name)
        for name, failure in result.failed.items():
            _log.warning("%s could not be removed: %s", self.root / name, _said(failure))


def _loaded(found: Checkpoint) -> TreePath:
    return found.parts[0] if len(found.parts) == 1 else found.path


def _said(error: Exception) -> str:
    if not isinstance(error, CkptError):
        return f"{type(error).__name__}: {error}"
    return error.line
