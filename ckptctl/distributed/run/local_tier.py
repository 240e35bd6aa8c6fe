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
from ckptctl.distributed.background.save_thread import SaveFuture, in_background
from ckptctl.distributed.group import COPYING, coordinator, gloo_group
from ckptctl.distributed.run.keeper import SERIES, Keeper
from ckptctl.distributed.run.local_folder import (
    LocalFolder,
    LocalSave,
    ensure_identity,
    number_of,
    start_name,
)
from ckptctl.distributed.run.local_load import COPY_OF, load_local, newest_local
from ckptctl.distributed.run.manager_options import ManagerOptions, Resumed
from ckptctl.distributed.run.preemption import Hurry
from ckptctl.distributed.run.root_copy import Pace, SavedPart, state_on_disk
from ckptctl.distributed.saving.local_state import local_state
from ckptctl.distributed.saving.save import write, write_alone
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict
from ckptctl.errors import (
    CkptError,
    RefusedError,
    StorageError,
    UsageError,
)
from ckptctl.ranks.coordinator import Coordinator, on_first, sendable, together
from ckptctl.runs.notes import read_run_record
from ckptctl.save_load.saving.local_shards import LocalShards
from ckptctl.storage.destinations import require_folder, require_local_path
from ckptctl.storage.paths import expand_home
from ckptctl.tree import TreePath

_log = logging.getLogger("ckptctl")


@dataclass(eq=False)
class _PendingSave:
    """Local save of this process."""

    save: LocalSave
    rated: dict[str, float]
    due: bool  # whether it should be copied
    shards: LocalShards | None = None
    values: Mapping[str, bytes] = field(default_factory=dict)
    failure: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)
    whole: SaveFuture = field(default_factory=lambda: SaveFuture(Path()))  # on all ranks

    def end(self, future: Future[TreePath | None]) -> None:
        """Record the outcome of the save."""
        self.failure = future.exception()
        self.over.set()

    def fail(self, error: BaseException) -> None:
        """Record that the save failed, unless its outcome is known."""
        if not self.over.is_set():
            self.failure = error
            self.over.set()


class _SaveReport(NamedTuple):
    """Report of a rank to the others after a save."""

    save: LocalSave
    problem: str  # why its part is incomplete, empty if it is complete
    copying: LocalSave | None
    due: bool  # whether a copy is due


class LocalTier:
    """Local saves of a run and their copies, for its manager."""

    _rounds: Coordinator
    _copies: Coordinator

    def __init__(
        self,
        options: ManagerOptions,
        keeper: Keeper,
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
        self._pace = Pace(options.copy_rate)
        self._start: LocalSave | None = None  # start of the run, common to its saves
        self._connected = False
        self._count = 0
        self._owed = False  # whether a copy is overdue
        self._last: threading.Thread | None = None
        self._whole: list[_PendingSave] = []  # newest saves that are complete on all ranks
        self._loaded: LocalSave | None = None
        self._copying: tuple[LocalSave, Future[None]] | None = None
        self._copied: _PendingSave | None = None
        self._failure: BaseException | None = None
        self._saves: dict[int, _PendingSave] = {}  # of this start, by step
        self._rating = threading.Lock()
        self.skipped: Mapping[str, str] = {}  # saves that the last load skipped, with reasons
        self.ended = False  # whether the final model is published, so that nothing is copied

    def save(
        self, step: int, state: StateDict, rated: Mapping[str, float], *, own: bool = False
    ) -> SaveFuture:
        """Save this rank's part to the local disk, as :meth:`CheckpointManager.save` does.

        Args:
            step: Step of the save.
            state: State of this rank.
            rated: Metrics.
            own: Whether training resumed from that step.
        """
        if own or step in self._saves:
            return self._saved_before(step, rated)
        if self._start is None:
            self._start = self._begin()
        due = self._count % self._options.copy_every == 0
        pending = _PendingSave(self._start._replace(step=step), dict(rated), due)
        self._count += 1
        self._saves[step] = pending
        earlier = self._last
        self._last = threading.Thread(
            target=self._agree, args=(pending, earlier), name="ckptctl-agree"
        )
        self._last.start()
        try:
            return self._write(pending, state)
        except BaseException as error:
            begun = self._saver.last if self._saver else None
            if begun and begun.path == self._folder.path_of(pending.save):
                begun.add_done_callback(pending.end)  # the error is from an earlier save
            else:
                pending.fail(error)
            raise

    def _saved_before(self, step: int, rated: Mapping[str, float]) -> SaveFuture:
        """Return the future of an earlier save, or of the step from which training resumed."""
        pending = self._saves.get(step)
        if pending is None:
            return SaveFuture(self._keeper.root / f"{SERIES}{step}").publish()
        self.rate(step, rated)
        pending.over.wait()
        if pending.failure is not None:
            raise pending.failure
        return SaveFuture(self._folder.path_of(pending.save)).publish()

    def _write(self, pending: _PendingSave, state: StateDict) -> SaveFuture:
        path, ranks = self._folder.path_of(pending.save), self._rounds
        own = local_state(state, trusted=self._options.trusted)
        pending.shards, pending.values = own.shards, own.values
        alone = {**self._saving, "overwrite": False}
        if self._saver is not None:
            future = self._saver.save(own, path, collectives=False, **alone)
        else:
            write_alone(own, path, ranks.rank, ranks.world, SaveOptions(**alone))
            future = SaveFuture(path).publish()
        future.add_done_callback(pending.end)
        return future

    def _begin(self) -> LocalSave:
        """Agree on the name of this start of the run. All ranks call it once, at the first save."""
        ranks = coordinator(self._group)
        root, folder = self._keeper.root, self._folder
        run = ranks.broadcast(on_first(ranks, lambda: ensure_identity(root)))
        highest = together(ranks, lambda: folder.highest(run))
        if ranks.rank == 0:
            self._keeper.refresh()
            records = (read_run_record(one) for one in root.glob(f"{SERIES}*"))
            highest = max([highest, *(number_of(r.members.get(COPY_OF), run) for r in records)])
        number = max(ranks.all_gather(highest)) + 1
        start = ranks.broadcast(start_name(run, number))
        together(ranks, lambda: folder.begin(start))
        if not self._connected:
            self._rounds = gloo_group(self._group)
            self._copies = gloo_group(self._group, COPYING)
            self._connected = True
        self._count = 0
        return LocalSave(number, 0, start)

    def _agree(self, pending: _PendingSave, earlier: threading.Thread | None) -> None:
        """Exchange the outcome of a save, and act on it, in a background thread."""
        if earlier:
            earlier.join()
        pending.over.wait()
        copying = self._copying[0] if self._copying and not self._copying[1].done() else None
        problem = sendable(pending.failure)
        try:
            reports = self._rounds.all_gather(
                _SaveReport(
                    pending.save,
                    str(problem) if problem else "",
                    copying,
                    pending.due or self._owed,
                )
            )
            self._decide(pending, reports)
            pending.whole.publish()
        except Exception as error:
            self._failure = error
            pending.whole.decided.set()
            pending.whole.set_exception(error)
            _log.error("%s: %s", pending.save.name, error)

    def _decide(self, pending: _PendingSave, reports: list[_SaveReport]) -> None:
        if len({report.save for report in reports}) > 1:
            steps = "; ".join(
                f"rank {rank}: {report.save.step}" for rank, report in enumerate(reports)
            )
            raise RefusedError(
                "the ranks save different steps", where=pending.save.start, why=steps
            )
        problems = {rank: report.problem for rank, report in enumerate(reports) if report.problem}
        copying = {report.copying for report in reports if report.copying}
        due = any(report.due for report in reports)
        self._owed = due and bool(problems or copying)
        if problems:
            why = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
            raise StorageError(
                "a save is not complete on all ranks", where=pending.save.name, why=why
            )
        self._whole = [*self._whole, pending][-self._options.fast_keep :]
        if due and not copying:
            copying = {pending.save}
            self._copying = (
                pending.save,
                in_background(partial(self._copy, pending), "copy to the root"),
            )
        keep = {whole.save for whole in self._whole} | copying
        if self._loaded and len(self._whole) < self._options.fast_keep:
            keep.add(self._loaded)
        try:
            for name in self._folder.retire(pending.save, keep):
                _log.info("removed %s", self._folder.path / name)
        except (CkptError, OSError) as error:
            _log.warning("nothing was removed from %s: %s", self._folder.path, error)

    def _copy(self, pending: _PendingSave) -> None:
        """Copy a save that is complete on all ranks to the run folder. All ranks call it."""
        target = self._keeper.root / f"{SERIES}{pending.save.step}"
        try:
            self._write_copy(pending, target)
        except BaseException as error:
            self._failure, self._owed = error, True
            _log.error("%s was not copied to %s: %s", pending.save.name, target, error)
            return
        with self._rating:
            self._copied = pending
            if self._copies.rank == 0:
                self._keeper.rate(target, pending.rated)
        if self._copies.rank == 0:
            self._keeper.published(target)

    def _write_copy(self, pending: _PendingSave, target: TreePath) -> None:
        ranks, keeper = self._copies, self._keeper

        def begin() -> bool:
            overwrite = self._options.overwrite
            damaged = not overwrite and keeper.standing(target, own=False) == "damaged"
            keeper.make_room(target)
            return damaged

        assert pending.shards
        part = SavedPart(self._folder.path_of(pending.save), ranks.rank, pending.shards, self._pace)
        options = {
            **self._saving,
            "beside": partial(keeper.beside, pending.rated, {COPY_OF: pending.save.start}),
        }
        options |= {"execute": part.execute, "stream": part.stream, "digests": part.digests}
        if ranks.broadcast(on_first(ranks, begin)):
            options["overwrite"] = True
        write(state_on_disk(pending.shards, pending.values), target, ranks, SaveOptions(**options))

    def rate(self, step: int, rated: Mapping[str, float]) -> bool:
        """Add metrics to a save and its copy, and return whether this start of the run saved it."""
        pending = self._saves.get(step)
        if pending is None:
            return False
        with self._rating:
            pending.rated.update(rated)
            target = self._keeper.root / f"{SERIES}{step}"
            self._keeper.refresh()
            if (
                self._rounds.rank == 0
                and read_run_record(target).members.get(COPY_OF) == pending.save.start
            ):
                self._keeper.rate(target, rated)
        return True

    def load(
        self,
        state: MutableMapping[str, Any],
        options: Mapping[str, Any],
        step: int | None = None,
        *,
        damaged_ok: bool = True,
    ) -> Resumed | None:
        """Load *state* from local disks if they have the newest save, or the one of *step*.

        Returns:
            The loaded save, or None to load from the run folder. :attr:`skipped` then contains
            newer local saves that cannot be loaded.
        """
        ranks, how = coordinator(self._group), {"process_group": self._group, **options}
        loaded = load_local(
            ranks, self._folder, self._keeper, state, how, step, damaged_ok=damaged_ok
        )
        # The next save belongs to another start of the run.
        self._start, self._loaded, self.skipped = None, loaded.save, loaded.skipped
        self._whole, self._saves, self._copied = [], {}, None
        if loaded.save is None or loaded.path is None or loaded.report is None:
            return None
        on_first(ranks, partial(self._keeper.resume_elsewhere, loaded.save.step))
        return Resumed(loaded.path, loaded.save.step, loaded.skipped, loaded.report)

    def durable(self, step: int, hurry: Hurry | None) -> None:
        """Wait until a save is complete on all ranks, or with *hurry* until its deadline.

        Raises:
            CkptError: The save failed on a rank, or missed the deadline.
        """
        pending = self._saves.get(step)
        if pending is None:  # training resumed from it
            return
        if hurry:
            hurry.durable(pending.whole)
        pending.whole.result()

    def newest(self) -> LocalSave | None:
        """Find the newest loadable local save, or None if the run folder has a newer one."""
        return newest_local(coordinator(self._group), self._folder, self._keeper)

    def join(self) -> None:
        """Wait for running saves and copies without rate limit, and ignore failures."""
        self._pace.lift()
        try:
            if self._last:
                self._last.join()
            if self._copying:
                self._copying[1].exception()
        finally:
            self._pace.restore()

    def wait(self) -> None:
        """Wait for running saves and copies without rate limit.

        Raises:
            CkptError: Since the last call, a save was not complete on some rank, or not copied.
        """
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, orderly: bool) -> None:
        """Wait like :meth:`wait`, and copy the newest save.

        Args:
            orderly: Whether the run ends without an error. After an error on this rank, the others
                may never call this method, so nothing is copied.
        """
        try:
            try:
                self.wait()
            finally:
                if orderly and self._whole and not self.ended:
                    self._copy_newest()
        finally:
            self._folder.close()
            self._whole = []

    def _copy_newest(self) -> None:
        newest = self._whole[-1]
        if any(self._rounds.all_gather(self._copied is not newest)):
            self._pace.lift()
            self._copy(newest)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
