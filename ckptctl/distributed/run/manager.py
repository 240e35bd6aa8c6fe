"""``ckptctl.CheckpointManager``: the checkpoints of one training run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ckptctl import option_checks as checks
from ckptctl.conversion.plan import ConversionPlan
from ckptctl.distributed.background.async_save import AsyncSaver, Closeable
from ckptctl.distributed.background.save_thread import SaveFuture
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.run.fallback import Fallback, load_newest
from ckptctl.distributed.run.finals import Finished, build_comparison_path, require_same_model
from ckptctl.distributed.run.keeper import (
    STEP_SERIES,
    DestinationStatus,
    ResumePoint,
    RunCheckpoints,
)
from ckptctl.distributed.run.local_tier import LocalTier
from ckptctl.distributed.run.manager_options import (
    SOURCE_OPTIONS,
    FinalOptions,
    ManagerOptions,
    Resumed,
)
from ckptctl.distributed.run.preemption import Preemption
from ckptctl.distributed.run.schedule import Schedule
from ckptctl.distributed.saving.converted import (
    plan_converted,
    resolve_final_target,
    save_converted,
)
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict
from ckptctl.errors import RefusedError, SourceNotFoundError, UsageError, quote_names
from ckptctl.keywords import accept_keywords
from ckptctl.options import list_options, name_option_in_errors, require_choice
from ckptctl.ranks.coordinator import RankCollectives, run_and_all_gather, run_on_rank_zero
from ckptctl.runs.run_store import open_run_store
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.storage.destinations import require_folder, require_local_path
from ckptctl.storage.paths import expand_home, parse_path
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath

_log = logging.getLogger("ckptctl")


class CheckpointManager(Closeable):
    """Manager that saves, loads and removes the checkpoints of one training run.

    Create one on every rank, and call its methods in the same order on all ranks. Checkpoints are
    DCP directories ``ROOT/step-N``. After a newer checkpoint is published, rank 0 removes those
    that no rule keeps, in the background and with the code of ``ckptctl prune``. A checkpoint is
    kept if any rule keeps it. Incomplete checkpoints do not count, the newest complete one always
    stays, and entries with other names are never removed.

    With *fast*, every save first goes to a local disk. Each rank writes its own shard without
    waiting for others, except for the first save, which is collective. Some saves are copied to the
    run in the background, and the rules above apply to these copies. The future of :meth:`save` and
    its errors are then local to the rank. :meth:`wait` and :meth:`close` report the outcome of all
    ranks, and :meth:`close` copies the newest save. :meth:`load_latest` loads the newest save that
    is complete on all ranks, wherever it is stored.
    """

    @accept_keywords(ManagerOptions)
    def __init__(self, root: str | TreePath, options: ManagerOptions) -> None:
        """Open a run.

        Args:
            root: Folder of the run, or its URL in an object store. The first save creates it.
            options: All other arguments.

        Raises:
            UsageError: A rule is invalid.
            RefusedError: Signals were given, but this is not the main thread.
        """
        hooks = options.on_published
        self.root = _resolve_root(root)
        self._group = options.process_group
        self._options = options
        self._saving = {
            option.name: getattr(options, option.name) for option in list_options(SaveOptions)
        }
        hook_functions = (hooks,) if callable(hooks) else tuple(hooks)
        self.checkpoints = RunCheckpoints(
            self.root,
            options.policy(),
            hook_functions,
            sync=options.sync,
            room_first=options.make_room == "before",
        )
        saver = AsyncSaver(
            self._group,
            mode=options.mode,
            when_busy=options.when_busy,
            max_failures=options.max_failures,
        )
        self._saver = saver if options.async_ else None
        is_busy = lambda: bool(saver.last and not saver.last.done())  # noqa: E731
        get_gloo_ranks = lambda: saver.groups()[0]  # noqa: E731
        self._schedule = Schedule(
            options, is_busy, lambda: bool(self.checkpoints.list_steps()), get_gloo_ranks
        )
        self._preemption = Preemption(options, get_gloo_ranks)
        self._own_steps: set[int] = (
            set()
        )  # steps that this run has saved, tried to save or resumed from
        self._local_tier = (
            None
            if options.fast is None
            else LocalTier(options, self.checkpoints, self._saver, self._saving)
        )
        self._closed = False
        self._has_begun = False  # whether a save has begun, so that the resumed step is known

    def should_save(self, step: int) -> bool:
        """Return whether a rule such as ``save_every`` requires a save at *step*.

        All ranks call it, and all get the same answer. Rules that use only steps do not
        communicate.

        Raises:
            CkptError: ``save_if`` raised on another rank, or the ranks are at different steps.
        """
        return self._schedule.is_due(checks.check_step(step))

    def preempted(self, *, every: int = 1) -> bool:
        """Return whether the run must end because of a ``preemption`` notice on any rank.

        All ranks call it after the same steps, and all get the same answer, which never changes
        back. It takes one small exchange over gloo, or none without ``preemption``.

        Args:
            every: Communicate only on every N-th call. Other calls repeat the last answer.

        Raises:
            StorageError: The other ranks cannot be reached.
        """
        self._require_open()
        with name_option_in_errors("every"):
            return self._preemption.is_requested(checks.check_positive(every))

    def prepare(self, state: StateDict) -> None:
        """Allocate host memory for copies of *state* in the background.

        See :meth:`AsyncSaver.prepare`.

        Raises:
            CkptError: The state cannot be saved.
        """
        self._require_open()
        if self._saver is not None:
            self._saver.prepare(state)

    def save(
        self,
        step: int,
        state: StateDict,
        metrics: Mapping[str, float] | None = None,
        *,
        urgent: bool = False,
    ) -> SaveFuture:
        """Save *state*, the model and all training state, as ``step-N``.

        A step that this run has saved or resumed from is not saved again. A damaged checkpoint of
        that name is replaced.

        Args:
            step: Step of the checkpoint.
            state: See :func:`ckptctl.save`. If only an adapter is trained, only the adapter.
            metrics: Metrics for ``keep_best``. Those of rank 0 count.
            urgent: Return when the save is on disk, because the process is about to be killed. A
                running save of this step is reused, and any other one is waited for. Past
                ``deadline`` an error is raised on every rank, except with ``async_=False``.

        Returns:
            A future for the outcome. It is already done if saves are not in the background.

        Raises:
            RefusedError: A checkpoint of that step exists, but this run neither saved it nor
                resumed from it. Or, at the first save, a checkpoint of a later step exists, and
                this process has not loaded any.
            CkptError: The save cannot start, or it failed and is not in the background. It is
                raised on every rank. It is also raised after more than ``max_failures`` failed
                saves, when this one has started.
        """
        self._require_open()
        step = checks.check_step(step)
        if not self._has_begun:
            self._prepare_first_save(step)
        if self._local_tier is not None:
            return self._save_local(self._local_tier, step, state, metrics or {}, urgent=urgent)
        path = self.root / f"{STEP_SERIES}{step}"
        urgent_save = (
            self._preemption.start_urgent_save(self._saver) if urgent and self._saver else None
        )
        joined_save = urgent_save.join_last_save(path) if urgent_save else None
        if joined_save:
            return joined_save
        ranks = get_rank_collectives(self._group)
        first = ranks.rank == 0
        parsed_metrics, replies = run_and_all_gather(
            ranks,
            lambda: (
                parse_metrics(metrics or {}),
                self._check_destination(step) if first else None,
            ),
        )
        if replies[0] == "saved":
            run_on_rank_zero(ranks, lambda: self.checkpoints.add_metrics(path, parsed_metrics))
            return SaveFuture(path).mark_published()
        options = {
            **self._saving,
            "beside": partial(self.checkpoints.build_sidecar_files, parsed_metrics),
        }
        if replies[0] == "damaged":
            options["overwrite"] = True
        if urgent_save:
            options["when_busy"] = "wait"
        self._schedule.record_save()
        self._own_steps.add(step)
        future = self.checkpoints.save(state, path, ranks, self._saver, options)
        return urgent_save.wait_until_durable(future) if urgent_save else future

    def _save_local(
        self,
        tier: LocalTier,
        step: int,
        state: StateDict,
        metrics: Mapping[str, float],
        *,
        urgent: bool,
    ) -> SaveFuture:
        self._schedule.record_save()
        future = tier.save(step, state, parse_metrics(metrics), is_own=step in self._own_steps)
        if urgent:
            tier.wait_until_complete(
                step, self._preemption.start_urgent_save(self._saver) if self._saver else None
            )
        return future

    def load_latest(
        self, state: MutableMapping[str, Any], *, fallback: Fallback = "older", **options: Any
    ) -> Resumed | None:
        """Fill *state* from the newest complete checkpoint of the run.

        Checkpoint names of torchtitan, torchtune, transformers, accelerate, Lightning, DeepSpeed,
        Megatron and verl are recognized. Newer incomplete checkpoints are skipped with a warning.
        Abandoned checkpoints, from before the run resumed from an earlier one, are also skipped. If
        the highest step was not saved last for an unknown reason, it is loaded with a warning.

        Args:
            state: See :func:`ckptctl.load`. It is filled in place.
            fallback: Behavior if the newest checkpoint proves damaged during the load on any rank,
                by a truncated file, zeros or a wrong checksum. ``"older"`` loads the next one on
                all ranks, which fills all of *state* again, and lists the damaged one in
                ``skipped``. ``"raise"`` raises an error. Checksums of tensors are compared with
                ``checksum=True``.
            **options: Options of :func:`ckptctl.load`.

        Returns:
            The loaded checkpoint, or None if there is no checkpoint yet.

        Raises:
            SourceNotFoundError: Checkpoints exist, but none of them is complete.
            UnsupportedError: The verdict on the newest checkpoint is unknown. It may be complete.
            RefusedError: The next checkpoint does not contain names of *state* that the damaged one
                may have filled.
            CkptError: The checkpoint cannot be loaded. It is raised on every rank.
        """
        self._require_open()
        self.wait()
        require_choice(fallback, "fallback", get_args(Fallback))
        if resumed := self._load_local(state, options, fallback=fallback):
            return resumed
        ranks = get_rank_collectives(self._group)

        def load_from(start: ResumePoint) -> LoadReport:
            self.checkpoints.refresh()  # every rank reads the current files
            return load(state, start.path, process_group=self._group, **options)

        newest = load_newest(ranks, self.checkpoints, load_from, fallback)
        return self._record_resume(ranks, *newest) if newest else None

    def load(
        self,
        state: MutableMapping[str, Any],
        step: int,
        *,
        discard_newer: bool = False,
        **options: Any,
    ) -> Resumed:
        """Fill *state* from the checkpoint of a step, and resume from there.

        Existing checkpoints of later steps become abandoned. They stay, do not count for any rule,
        and :meth:`load_latest` skips them. Saving under the name of an abandoned checkpoint is
        refused.

        Args:
            state: See :func:`ckptctl.load`. It is filled in place.
            step: The number in the name of the checkpoint.
            discard_newer: Remove the checkpoints ``step-N`` of later steps after *state* is loaded,
                except those that a pointer names, that may be being written, or whose verdict is
                unknown. The value of rank 0 counts.
            **options: Options of :func:`ckptctl.load`.

        Raises:
            SourceNotFoundError: The checkpoint does not exist.
            RefusedError: Several checkpoints have that step, in separate series.
            CkptError: The checkpoint cannot be loaded. It is raised on every rank, and nothing was
                removed.
        """
        self._require_open()
        step = checks.check_step(step)
        self.wait()
        ranks = get_rank_collectives(self._group)
        resumed = self._load_local(state, options, step)
        if resumed is None:
            resume_point = ranks.broadcast(
                run_on_rank_zero(ranks, lambda: self.checkpoints.find_step(step))
            )
            if resume_point is None:
                raise self._missing_step_error(step)
            self.checkpoints.refresh()
            report = load(state, resume_point.path, process_group=self._group, **options)
            resumed = self._record_resume(ranks, resume_point, report)
        run_on_rank_zero(ranks, lambda: self._abandon_later(step, discard=discard_newer))
        return resumed

    def latest_step(self) -> int | None:
        """Return the step that :meth:`load_latest` would load, or None without a checkpoint.

        Raises:
            CkptError: The errors of :meth:`load_latest`, on every rank.
        """
        ranks = get_rank_collectives(self._group)
        if self._local_tier is not None and (newest := self._local_tier.find_newest()):
            return newest.step
        resume_point = ranks.broadcast(run_on_rank_zero(ranks, self.checkpoints.find_newest))
        return resume_point.step if resume_point else None

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints of the run, as seen by rank 0."""
        ranks = get_rank_collectives(self._group)
        return ranks.broadcast(run_on_rank_zero(ranks, self.checkpoints.list_steps))

    def delete(self, step: int) -> None:
        """Remove the checkpoint ``step-N`` regardless of the rules. Call it on all ranks.

        Args:
            step: Step of the checkpoint.

        Raises:
            SourceNotFoundError: The checkpoint does not exist. All errors are raised on every rank.
            RefusedError: The checkpoint is protected: a pointer or a link names it, its verdict is
                unknown, or it is being written. It is also protected if this manager resumed from
                it or saved it last, or if it is the only complete one.
            StorageError: The checkpoint could not be removed.
        """
        self._require_open()
        step = checks.check_step(step)
        if self._saver is not None:
            self._saver.join()
        ranks = get_rank_collectives(self._group)
        if not ranks.broadcast(run_on_rank_zero(ranks, lambda: self.checkpoints.has_step(step))):
            raise self._missing_step_error(step)
        run_on_rank_zero(ranks, lambda: self.checkpoints.delete(step))

    def rate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to an existing checkpoint, for example after a later evaluation.

        All ranks call it, and rank 0 writes.

        Args:
            step: Step of the checkpoint.
            metrics: Metrics by name. Those of rank 0 count.

        Raises:
            SourceNotFoundError: The checkpoint does not exist. All errors are raised on every rank.
            UsageError: A metric is not a number.
            CkptError: The running save failed.
        """
        self._require_open()
        step = checks.check_step(step)
        if self._local_tier is not None and self._local_tier.add_metrics(
            step, parse_metrics(metrics)
        ):
            return
        self.wait()
        ranks = get_rank_collectives(self._group)
        path = self.root / f"{STEP_SERIES}{step}"
        if not ranks.broadcast(run_on_rank_zero(ranks, lambda: self.checkpoints.has_step(step))):
            raise self._missing_step_error(step)
        run_on_rank_zero(ranks, lambda: self.checkpoints.add_metrics(path, parse_metrics(metrics)))

    @accept_keywords(FinalOptions, excluded=SOURCE_OPTIONS)
    def plan_final(
        self, state: StateDict, out: str | TreePath, options: FinalOptions
    ) -> ConversionPlan | None:
        """Plan :meth:`save_final`, so that errors appear before training.

        All ranks call it. Only names, shapes and dtypes are used, and no elements are read or
        written. If this run has already published a model, the plan is for the comparison save.

        Args:
            state: A state with the structure of the one to save.
            out: Destination of the model.
            options: Options of :meth:`save_final`.

        Returns:
            The plan on rank 0, or None on other ranks. Notes are logged.

        Raises:
            CkptError: The save would fail. It is raised on every rank.
        """
        self._require_open()
        published = None if options.overwrite else self.finished(out)
        target = build_comparison_path(published.path) if published else out
        return plan_converted(
            state, target, self._options.build_conversion_options(options), self._group
        )

    def finished(self, out: str | TreePath) -> Finished | None:
        """Return the trained model that this run has published at *out*, or None if there is none.

        All ranks call it before training, so a restarted job can exit early. The record of the run
        in ``ckptctl.final.json`` is compared with the names, sizes and checksums of the files. A
        model that was replaced or changed since does not count.

        Args:
            out: Destination, as in :meth:`save_final`.
        """
        self._require_open()
        ranks, target = get_rank_collectives(self._group), resolve_final_target(out)
        return ranks.broadcast(
            run_on_rank_zero(ranks, lambda: self.checkpoints.final_models.find_model(target))
        )

    @accept_keywords(FinalOptions, excluded=SOURCE_OPTIONS)
    def save_final(self, state: StateDict, out: str | TreePath, options: FinalOptions) -> TreePath:
        """Save the trained model in an exchange format, and return when it is published.

        All ranks write it next to *out*, rank 0 converts it and publishes it atomically. With
        ``keep_last=0``, the checkpoints of the run are then removed. A model that this run has
        already published there stays: *state* is saved next to it, compared, and must be equal.
        *model_type* and *converter* default to those of the manager.

        Args:
            state: State to save. With *only* set to ``model``, only the key ``model`` of it.
            out: Destination: a path or a URL of an object store.
            options: Output options of :func:`ckptctl.convert`.

        Returns:
            The absolute path.

        Raises:
            CkptError: The save failed. It is raised on every rank, and nothing was published or
                removed.
        """
        self._require_open()
        if self._saver is not None:
            self._saver.join()  # a failed save does not prevent this one
        if self._local_tier is not None:
            self._local_tier.join()
        self.checkpoints.wait()
        published = None if options.overwrite else self.finished(out)
        saved = save_converted if published is None else require_same_model
        target = saved(state, out, self._options.build_conversion_options(options), self._group)
        run_on_rank_zero(
            get_rank_collectives(self._group),
            lambda: self.checkpoints.record_final(target, published),
        )
        if self._local_tier is not None:
            self._local_tier.has_final_model = self.checkpoints.policy.last == 0
        return target

    def wait(self) -> None:
        """Wait for the running save, and on rank 0 for removals.

        Raises:
            CkptError: The save failed. It is raised on every rank.
        """
        try:
            if self._saver is not None:
                self._saver.wait()
        finally:
            if self._local_tier is not None:
                self._local_tier.wait()
            self.checkpoints.wait()

    def close(self) -> None:
        """Wait like :meth:`wait`, then release memory and threads.

        Raises:
            CkptError: The save failed. It is raised on every rank.
        """
        if self._closed:
            return
        self._closed = True
        orderly = sys.exc_info()[0] is None
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if self._local_tier is not None:
                self._local_tier.close(orderly=orderly)
            self.checkpoints.wait()
            self._preemption.notices.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RefusedError("this manager is closed", hint="create a new one")

    def _missing_step_error(self, step: int) -> SourceNotFoundError:
        return SourceNotFoundError(
            f"there is no checkpoint of step {step}",
            where=str(self.root / f"{STEP_SERIES}{step}"),
            why="it was not saved, or it was removed",
        )

    def _prepare_first_save(self, step: int) -> None:
        """Find and record the checkpoint from which the run resumed, before the first save."""
        ranks = get_rank_collectives(self._group)
        loaded = ranks.broadcast(
            run_on_rank_zero(ranks, lambda: self.checkpoints.prepare_first_save(step))
        )
        if loaded is not None:
            self._own_steps.add(loaded)
        self._has_begun = True

    def _check_destination(self, step: int) -> DestinationStatus:
        if step in self._own_steps and self._saver is not None:
            self._saver.join()
        if self._options.overwrite:
            return "free"
        return self.checkpoints.check_destination(
            self.root / f"{STEP_SERIES}{step}", is_own=step in self._own_steps
        )

    def _load_local(
        self,
        state: MutableMapping[str, Any],
        options: Mapping[str, Any],
        step: int | None = None,
        fallback: Fallback = "older",
    ) -> Resumed | None:
        if self._local_tier is None:
            return None
        resumed = self._local_tier.load(state, options, step, damaged_ok=fallback == "older")
        if resumed:
            self._schedule.record_resume(resumed.step, resumed.path.stat().st_mtime)
            self._own_steps = {resumed.step}
        return resumed

    def _record_resume(
        self, ranks: RankCollectives, resume_point: ResumePoint, report: LoadReport
    ) -> Resumed:
        run_on_rank_zero(
            ranks, lambda: self.checkpoints.record_resume(resume_point.entry, resume_point.step)
        )
        self._schedule.record_resume(resume_point.step, resume_point.time)
        self._own_steps = (
            {resume_point.step}
            if resume_point.entry.name == f"{STEP_SERIES}{resume_point.step}"
            else set()
        )
        skipped = {
            **(self._local_tier.skipped if self._local_tier is not None else {}),
            **resume_point.skipped,
        }
        return Resumed(resume_point.path, resume_point.step, skipped, report, resume_point.doubts)

    def _abandon_later(self, step: int, *, discard: bool) -> None:
        later = self.checkpoints.list_later(step)
        if later and discard:
            self.checkpoints.discard_after(step)
        elif later:
            _log.warning(
                "%s: abandoned later checkpoints: %s; from the next save on, rules ignore them; "
                "`discard_newer=True` removes them",
                self.root,
                quote_names(later),
            )


def _resolve_root(root: str | TreePath) -> TreePath:
    """Return the absolute path of a run folder.

    Raises:
        CkptError: Checkpoints cannot be managed there.
    """
    with name_option_in_errors("root"):
        checks.check_path(root)
    if not is_url(root):
        require_local_path(root)
    path = expand_home(parse_path(root)).absolute()
    open_run_store(path).require_changeable()
    if not is_url(root):
        require_folder(Path(path))
    return path


def parse_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to floats.

    Raises:
        UsageError: *metrics* is not a mapping of names to numbers.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(f"{metrics!r} is not a dictionary of metrics", where="metrics")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError("a metric is not a number", where="metrics", why=str(error)) from error
