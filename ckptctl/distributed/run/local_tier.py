"""Saves to local disks first: each rank its own part, without the others; copies into the root.

The thread that trains waits for no other rank. Behind it a thread per save tells the other ranks
how theirs went, so all know which saves are whole on every rank, and only that lets an older one be
removed or a copy begin. All of these decisions are made from what was exchanged and from nothing
else, so all ranks make the same ones.
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
    identity,
    made_identity,
    number_of,
    start_name,
)
from ckptctl.distributed.run.local_load import COPY_OF, InRoot, go_on, in_root, newest
from ckptctl.distributed.run.options import ManagerOptions, Resumed
from ckptctl.distributed.run.preemption import Hurry
from ckptctl.distributed.run.root_copy import Pace, SavedPart, state_on_disk
from ckptctl.distributed.saving.local_state import local_state
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.save import write, write_alone
from ckptctl.distributed.state import StateDict
from ckptctl.errors import (
    CkptError,
    RefusedError,
    SourceNotFoundError,
    StorageError,
    UsageError,
)
from ckptctl.ops.ranks.coordinator import Coordinator, on_first, sendable, together
from ckptctl.ops.runs.notes import run_record
from ckptctl.ops.saving.local_shards import LocalShards
from ckptctl.storage.destinations import require_folder, require_path
from ckptctl.storage.paths import home_expanded
from ckptctl.storage.tree import TreePath

_log = logging.getLogger("ckptctl")


@dataclass(eq=False)
class _Save:
    """A save of this process."""

    save: LocalSave
    rated: dict[str, float]
    due: bool  # whether it is one of those that are copied
    shards: LocalShards | None = None
    values: Mapping[str, bytes] = field(default_factory=dict)
    failure: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)
    whole: SaveFuture = field(default_factory=lambda: SaveFuture(Path()))  # on all ranks

    def end(self, future: Future[TreePath | None]) -> None:
        """Take note of how it went."""
        self.failure = future.exception()
        self.over.set()

    def fail(self, error: BaseException) -> None:
        """Take note that it did not begin, or not end."""
        if not self.over.is_set():
            self.failure = error
            self.over.set()


class _Word(NamedTuple):
    """What a rank tells the others after a save."""

    save: LocalSave
    problem: str  # why its part is not whole; empty: it is
    copying: LocalSave | None
    due: bool  # whether a copy is due


class LocalTier:
    """The local disks of a run, below its manager."""

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
        require_path(options.fast)
        path = home_expanded(Path(options.fast)).absolute()
        require_folder(path)
        if path.is_relative_to(keeper.root) or keeper.root.is_relative_to(path):
            raise UsageError(
                "the fast folder and the run folder must not contain each other",
                where=f"{path}, {keeper.root}",
                hint="use separate folders, on separate disks",
            )
        self._folder = LocalFolder(path)
        self._options = options
        self._keeper = keeper
        self._saver = saver
        self._saving = dict(saving)
        self._pace = Pace(options.copy_rate)
        self._start: LocalSave | None = None  # what the saves of this start have in common
        self._connected = False
        self._count = 0
        self._owed = False  # whether a copy is due that could not be made then
        self._last: threading.Thread | None = None
        self._whole: list[_Save] = []  # the newest saves that are whole on all ranks
        self._loaded: LocalSave | None = None
        self._copying: tuple[LocalSave, Future[None]] | None = None
        self._copied: _Save | None = None
        self._failure: BaseException | None = None
        self._saves: dict[int, _Save] = {}  # of this start, by step
        self._rating = threading.Lock()
        self.skipped: Mapping[str, str] = {}  # by the last load
        self.ended = False  # whether the run has its final output, so that nothing is to be copied

    def save(
        self, step: int, state: StateDict, rated: Mapping[str, float], *, own: bool = False
    ) -> SaveFuture:
        """Save this rank's part; see :meth:`CheckpointManager.save`.

        Args:
            step: Its number.
            state: What this rank holds.
            rated: Metrics.
            own: Whether training went on from that step.
        """
        if own or step in self._saves:
            return self._saved_before(step, rated)
        if self._start is None:
            self._start = self._begin()
        due = self._count % self._options.copy_every == 0
        one = _Save(self._start._replace(step=step), dict(rated), due)
        self._count += 1
        self._saves[step] = one
        earlier = self._last
        self._last = threading.Thread(target=self._agree, args=(one, earlier), name="ckptctl-agree")
        self._last.start()
        try:
            return self._write(one, state)
        except BaseException as error:
            begun = self._saver.last if self._saver else None
            if begun and begun.path == self._folder.path_of(one.save):
                begun.add_done_callback(one.end)  # what is raised is of those before it
            else:
                one.fail(error)
            raise

    def _saved_before(self, step: int, rated: Mapping[str, float]) -> SaveFuture:
        """Return the outcome of a save that was made before, of the step gone on from perhaps."""
        one = self._saves.get(step)
        if one is None:
            return SaveFuture(self._keeper.root / f"{SERIES}{step}").publish()
        self.rate(step, rated)
        one.over.wait()
        if one.failure is not None:
            raise one.failure
        return SaveFuture(self._folder.path_of(one.save)).publish()

    def _write(self, one: _Save, state: StateDict) -> SaveFuture:
        path, ranks = self._folder.path_of(one.save), self._rounds
        own = local_state(state, trusted=self._options.trusted)
        one.shards, one.values = own.shards, own.values
        alone = {**self._saving, "overwrite": False}
        if self._saver is not None:
            future = self._saver.save(own, path, collectives=False, **alone)
        else:
            write_alone(own, path, ranks.rank, ranks.world, SaveOptions(**alone))
            future = SaveFuture(path).publish()
        future.add_done_callback(one.end)
        return future

    def _begin(self) -> LocalSave:
        """Agree on the name of this start of the run; all ranks are here together, once."""
        ranks = coordinator(self._options.process_group)
        root, folder = self._keeper.root, self._folder
        run = ranks.broadcast(on_first(ranks, lambda: made_identity(root)))
        highest = together(ranks, lambda: folder.highest(run))
        if ranks.rank == 0:
            self._keeper.refresh()
            records = (run_record(one) for one in root.glob(f"{SERIES}*"))
            highest = max([highest, *(number_of(r.members.get(COPY_OF), run) for r in records)])
        number = max(ranks.all_gather(highest)) + 1
        start = ranks.broadcast(start_name(run, number))
        together(ranks, lambda: folder.begin(start))
        if not self._connected:
            self._rounds = gloo_group(self._options.process_group)
            self._copies = gloo_group(self._options.process_group, COPYING)
            self._connected = True
        self._count = 0
        return LocalSave(number, 0, start)

    def _agree(self, one: _Save, earlier: threading.Thread | None) -> None:
        """Exchange how a save went, and do what follows from it; in a thread of its own."""
        if earlier:
            earlier.join()
        one.over.wait()
        copying = self._copying[0] if self._copying and not self._copying[1].done() else None
        problem = sendable(one.failure)
        try:
            said = self._rounds.all_gather(
                _Word(one.save, str(problem) if problem else "", copying, one.due or self._owed)
            )
            self._decide(one, said)
            one.whole.publish()
        except Exception as error:
            self._failure = error
            one.whole.decided.set()
            one.whole.set_exception(error)
            _log.error("%s: %s", one.save.name, error)

    def _decide(self, one: _Save, said: list[_Word]) -> None:
        if len({word.save for word in said}) > 1:
            steps = "; ".join(f"rank {rank}: {word.save.step}" for rank, word in enumerate(said))
            raise RefusedError("the ranks save different steps", where=one.save.start, why=steps)
        problems = {rank: word.problem for rank, word in enumerate(said) if word.problem}
        copying = {word.copying for word in said if word.copying}
        due = any(word.due for word in said)
        self._owed = due and bool(problems or copying)
        if problems:
            why = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
            raise StorageError("a save is not complete on all ranks", where=one.save.name, why=why)
        self._whole = [*self._whole, one][-self._options.fast_keep :]
        if due and not copying:
            copying = {one.save}
            self._copying = one.save, in_background(partial(self._copy, one), "copy to the root")
        keep = {whole.save for whole in self._whole} | copying
        if self._loaded and len(self._whole) < self._options.fast_keep:
            keep.add(self._loaded)
        try:
            for name in self._folder.retire(one.save, keep):
                _log.info("removed %s", self._folder.path / name)
        except (CkptError, OSError) as error:
            _log.warning("nothing was removed from %s: %s", self._folder.path, error)

    def _copy(self, one: _Save) -> None:
        """Write a save that is whole on all ranks into the root; all ranks do."""
        target = self._keeper.root / f"{SERIES}{one.save.step}"
        try:
            self._write_copy(one, target)
        except BaseException as error:
            self._failure, self._owed = error, True
            _log.error("%s was not copied to %s: %s", one.save.name, target, error)
            return
        with self._rating:
            self._copied = one
            if self._copies.rank == 0:
                self._keeper.rate(target, one.rated)
        if self._copies.rank == 0:
            self._keeper.published(target)

    def _write_copy(self, one: _Save, target: TreePath) -> None:
        ranks, keeper = self._copies, self._keeper

        def begin() -> bool:
            torn = not self._options.overwrite and keeper.standing(target, own=False) == "torn"
            keeper.make_room(target)
            return torn

        assert one.shards
        part = SavedPart(self._folder.path_of(one.save), ranks.rank, one.shards, self._pace)
        options = {**self._saving, "beside": partial(self._beside, one)}
        options |= {"execute": part.execute, "stream": part.stream, "digests": part.digests}
        if ranks.broadcast(on_first(ranks, begin)):
            options["overwrite"] = True
        write(state_on_disk(one.shards, one.values), target, ranks, SaveOptions(**options))

    def _beside(self, one: _Save) -> Mapping[str, bytes]:
        return self._keeper.beside(one.rated, {COPY_OF: one.save.start})

    def rate(self, step: int, rated: Mapping[str, float]) -> bool:
        """Add metrics to a save for its copy; return whether it was saved since the run started."""
        one = self._saves.get(step)
        if one is None:
            return False
        with self._rating:
            one.rated.update(rated)
            target = self._keeper.root / f"{SERIES}{step}"
            self._keeper.refresh()
            if self._rounds.rank == 0 and run_record(target).members.get(COPY_OF) == one.save.start:
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
        """Fill *state* from local disks, if they have the newest save, or the one of *step*.

        None: the root is to be asked; :attr:`skipped` says what was passed over before.
        """
        group = self._options.process_group
        ranks, keeper = coordinator(group), self._keeper

        how = {"process_group": group, **options}
        find = partial(self._in_root, step)
        went = go_on(ranks, self._folder, state, how, find, step, damaged_ok=damaged_ok)
        # What follows is another start of the run.
        self._start, self._loaded, self.skipped = None, went.save, went.skipped
        self._whole, self._saves, self._copied = [], {}, None
        if went.save is None or went.path is None or went.report is None:
            return None
        on_first(ranks, partial(keeper.went_on_beside, went.save.step))
        return Resumed(went.path, went.save.step, went.skipped, went.report)

    def durable(self, step: int, hurry: Hurry | None) -> None:
        """Return when a save is whole on all ranks; see *urgent* of the manager."""
        one = self._saves.get(step)
        if one is None:  # training went on from there
            return
        if hurry:
            hurry.durable(one.whole)
        one.whole.result()

    def newest(self) -> LocalSave | None:
        """Return the newest save that is whole on all ranks; None: the root has a newer one."""
        ranks = coordinator(self._options.process_group)
        return newest(ranks, self._folder, self._in_root)

    def _in_root(self, step: int | None = None) -> InRoot:
        """Look at the root, on rank 0."""
        run = identity(self._keeper.root)
        try:
            start = self._keeper.newest(tell=False) if step is None else self._keeper.of_step(step)
        except SourceNotFoundError:  # none there is complete
            start = None
        return in_root(run, start)

    def join(self) -> None:
        """Wait for what is going on, as fast as it goes, whatever becomes of it."""
        self._pace.lift()
        try:
            if self._last:
                self._last.join()
            if self._copying:
                self._copying[1].exception()
        finally:
            self._pace.restore()

    def wait(self) -> None:
        """Wait until what was saved is copied as far as that is due, as fast as it goes.

        Raises:
            CkptError: Since the last call a save was not whole on some rank, or not copied.
        """
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, *, orderly: bool) -> None:
        """Wait likewise, and copy the newest save.

        Args:
            orderly: Whether no error ends the run: other ranks may never come here then.
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
