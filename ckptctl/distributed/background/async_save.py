"""Asynchronous saves: the state is copied to host memory and written from the copy."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, Self, get_args

import torch
import torch.distributed as dist

from ckptctl.distributed.background.host_memory import HostPool
from ckptctl.distributed.background.save_thread import (
    Callback,
    SaveFuture,
    SaveThread,
    run_in_background,
)
from ckptctl.distributed.background.staging import (
    StagedCopy,
    compute_copy_memory,
    copy_shards_to_host,
)
from ckptctl.distributed.background.start_vote import SaverStatus, StartVote, capture_outcome
from ckptctl.distributed.background.writer_process import WriterProcess, build_plan_executor
from ckptctl.distributed.group import ProcessGroup, create_gloo_group
from ckptctl.distributed.saving.destination import require_local_target
from ckptctl.distributed.saving.local_state import LocalState, build_local_state
from ckptctl.distributed.saving.save import (
    SAVE_PLANS,
    CachedSavePlan,
    compute_plan_key,
    list_chunks_read_by_plan,
    write_collectively,
    write_rank_local,
)
from ckptctl.distributed.saving.save_options import SaveOptions, SidecarFiles
from ckptctl.distributed.state import StateDict, flatten_state
from ckptctl.errors import RefusedError
from ckptctl.keywords import accept_keywords
from ckptctl.options import Option, require_choice
from ckptctl.ranks.coordinator import RankCollectives, SingleProcess
from ckptctl.storage.paths import expand_home, parse_path
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath

Mode = Literal["thread", "process"]
WhenBusy = Literal["wait", "skip"]


@dataclass(frozen=True, kw_only=True)
class BackgroundOptions(SaveOptions):
    """Options for saving a checkpoint in the background."""

    mode: Annotated[
        Mode | None,
        Option(
            "Run the save in a thread or a process. None uses the saver's setting, which "
            "defaults to thread."
        ),
    ] = None
    when_busy: Annotated[
        WhenBusy | None,
        Option(
            "Action while a save of the same saver is still running on any rank: wait "
            "for it, or skip this save on all ranks. None uses the saver's setting, by "
            "default wait."
        ),
    ] = None
    on_staged: Annotated[
        Callback | None,
        Option(
            "Function called with the path, in the background, after the state was "
            "copied. Its exceptions are logged and stored in the future, and the save "
            "continues."
        ),
    ] = None
    on_published: Annotated[
        Callback | None,
        Option(
            "Function called with the path after the checkpoint is published and before "
            "the future is done. Its exceptions are handled like those of *on_staged*."
        ),
    ] = None
    collectives: Annotated[
        bool,
        Option(
            "Coordinate the ranks, as in :func:`ckptctl.save`. If False, failures and "
            "skipped saves affect only their own rank."
        ),
    ] = True
    beside: Annotated[
        SidecarFiles | None,
        Option(
            "Function that returns the files to publish with the checkpoint, as a mapping of "
            "names to contents. It is called last, on rank 0."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _AsyncSaveOptions(BackgroundOptions):
    process_group: ProcessGroup = None


@accept_keywords(_AsyncSaveOptions)
def async_save(
    state_dict: StateDict, path: str | TreePath, options: _AsyncSaveOptions
) -> SaveFuture:
    """Save *state_dict* like :func:`ckptctl.save`, but in the background of training.

    When this returns, tensors are copied to host memory and other values are pickled, so the state
    can change. Planning, writing and publishing happen in the background. The directory is
    published only when it is complete.

    All ranks call it in the same order with the same arguments. The first call for a process group
    is collective, because it creates gloo groups. Each process group gets one :class:`AsyncSaver`,
    which also describes the behavior at interpreter exit.

    Args:
        state_dict: See :func:`ckptctl.save`.
        path: Destination of the checkpoint.
        options: All other arguments.

    Returns:
        A :class:`SaveFuture` for the outcome.

    Raises:
        CkptError: The last save failed, or this one cannot start. It is raised on every rank. Each
            failure is raised once, even if the future already raised it.
    """
    return _get_saver(options.process_group)._start_save(state_dict, path, options)


class Closeable(ABC):
    """Context manager that calls :meth:`close`, and ignores its errors if the block failed."""

    @abstractmethod
    def close(self) -> None:
        """Wait until running work has finished, and release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise


class AsyncSaver(Closeable):
    """Background saver that writes one checkpoint at a time.

    Create one on every rank, and call its methods in the same order on all ranks. The first save
    creates two gloo groups: one for method calls, and one for background saves. They use the
    timeout of *process_group* if it supports CPU tensors, and exist until ``torch.distributed`` is
    shut down. Several savers do not interfere with each other.

    From the second save of the same structure on, the ranks reuse the plan. Each rank then copies
    only those replicated tensors that it will write.

    The interpreter waits at exit for a running save. If the process is killed, nothing is
    published. Call :meth:`close` before ``destroy_process_group``.

    Args:
        process_group: Participating ranks, or None for the default group or a single process.
        mode: ``"thread"`` writes in a thread of this process. ``"process"`` writes in another
            process without torch, which shares the memory of the copy (Linux only). Training then
            does not compete for the GIL.
        when_busy: Behavior if the last save is still running on any rank. ``"wait"`` waits for it,
            ``"skip"`` skips the new save on all ranks.
        host_memory: Limit in bytes for copies on this rank, or None for no limit.
        max_failures: Number of consecutive failed saves to tolerate. Each is logged and stored in
            its future. One more failure is raised after the next save has started. With None,
            the next call raises each failure and saves nothing.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: Mode = "thread",
        when_busy: WhenBusy = "wait",
        host_memory: int | None = None,
        max_failures: int | None = None,
    ) -> None:
        require_choice(mode, "mode", get_args(Mode))
        require_choice(when_busy, "when_busy", get_args(WhenBusy))
        self._parent = process_group
        self._mode = mode
        self._when_busy = when_busy
        self._max_failures = max_failures
        self._failures = 0  # consecutive
        self._pool = HostPool(host_memory)
        self._writer = WriterProcess()
        self._ranks: tuple[RankCollectives, RankCollectives] | None = None  # for calls, for saves
        self._preparing: Future[None] | None = None
        self._last: SaveThread | None = None
        self._process = os.getpid()
        self._closed = False

    def prepare(self, state_dict: StateDict) -> Future[None]:
        """Allocate host memory for copies of *state_dict* in the background.

        Allocation takes several times as long as the copy, because pages must be found, cleared
        and, for CUDA, pinned. Without this call, training waits while the first save allocates.
        With ``mode="process"``, the writer process is also started.

        Memory is allocated only for existing tensors, and an optimizer has none before its first
        step. Existing memory is reused. Ranks do not wait for each other.

        Args:
            state_dict: A state with the structure of the one to save.

        Returns:
            A future that is done when the memory is ready. A save waits for it automatically.

        Raises:
            CkptError: The state cannot be saved. Errors of the allocation itself are raised by the
                next save, on every rank.
        """
        self._require_open()
        nbytes, pinned = compute_copy_memory(
            [shard.tensor for shard in flatten_state(state_dict).shards]
        )
        # Use the device of the calling thread: any other one would get a new CUDA context.
        device = torch.cuda.current_device() if pinned else -1
        earlier = self._preparing

        def allocate_memory() -> None:
            if earlier:
                earlier.result()
            if nbytes:
                with torch.cuda.device(device):
                    self._pool.prepare_region(nbytes, pinned)
            if self._mode == "process":
                self._writer.connect()

        self._preparing = run_in_background(allocate_memory, "prepare saves")
        return self._preparing

    @accept_keywords(BackgroundOptions)
    def save(
        self, state_dict: StateDict | LocalState, path: str | TreePath, options: BackgroundOptions
    ) -> SaveFuture:
        """Copy *state_dict* and save the copy in the background, as :func:`async_save` does.

        Raises:
            CkptError: The last save failed, or this one cannot start. It is raised on every rank.
        """
        return self._start_save(state_dict, path, options)

    def _start_save(
        self, state_dict: StateDict | LocalState, path: str | TreePath, options: BackgroundOptions
    ) -> SaveFuture:
        if not options.collectives:
            require_local_target(path)
        when_busy = options.when_busy or self._when_busy
        self._require_not_in_callback()
        self._require_open()
        calls, ranks = self.groups()
        vote = StartVote(calls if options.collectives else SingleProcess())
        future = SaveFuture(expand_home(parse_path(path)).absolute())
        agreed_options = (str(future.path), when_busy, options.overwrite, options.files)
        last = self._last
        if when_busy == "skip":
            busy = SaverStatus(busy=bool(last and last.is_busy), failed=False)
            if vote.exchange_status(busy, agreed_options)[0].busy:
                return future.mark_skipped()
        self.join()

        def start_thread(staged: StagedCopy) -> SaveThread:
            writer = self._writer if (options.mode or self._mode) == "process" else None
            copied = replace(options, execute=build_plan_executor(staged.region, writer))
            if options.collectives:
                work = partial(write_collectively, staged.state, future.path, ranks, copied)
            else:
                rank_arguments = (ranks.rank, ranks.world, copied)
                work = partial(write_rank_local, staged.state, future.path, *rank_arguments)
            release = (
                partial(self._pool.return_region, staged.region) if staged.region else lambda: None
            )
            thread = SaveThread(future, work, release, options.on_staged, options.on_published)
            thread.start()
            return thread

        def collect_shards() -> tuple[LocalState, CachedSavePlan | None]:
            local = build_local_state(state_dict, trusted=options.trusted)
            if not options.collectives or ranks.world == 1:
                return local, None
            return local, SAVE_PLANS.get(compute_plan_key(local, ranks, options))

        with pause_gc():  # training waits, and a garbage collection would take long
            self._last, failure = self._begin_save(
                vote, agreed_options, collect_shards, start_thread
            )
        future.staged.set()
        self._last.allow_writing()
        self._failures = self._failures + 1 if failure else 0
        if failure and self._failures > (self._max_failures or 0):
            raise failure
        return future

    @property
    def last(self) -> SaveFuture | None:
        """Future of the last save, or None before the first save."""
        return self._last.future if self._last else None

    def groups(self) -> tuple[RankCollectives, RankCollectives]:
        """Return the ranks for calls and for background saves, created by the first call."""
        self._ranks = self._ranks or (
            create_gloo_group(self._parent),
            create_gloo_group(self._parent),
        )
        return self._ranks

    def join(self) -> None:
        """Wait for the running save, and ignore its outcome."""
        self._require_not_in_callback()
        if self._last is not None:
            self._last.join()

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            CkptError: The save failed. It is raised on every rank, and not again by the next call.
        """
        self.join()
        failure = self._last.take_failure() if self._last else None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the running save, and release the host memory.

        Raises:
            CkptError: The save failed.
        """
        self._closed = True
        try:
            if self._process == os.getpid():
                self.wait()
        finally:
            if self._preparing and self._process == os.getpid():
                self._preparing.exception()  # wait for the allocation, and ignore its error
            self._writer.close()
            self._pool.close()

    def _begin_save(
        self,
        vote: StartVote,
        agreed_options: tuple[object, ...],
        collect: Callable[[], tuple[LocalState, CachedSavePlan | None]],
        start: Callable[[StagedCopy], SaveThread],
    ) -> tuple[SaveThread, BaseException | None]:
        """Copy the shards that this rank writes to host memory, and start the save thread.

        Without a cached plan, all shards of this rank are copied. No earlier save may still be
        running.

        Returns:
            The thread, and the failure of the last save if it does not prevent this one.

        Raises:
            CkptError: The last save failed, or this one cannot start. It is raised on every rank.
        """
        collected = capture_outcome(collect)
        error = collected.exception()
        local, plan = collected.result() if error is None else (None, None)
        failed = bool(self._last and self._last.has_failed)
        situation = SaverStatus(busy=False, failed=failed, unable=error is not None)
        any_rank, has_same_plan = vote.exchange_status(
            situation, agreed_options, plan.generation if plan else b""
        )
        if any_rank.failed and self._max_failures is None:
            raise self._take_failure()
        if any_rank.unable or local is None:
            vote.raise_on_all_ranks(collected)
        written = list_chunks_read_by_plan(plan) if plan and has_same_plan else None

        def copy_shards() -> SaveThread:
            preparing, self._preparing = self._preparing, None
            if preparing:
                preparing.result()
            return start(copy_shards_to_host(local, self._pool, written))

        thread = vote.run_all_or_none(copy_shards, SaveThread.abandon)
        return thread, self._take_failure() if any_rank.failed else None

    def _take_failure(self) -> BaseException:
        failure = self._last.take_failure() if self._last else None
        return failure or RefusedError("the last save failed on another rank")

    def _require_open(self) -> None:
        if self._closed or self._process != os.getpid():
            raise RefusedError(
                "this saver is closed" if self._closed else "this saver belongs to another process",
                hint="create a new one",
            )

    def _require_not_in_callback(self) -> None:
        if self._last and self._last.is_current_thread:
            raise RefusedError(
                "a callback of a save cannot wait for that save",
                hint="start the next save on the training thread",
            )


_savers: dict[tuple[int, dist.ProcessGroup | None], AsyncSaver] = {}


def _get_saver(group: dist.ProcessGroup | None) -> AsyncSaver:
    """Return the saver for process group *group*, and close savers of destroyed groups."""
    ready = dist.is_available() and dist.is_initialized()
    group = group or (dist.group.WORLD if ready else None)
    key = (os.getpid(), group)
    if key not in _savers:
        for other in [
            saver_key
            for saver_key in _savers
            if saver_key[0] == key[0] and not _is_active_group(saver_key[1])
        ]:
            _savers.pop(other).close()
        _savers[key] = AsyncSaver(group)
    return _savers[key]


def _is_active_group(group: dist.ProcessGroup | None) -> bool:
    try:
        return group is None or bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False
