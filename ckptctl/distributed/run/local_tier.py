"""Local tier of a run: rank-local saves to local disks, and copies to the run folder.

The training thread waits for no other rank. A background thread per save exchanges the outcome with
the other ranks. Older saves are removed, and copies started, only when a save is complete on every
rank. These decisions depend only on exchanged data, so they are the same on all ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckptctl.distributed.background.async_save import AsyncSaver
from ckptctl.distributed.background.save_thread import SaveFuture, run_in_background
from ckptctl.distributed.group import COPY_TIMEOUT, create_gloo_group, get_rank_collectives
from ckptctl.distributed.run.keeper import STEP_SERIES, RunCheckpoints
from ckptctl.distributed.run.local_folder import (
    LocalFolder,
    LocalSave,
    build_launch_name,
    ensure_run_id,
    parse_launch_number,
)
from ckptctl.distributed.run.local_load import COPY_OF_KEY, find_newest_local, load_from_local_disks
from ckptctl.distributed.run.manager_options import ManagerOptions, Resumed
from ckptctl.distributed.run.preemption import UrgentSave
from ckptctl.distributed.run.root_copy import RateLimiter, SavedPart, build_disk_state
from ckptctl.distributed.saving.local_state import build_local_state
from ckptctl.distributed.saving.save import write_collectively, write_rank_local
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict
from ckptctl.errors import (
    CkptError,
    RefusedError,
    StorageError,
    UsageError,
)
from ckptctl.ranks.coordinator import (
    RankCollectives,
    run_on_all_ranks,
    run_on_rank_zero,
    to_sendable_error,
)
from ckptctl.runs.notes import read_run_record
from ckptctl.save_load.saving.local_shards import LocalShards
from ckptctl.storage.destinations import require_folder, require_local_path
from ckptctl.storage.paths import expand_home
from ckptctl.tree import TreePath

_log = logging.getLogger("ckptctl")


@dataclass(eq=False)
class _PendingSave:
    """Save to the local disk that this process has started."""

    save: LocalSave
    metrics: dict[str, float]
    is_copied: bool  # whether the save should be copied to the run folder
    shards: LocalShards | None = None
    values: Mapping[str, bytes] = field(default_factory=dict)
    failure: BaseException | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)
    completion: SaveFuture = field(default_factory=lambda: SaveFuture(Path()))  # on all ranks

    def record_outcome(self, future: Future[TreePath | None]) -> None:
        """Record the outcome of the save from its finished *future*."""
        self.failure = future.exception()
        self.has_ended.set()

    def record_failure(self, error: BaseException) -> None:
        """Record that the save failed with *error*, unless its outcome is already known."""
        if not self.has_ended.is_set():
            self.failure = error
            self.has_ended.set()


class _SaveReport(NamedTuple):
    """Report that a rank sends to the other ranks after a save."""

    save: LocalSave
    problem: str  # why the rank's part is incomplete, empty if it is complete
    copying: LocalSave | None
    is_copy_due: bool  # whether a copy is due


class LocalTier:
    """Saves to local disks and their copies in the run folder, for a checkpoint manager."""

    _report_ranks: RankCollectives
    _copy_ranks: RankCollectives

    def __init__(
        self,
        options: ManagerOptions,
        keeper: RunCheckpoints,
        saver: AsyncSaver | None,
        saving: Mapping[str, Any],
    ) -> None:
        assert options.fast is not None
        require_local_path(options.fast)
        path = expand_home(Path(options.fast)).absolute()
        require_folder(path)
        if path.is_relative_to(keeper.root) or keeper.root.is_relative_to(path):
            raise UsageError(
                "the fast folder and the run folder must not contain each other",
                where=f"{path}, {keeper.root}",
                hint="use separate folders, on separate disks",
            )
        self._folder = LocalFolder(path)
        self._options = options
        self._group = options.process_group
        self._keeper = keeper
        self._saver = saver
        self._saving = dict(saving)
        self._pace = RateLimiter(options.copy_rate)
        self._current_launch: LocalSave | None = None  # launch of the run, common to its saves
        self._connected = False
        self._count = 0
        self._is_copy_overdue = False  # whether a copy is overdue
        self._last: threading.Thread | None = None
        self._complete_saves: list[_PendingSave] = []  # newest saves that are complete on all ranks
        self._loaded: LocalSave | None = None
        self._copying: tuple[LocalSave, Future[None]] | None = None
        self._copied: _PendingSave | None = None
        self._failure: BaseException | None = None
        self._saves: dict[int, _PendingSave] = {}  # saves of this launch, by step
        self._rating = threading.Lock()
        self.skipped: Mapping[str, str] = {}  # saves that the last load skipped, with reasons
        self.has_final_model = (
            False  # whether the final model is published, so that nothing is copied
        )

    def save(
        self, step: int, state: StateDict, metrics: Mapping[str, float], *, is_own: bool = False
    ) -> SaveFuture:
        """Save this rank's part to the local disk, as :meth:`CheckpointManager.save` does.

        Args:
            step: Step of the save.
            state: State of this rank.
            metrics: Metrics by name.
            is_own: Whether training resumed from this step.
        """
        if is_own or step in self._saves:
            return self._return_earlier_save(step, metrics)
        if self._current_launch is None:
            self._current_launch = self._begin_launch()
        due = self._count % self._options.copy_every == 0
        pending = _PendingSave(self._current_launch._replace(step=step), dict(metrics), due)
        self._count += 1
        self._saves[step] = pending
        earlier = self._last
        self._last = threading.Thread(
            target=self._exchange_outcome, args=(pending, earlier), name="ckptctl-agree"
        )
        self._last.start()
        try:
            return self._write_part(pending, state)
        except BaseException as error:
            last_save = self._saver.last if self._saver else None
            if last_save and last_save.path == self._folder.build_path(pending.save):
                last_save.add_done_callback(
                    pending.record_outcome
                )  # the error is from an earlier save
            else:
                pending.record_failure(error)
            raise

    def _return_earlier_save(self, step: int, metrics: Mapping[str, float]) -> SaveFuture:
        """Return the future of an earlier save, or of the step from which training resumed."""
        pending = self._saves.get(step)
        if pending is None:
            return SaveFuture(self._keeper.root / f"{STEP_SERIES}{step}").mark_published()
        self.add_metrics(step, metrics)
        pending.has_ended.wait()
        if pending.failure is not None:
            raise pending.failure
        return SaveFuture(self._folder.build_path(pending.save)).mark_published()

    def _write_part(self, pending: _PendingSave, state: StateDict) -> SaveFuture:
        path, ranks = self._folder.build_path(pending.save), self._report_ranks
        local = build_local_state(state, trusted=self._options.trusted)
        pending.shards, pending.values = local.shards, local.values
        call_options = {**self._saving, "overwrite": False}
        if self._saver is not None:
            future = self._saver.save(local, path, collectives=False, **call_options)
        else:
            write_rank_local(local, path, ranks.rank, ranks.world, SaveOptions(**call_options))
            future = SaveFuture(path).mark_published()
        future.add_done_callback(pending.record_outcome)
        return future

    def _begin_launch(self) -> LocalSave:
        """Agree on the name of this launch. All ranks call this once, at the first save."""
        ranks = get_rank_collectives(self._group)
        root, folder = self._keeper.root, self._folder
        run = ranks.broadcast(run_on_rank_zero(ranks, lambda: ensure_run_id(root)))
        highest = run_on_all_ranks(ranks, lambda: folder.find_highest_launch(run))
        if ranks.rank == 0:
            self._keeper.refresh()
            records = (read_run_record(path) for path in root.glob(f"{STEP_SERIES}*"))
            highest = max(
                [highest, *(parse_launch_number(r.members.get(COPY_OF_KEY), run) for r in records)]
            )
        number = max(ranks.all_gather(highest)) + 1
        start = ranks.broadcast(build_launch_name(run, number))
        run_on_all_ranks(ranks, lambda: folder.begin_launch(start))
        if not self._connected:
            self._report_ranks = create_gloo_group(self._group)
            self._copy_ranks = create_gloo_group(self._group, COPY_TIMEOUT)
            self._connected = True
        self._count = 0
        return LocalSave(number, 0, start)

    def _exchange_outcome(self, pending: _PendingSave, earlier: threading.Thread | None) -> None:
        """Exchange the outcome of a save with all ranks, and remove or copy saves accordingly.

        This runs in a background thread, after the thread *earlier* of the previous save.
        """
        if earlier:
            earlier.join()
        pending.has_ended.wait()
        copying = self._copying[0] if self._copying and not self._copying[1].done() else None
        problem = to_sendable_error(pending.failure)
        try:
            reports = self._report_ranks.all_gather(
                _SaveReport(
                    pending.save,
                    str(problem) if problem else "",
                    copying,
                    pending.is_copied or self._is_copy_overdue,
                )
            )
            self._apply_reports(pending, reports)
            pending.completion.mark_published()
        except Exception as error:
            self._failure = error
            pending.completion.decided.set()
            pending.completion.set_exception(error)
            _log.error("%s: %s", pending.save.name, error)

    def _apply_reports(self, pending: _PendingSave, reports: list[_SaveReport]) -> None:
        if len({report.save for report in reports}) > 1:
            steps = "; ".join(
                f"rank {rank}: {report.save.step}" for rank, report in enumerate(reports)
            )
            raise RefusedError(
                "the ranks save different steps", where=pending.save.launch_name, why=steps
            )
        problems = {rank: report.problem for rank, report in enumerate(reports) if report.problem}
        copying = {report.copying for report in reports if report.copying}
        due = any(report.is_copy_due for report in reports)
        self._is_copy_overdue = due and bool(problems or copying)
        if problems:
            why = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
            raise StorageError(
                "a save is not complete on all ranks", where=pending.save.name, why=why
            )
        self._complete_saves = [*self._complete_saves, pending][-self._options.fast_keep :]
        if due and not copying:
            copying = {pending.save}
            self._copying = (
                pending.save,
                run_in_background(partial(self._copy_to_root, pending), "copy to the root"),
            )
        keep = {complete_save.save for complete_save in self._complete_saves} | copying
        if self._loaded and len(self._complete_saves) < self._options.fast_keep:
            keep.add(self._loaded)
        try:
            for name in self._folder.remove_old_saves(pending.save, keep):
                _log.info("removed %s", self._folder.path / name)
        except (CkptError, OSError) as error:
            _log.warning("nothing was removed from %s: %s", self._folder.path, error)

    def _copy_to_root(self, pending: _PendingSave) -> None:
        """Copy a save that is complete on all ranks to the run folder. All ranks call it."""
        target = self._keeper.root / f"{STEP_SERIES}{pending.save.step}"
        try:
            self._write_copy(pending, target)
        except BaseException as error:
            self._failure, self._is_copy_overdue = error, True
            _log.error("%s was not copied to %s: %s", pending.save.name, target, error)
            return
        with self._rating:
            self._copied = pending
            if self._copy_ranks.rank == 0:
                self._keeper.add_metrics(target, pending.metrics)
        if self._copy_ranks.rank == 0:
            self._keeper.handle_published(target)

    def _write_copy(self, pending: _PendingSave, target: TreePath) -> None:
        ranks, keeper = self._copy_ranks, self._keeper

        def prepare_target() -> bool:
            overwrite = self._options.overwrite
            damaged = not overwrite and keeper.check_destination(target, is_own=False) == "damaged"
            keeper.make_room(target)
            return damaged

        assert pending.shards
        part = SavedPart(
            self._folder.build_path(pending.save), ranks.rank, pending.shards, self._pace
        )
        options = {
            **self._saving,
            "beside": partial(
                keeper.build_sidecar_files, pending.metrics, {COPY_OF_KEY: pending.save.launch_name}
            ),
        }
        options |= {"execute": part.execute, "stream": part.stream, "digests": part.read_digests}
        if ranks.broadcast(run_on_rank_zero(ranks, prepare_target)):
            options["overwrite"] = True
        write_collectively(
            build_disk_state(pending.shards, pending.values), target, ranks, SaveOptions(**options)
        )

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add metrics to a local save and its copy.

        Returns:
            Whether this launch has saved *step*.
        """
        pending = self._saves.get(step)
        if pending is None:
            return False
        with self._rating:
            pending.metrics.update(metrics)
            target = self._keeper.root / f"{STEP_SERIES}{step}"
            self._keeper.refresh()
            if (
                self._report_ranks.rank == 0
                and read_run_record(target).members.get(COPY_OF_KEY) == pending.save.launch_name
            ):
                self._keeper.add_metrics(target, metrics)
        return True

    def load(
        self,
        state: MutableMapping[str, Any],
        options: Mapping[str, Any],
        step: int | None = None,
        *,
        damaged_ok: bool = True,
    ) -> Resumed | None:
        """Load *state* from local disks if they have the newest save.

        If *step* is not None, only saves of that step are considered.

        Returns:
            The loaded save, or None if the caller must load from the run folder. :attr:`skipped`
            then contains newer local saves that cannot be loaded.
        """
        ranks, merged_options = (
            get_rank_collectives(self._group),
            {"process_group": self._group, **options},
        )
        loaded = load_from_local_disks(
            ranks, self._folder, self._keeper, state, merged_options, step, damaged_ok=damaged_ok
        )
        # The next save belongs to a new launch of the run.
        self._current_launch, self._loaded, self.skipped = None, loaded.save, loaded.skipped
        self._complete_saves, self._saves, self._copied = [], {}, None
        if loaded.save is None or loaded.path is None or loaded.report is None:
            return None
        run_on_rank_zero(ranks, partial(self._keeper.record_resume_elsewhere, loaded.save.step))
        return Resumed(loaded.path, loaded.save.step, loaded.skipped, loaded.report)

    def wait_until_complete(self, step: int, urgent_save: UrgentSave | None) -> None:
        """Wait until the save of *step* is complete on all ranks.

        If *urgent_save* is not None, wait at most until its deadline.

        Raises:
            CkptError: The save failed on a rank, or missed the deadline.
        """
        pending = self._saves.get(step)
        if pending is None:  # training resumed from it
            return
        if urgent_save:
            urgent_save.wait_until_durable(pending.completion)
        pending.completion.result()

    def find_newest(self) -> LocalSave | None:
        """Find the newest local save that can be loaded.

        Return None if none can be loaded, or if the run folder has a newer checkpoint.
        """
        return find_newest_local(get_rank_collectives(self._group), self._folder, self._keeper)

    def join(self) -> None:
        """Wait for running saves and copies, and ignore errors that they raise.

        The rate limit of copies is suspended while this method waits.
        """
        self._pace.lift_limit()
        try:
            if self._last:
                self._last.join()
            if self._copying:
                self._copying[1].exception()
        finally:
            self._pace.restore_limit()

    def wait(self) -> None:
        """Wait for running saves and copies, and suspend the rate limit of copies meanwhile.

        Raises:
            CkptError: Since the last call, a save was not completed on some rank, or a copy failed.
        """
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, orderly: bool) -> None:
        """Wait like :meth:`wait`, and copy the newest complete save to the run folder.

        Args:
            orderly: Whether the run ends without an error. After an error on this rank, other ranks
                may never call this method, so nothing is copied.
        """
        try:
            try:
                self.wait()
            finally:
                if orderly and self._complete_saves and not self.has_final_model:
                    self._copy_newest()
        finally:
            self._folder.close()
            self._complete_saves = []

    def _copy_newest(self) -> None:
        newest = self._complete_saves[-1]
        if any(self._report_ranks.all_gather(self._copied is not newest)):
            self._pace.lift_limit()
            self._copy_to_root(newest)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
