"""Saves in the background, one at a time: copy the state, write from the copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

import torch.distributed as dist

from ckptctl.distributed import compat
from ckptctl.distributed.background.ballot import Ballot, Situation, attempt
from ckptctl.distributed.background.future import SaveFuture
from ckptctl.distributed.background.host_pool import HostPool
from ckptctl.distributed.background.staged_write import (
    Found,
    SaveKeywords,
    executor,
    find,
    write_staged,
)
from ckptctl.distributed.background.staging import Staged, stage
from ckptctl.distributed.background.thread import Callback, SaveThread
from ckptctl.distributed.background.writer_process import WriterProcess
from ckptctl.distributed.closing import Closing
from ckptctl.distributed.group import Group, coordinator
from ckptctl.distributed.saving.options import Beside, SaveOptions
from ckptctl.distributed.saving.plans import chunks_of
from ckptctl.distributed.saving.rank_output import require_local
from ckptctl.distributed.state import StateDict
from ckptctl.errors import RefusedError, UsageError
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.storage.paths import named

__all__ = ["AsyncSaver", "Mode", "SaveKeywords", "WhenBusy"]

Mode = Literal["thread", "process"]
WhenBusy = Literal["wait", "skip"]


class AsyncSaver(Closing):
    """Saves in the background, one checkpoint at a time.

    Every rank makes one and calls its methods in the same order. The first save makes two groups of
    gloo, one for the calls and one for the background, with the timeout of *process_group* where
    that takes CPU tensors; they last as long as ``torch.distributed`` does. Several savers do not
    disturb each other.

    Of tensors that several ranks hold, each copies only what it will write as soon as the ranks
    have a plan: from the second save of the same structure on.

    The interpreter waits at its end for a save that is going on. One whose process is killed
    publishes nothing. Call :meth:`close` before ``destroy_process_group``.

    Args:
        process_group: The ranks; None: the default group, or this process alone.
        mode: What writes: ``"thread"``: a thread of this process; ``"process"``: one that imports
            no torch and shares the copy's memory (Linux), so that training has the interpreter's
            lock for itself.
        when_busy: What a save does while the last one is going on, on any rank: ``"wait"`` for it,
            or ``"skip"``: it is left out on all ranks.
        host_memory: Bytes that copies may take on this rank; None: what they need.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: Mode = "thread",
        when_busy: WhenBusy = "wait",
        host_memory: int | None = None,
    ) -> None:
        self._parent = process_group
        self._mode = mode
        self._when_busy = when_busy
        self._pool = HostPool(host_memory)
        self._writer = WriterProcess()
        self._ranks: tuple[Coordinator, Coordinator] | None = None
        self._last: SaveThread | None = None
        self._process = os.getpid()
        self._closed = False

    def save(
        self,
        state_dict: StateDict,
        path: str | Path,
        *,
        mode: Mode | None = None,
        when_busy: WhenBusy | None = None,
        on_staged: Callback | None = None,
        on_published: Callback | None = None,
        collectives: bool = True,
        beside: Beside | None = None,
        **options: Unpack[SaveKeywords],
    ) -> SaveFuture:
        """Copy *state_dict* and save the copy in the background; see :func:`async_save`.

        Args:
            state_dict: See there, as for all that follow.
            path: Where the checkpoint will appear.
            mode: None: the saver's.
            when_busy: None: the saver's.
            on_staged: Called with the path.
            on_published: Called with the path.
            collectives: See :func:`ckptctl.save`.
            beside: See :class:`~ckptctl.distributed.saving.options.SaveOptions`.
            **options: See :func:`ckptctl.save`.

        Raises:
            CkptError: The last save failed, or this one cannot begin; on every rank.
        """
        waits = _one_of("when_busy", when_busy or self._when_busy, ("wait", "skip")) == "wait"
        apart = _one_of("mode", mode or self._mode, ("thread", "process")) == "process"
        if not collectives:
            require_local(path)
        how = SaveOptions(**options, beside=beside)
        self._require_usable()
        calls, ranks = self._groups()
        ballot = Ballot(calls if collectives else Alone())
        future = SaveFuture(named(path).expanduser().absolute())
        meaning = (str(future.path), "waits" if waits else "skips", how.overwrite, how.files)
        if self._skips(ballot, meaning, waits=waits):
            return future.skip()

        def ready(staged: Staged) -> SaveThread:
            has = replace(how, execute=executor(staged, self._writer if apart else None))
            work = partial(write_staged, staged, future.path, ranks, has, collectives=collectives)
            release = partial(self._release, staged)
            thread = SaveThread(future, work, release, on_staged, on_published)
            thread.start()
            return thread

        found = partial(find, state_dict, ranks, how, collectives)
        self._last = self._begin(ballot, meaning, found, ready)
        future.staged.set()
        self._last.proceed()
        return future

    def wait(self) -> None:
        """Wait for the save that is going on.

        Raises:
            CkptError: It failed; on every rank. The next call does not raise that again.
        """
        self._require_outside()
        if self._last is not None:
            self._last.join()
            failure = self._last.take_failure()
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Wait for the save that is going on, and give the host memory back.

        Raises:
            CkptError: The save failed.
        """
        self._closed = True
        try:
            if self._process == os.getpid():
                self.wait()
        finally:
            self._writer.close()
            self._pool.close()

    def _skips(self, ballot: Ballot, meaning: tuple[object, ...], *, waits: bool) -> bool:
        """Return whether this save is left out; otherwise none is going on any more."""
        last = self._last
        if not waits:
            busy = Situation(busy=bool(last and last.busy), failed=False)
            if ballot.situation(busy, meaning)[0].busy:
                return True
        if last:
            last.join()
        return False

    def _begin(
        self,
        ballot: Ballot,
        meaning: tuple[object, ...],
        find: Callable[[], Found],
        ready: Callable[[Staged], SaveThread],
    ) -> SaveThread:
        """Copy what this rank holds, or of that what it will write; no save is going on.

        Args:
            ballot: Makes that all ranks begin, or none.
            meaning: Where and how they are about to save.
            find: Returns what this rank holds.
            ready: Returns a thread that only waits to write a copy.

        Raises:
            CkptError: The last save failed, or this one cannot begin; on every rank.
        """
        found, error = attempt(find)
        plan = found[0].plan if found else None
        own = Situation(
            busy=False, failed=bool(self._last and self._last.failed), unable=error is not None
        )
        any_rank, same = ballot.situation(own, meaning, plan.generation if plan else b"")
        if any_rank.failed:
            failure = self._last.take_failure() if self._last else None
            raise failure or RefusedError("the last save failed on another rank")
        if any_rank.unable:
            ballot.fail(error)
        chosen = chunks_of(plan) if plan and same else None
        return ballot.all_or_none(
            lambda: ready(stage(found[0].held, self._pool, chosen)), SaveThread.abandon
        )

    def _groups(self) -> tuple[Coordinator, Coordinator]:
        """Return the ranks for calls and those for the background; the first time all make them."""
        if self._ranks is None:
            self._ranks = (_own_group(self._parent), _own_group(self._parent))
        return self._ranks

    def _release(self, staged: Staged) -> None:
        if staged.region is not None:
            self._pool.give(staged.region)

    def _require_usable(self) -> None:
        self._require_outside()
        if self._closed or self._process != os.getpid():
            raise RefusedError(
                "this saver was closed" if self._closed else "this saver is another process's",
                hint="make a new one",
            )

    def _require_outside(self) -> None:
        if self._last and self._last.here:
            raise RefusedError(
                "a callback of a save cannot wait for that save",
                hint="begin the next one on the thread that trains",
            )


def _own_group(parent: dist.ProcessGroup | None) -> Coordinator:
    ranks = coordinator(parent)
    if not isinstance(ranks, Group):
        return ranks
    known = parent or dist.group.WORLD
    assert known
    whole = known is dist.group.WORLD
    members = None if whole else dist.get_process_group_ranks(known)
    if members is not None:
        _count_alike(ranks)
    return Group(
        dist.new_group(
            members,
            timeout=compat.timeout(known),
            backend="gloo",
            use_local_synchronization=members is not None,
        )
    )


def _count_alike(ranks: Coordinator) -> None:
    """Make groups until all *ranks* are in as many: a group's name depends on that number.

    torch names a group that only its members make after its ranks and how many groups a process is
    in (``_hash_ranks_to_str``); members with different numbers wait for each other for ever.
    """
    most = max(ranks.all_gather(compat.groups()))
    while compat.groups() < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", why=f"expected {' or '.join(map(repr, known))}")
    return value
