"""``ckptctl.CheckpointManager``: the checkpoints of one training run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ckptctl.distributed.background.async_save import (
    AsyncSaver,
)
from ckptctl.distributed.background.save_thread import SaveFuture
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.run.exports import Exports
from ckptctl.distributed.run.fallback import Fallback, load_newest
from ckptctl.distributed.run.keeper import SERIES, Keeper, Standing, Start
from ckptctl.distributed.run.local_tier import LocalTier
from ckptctl.distributed.run.options import ManagerOptions, Resumed
from ckptctl.distributed.run.preemption import Preemption
from ckptctl.distributed.run.schedule import Schedule
from ckptctl.distributed.run.steps import rating
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.save import write
from ckptctl.distributed.state import StateDict
from ckptctl.errors import listed
from ckptctl.keywords import keywords
from ckptctl.ops import option_checks as checks
from ckptctl.ops.loading.options import LoadReport
from ckptctl.ops.ranks.coordinator import Coordinator, on_first, telling
from ckptctl.options import about, among, declared
from ckptctl.storage.destinations import require_folder, require_path
from ckptctl.storage.paths import home_expanded, named
from ckptctl.storage.remote.urls import is_url
from ckptctl.storage.run_store import run_store

_log = logging.getLogger("ckptctl")


class CheckpointManager(Exports):
    """Saves, loads and clears away the checkpoints of one run.

    Every rank makes one and calls its methods in the same order. Checkpoints are DCP directories
    ``ROOT/step-N``. What no rule keeps is removed after a newer one is published, on rank 0, in the
    background, by the code of ``ckptctl prune``: the rules are joined by *or*, incomplete
    checkpoints do not count, the newest complete one always stays, and nothing is removed that
    does not have such a name.

    With *fast* every save goes to a disk of this machine first: each rank writes its own part and
    waits for no other; the first save, which is collective, apart. Copies of some are made in the
    background, and they are the checkpoints that all of the above is about. The future that
    :meth:`save` returns, and what it raises, is then of this rank's part alone; :meth:`wait` and
    :meth:`close` tell of all, and :meth:`close` copies the newest. :meth:`load_latest` takes the
    newest save that is whole on all ranks, wherever it is.
    """

    @keywords(ManagerOptions)
    def __init__(self, root: str | Path, options: ManagerOptions) -> None:
        """Open a run.

        Args:
            root: The folder of the run, or its URL in an object store; made with the first save.
            options: All others.

        Raises:
            UsageError: A rule makes no sense.
            RefusedError: Signals were named, and this is not the main thread.
        """
        hooks = options.on_published
        self.root = _root(root)
        self._group = options.process_group
        self._options = options
        self._saving = {one.name: getattr(options, one.name) for one in declared(SaveOptions)}
        told = (hooks,) if callable(hooks) else tuple(hooks)
        self.keeper = Keeper(
            self.root,
            options.policy(),
            told,
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
        busy = lambda: bool(saver.last and not saver.last.done())  # noqa: E731
        over_gloo = lambda: saver.groups()[0]  # noqa: E731
        self._schedule = Schedule(options, busy, lambda: bool(self.keeper.steps()), over_gloo)
        self._preemption = Preemption(options, over_gloo)
        self._own: set[int] = set()  # steps that this run has saved, or tried to, and went on from
        self._tier = (
            None
            if options.fast is None
            else LocalTier(options, self.keeper, self._saver, self._saving)
        )
        self._closed = False
        self._began = False  # whether a save has begun, so that it is known what it goes on from

    def should_save(self, step: int) -> bool:
        """Return whether the rules ``save_every``, ``save_interval``, ... want *step* to be saved.

        All ranks call it, and all get the same answer. Rules about steps alone need no exchange.

        Raises:
            CkptError: ``save_if`` raised on another rank, or the ranks are at different steps.
        """
        return self._schedule.due(checks.step(step))

    def preempted(self, *, every: int = 1) -> bool:
        """Return whether the run has to end: what ``preemption`` names said so, on any rank.

        All ranks call it after the same steps, and all get the same answer, which stays. That is
        one small exchange over gloo; none where ``preemption`` names nothing.

        Args:
            every: Only each so many-th call asks the others; the rest answer as the one before.

        Raises:
            StorageError: The other ranks cannot be reached.
        """
        self._require_open()
        with about("every"):
            return self._preemption.noticed(checks.positive(every))

    def prepare(self, state: StateDict) -> None:
        """Make host memory for copies of *state* ready; see :meth:`AsyncSaver.prepare`.

        Raises:
            CkptError: It cannot be saved.
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
        """Save *state* as ``step-N``: the model and all that training goes on from.

        A step that this run has saved, or went on from, is not saved again. A torn checkpoint of
        that name is replaced.

        Args:
            step: Its number.
            state: See :func:`ckptctl.save`; an adapter alone, if that is what is trained.
            metrics: What it is rated with, for ``keep_best``; rank 0's count.
            urgent: Return when it is on disk, as the process is about to be killed. A save of this
                step that is going on is that; another one is waited for first. Past ``deadline``
                that is an error on every rank, but for ``async_=False``.

        Returns:
            The outcome, which is known already where saving is not in the background.

        Raises:
            RefusedError: There is a checkpoint of that step that this run does not stand on; or, at
                the first save, one of a later step, and this process has loaded none before.
            CkptError: It cannot begin, or failed where saving is not in the background; on every
                rank. Or more than ``max_failures`` failed before it, which has begun then.
        """
        self._require_open()
        step = checks.step(step)
        if not self._began:
            self._begin(step)
        if self._tier is not None:
            self._schedule.saved()
            local = self._tier.save(step, state, rating(metrics or {}), own=step in self._own)
            if urgent:
                self._tier.durable(
                    step, self._preemption.hurry(self._saver) if self._saver else None
                )
            return local
        path = self.root / f"{SERIES}{step}"
        hurry = self._preemption.hurry(self._saver) if urgent and self._saver else None
        joined = hurry.joined(path) if hurry else None
        if joined:
            return joined
        ranks = coordinator(self._group)
        first = ranks.rank == 0
        rated, said = telling(
            ranks, lambda: (rating(metrics or {}), self._standing(step) if first else None)
        )
        if said[0] == "saved":
            on_first(ranks, lambda: self.keeper.rate(path, rated))
            return SaveFuture(path).publish()
        options = {**self._saving, "beside": partial(self.keeper.beside, rated)}
        if said[0] == "torn":
            options["overwrite"] = True
        before, after = (self.keeper.make_room, self.keeper.published) if first else (None, None)
        self._schedule.saved()
        self._own.add(step)
        if self._saver is not None:
            options |= {"on_staged": before, "on_published": after}
            if hurry:
                return hurry.durable(self._saver.save(state, path, when_busy="wait", **options))
            return self._saver.save(state, path, **options)
        if before:
            before(path)
        write(state, path, ranks, SaveOptions(**options))
        if after:
            after(path)
        return SaveFuture(path).publish()

    def load_latest(
        self, state: MutableMapping[str, Any], *, fallback: Fallback = "older", **options: Any
    ) -> Resumed | None:
        """Fill *state* from the newest complete checkpoint of the run, whoever wrote it.

        Names of torchtitan, torchtune, transformers, accelerate, Lightning, DeepSpeed, Megatron
        and verl are understood. Newer checkpoints that are not complete are passed over, with a
        warning; so are those that the run left behind when it went on from an earlier one. Where
        the highest step was not saved last and nothing says why, it is loaded, with a warning.

        Args:
            state: See :func:`ckptctl.load`; it is filled in place.
            fallback: What to do where the newest proves damaged while it is loaded, on any rank, by
                a file that is cut off, zeros, or a checksum that differs: ``"older"``: load the
                next one on all ranks, which fills all of *state* anew, and name it in ``skipped``;
                ``"raise"``. Checksums of tensors are compared with ``checksum=True``.
            **options: Those of :func:`ckptctl.load`.

        Returns:
            What was loaded; None: there is no checkpoint yet.

        Raises:
            SourceNotFoundError: There are some, and none is complete.
            UnsupportedError: The newest is not understood: it may be whole.
            RefusedError: The next one lacks names of *state* that the damaged one may have filled.
            CkptError: It cannot be loaded; on every rank.
        """
        self._require_open()
        self.wait()
        among(fallback, "fallback", get_args(Fallback))
        if resumed := self._from_disks(state, options, fallback=fallback):
            return resumed
        ranks = coordinator(self._group)

        def loaded(start: Start) -> LoadReport:
            self.keeper.refresh()  # every rank reads what lies there now
            return load(state, start.path, process_group=self._group, **options)

        newest = load_newest(ranks, self.keeper, loaded, fallback)
        return self._go_on(ranks, *newest) if newest else None

    def load(
        self,
        state: MutableMapping[str, Any],
        step: int,
        *,
        discard_newer: bool = False,
        **options: Any,
    ) -> Resumed:
        """Fill *state* from the checkpoint of a step, and go on from there.

        What is saved from then on does not build on later steps that are there: they are left
        behind. They stay, do not count for any rule, and :meth:`load_latest` passes over them; a
        save under the name of one of them is refused.

        Args:
            state: See :func:`ckptctl.load`; it is filled in place.
            step: The number in its name.
            discard_newer: Remove the checkpoints ``step-N`` of later steps when *state* is loaded,
                those apart that a pointer names, that somebody may be writing or that are not
                understood. Rank 0's counts.
            **options: Those of :func:`ckptctl.load`.

        Raises:
            SourceNotFoundError: There is no such checkpoint.
            RefusedError: There are several, in series of their own.
            CkptError: It cannot be loaded; on every rank. Nothing was removed then.
        """
        self._require_open()
        step = checks.step(step)
        self.wait()
        ranks = coordinator(self._group)
        resumed = self._from_disks(state, options, step)
        if resumed is None:
            found = ranks.broadcast(on_first(ranks, lambda: self.keeper.of_step(step)))
            if found is None:
                raise self._missing(step)
            self.keeper.refresh()
            report = load(state, found.path, process_group=self._group, **options)
            resumed = self._go_on(ranks, found, report)
        on_first(ranks, lambda: self._leave(step, discard=discard_newer))
        return resumed

    def wait(self) -> None:
        """Wait for the save that is going on, and on rank 0 for removals.

        Raises:
            CkptError: The save failed; on every rank.
        """
        try:
            if self._saver is not None:
                self._saver.wait()
        finally:
            if self._tier is not None:
                self._tier.wait()
            self.keeper.wait()

    def close(self) -> None:
        """Wait likewise, and give memory and threads back.

        Raises:
            CkptError: The save failed; on every rank.
        """
        if self._closed:
            return
        self._closed = True
        orderly = sys.exc_info()[0] is None
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if self._tier is not None:
                self._tier.close(orderly=orderly)
            self.keeper.wait()
            self._preemption.notices.close()

    def _begin(self, step: int) -> None:
        """Find out what the first save goes on from, on all ranks alike."""
        ranks = coordinator(self._group)
        loaded = ranks.broadcast(on_first(ranks, lambda: self.keeper.begin_saving(step)))
        if loaded is not None:
            self._own.add(loaded)
        self._began = True

    def _settle(self) -> None:
        """Wait for the save that is going on; one that failed is no reason not to save the next."""
        if self._saver is not None:
            self._saver.join()
        if self._tier is not None:
            self._tier.join()
        self.keeper.wait()

    def _standing(self, step: int) -> Standing:
        if step in self._own and self._saver is not None:
            self._saver.join()
        if self._options.overwrite:
            return "free"
        return self.keeper.standing(self.root / f"{SERIES}{step}", own=step in self._own)

    def _from_disks(
        self,
        state: MutableMapping[str, Any],
        options: Mapping[str, Any],
        step: int | None = None,
        fallback: Fallback = "older",
    ) -> Resumed | None:
        if self._tier is None:
            return None
        resumed = self._tier.load(state, options, step, damaged_ok=fallback == "older")
        if resumed:
            self._schedule.resumed(resumed.step, resumed.path.stat().st_mtime)
            self._own = {resumed.step}
        return resumed

    def _go_on(self, ranks: Coordinator, found: Start, report: LoadReport) -> Resumed:
        on_first(ranks, lambda: self.keeper.went_on_from(found.entry, found.step))
        self._schedule.resumed(found.step, found.time)
        self._own = {found.step} if found.entry.name == f"{SERIES}{found.step}" else set()
        skipped = {**(self._tier.skipped if self._tier is not None else {}), **found.skipped}
        return Resumed(found.path, found.step, skipped, report, found.doubts)

    def _leave(self, step: int, *, discard: bool) -> None:
        later = self.keeper.later_than(step)
        if later and discard:
            self.keeper.discard_after(step)
        elif later:
            _log.warning(
                "%s: abandoned later checkpoints: %s; from the next save on, rules ignore them; "
                "`discard_newer=True` removes them",
                self.root,
                listed(later),
            )


def _root(root: str | Path) -> Path:
    """Return the folder of a run; a place where none can be kept is refused."""
    with about("root"):
        checks.path(root)
    if not is_url(root):
        require_path(root)
    path = home_expanded(named(root)).absolute()
    run_store(path).require_changeable()
    if not is_url(root):
        require_folder(path)
    return path
