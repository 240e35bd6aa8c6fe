"""What ranks and single trainers do in tests of saving in the background."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptctl.distributed.background.async_save import AsyncSaver, Mode, async_save
from ckptctl.distributed.background.staging import copy_shards_to_host
from ckptctl.distributed.group import GlooCollectives, HostGroup
from ckptctl.errors import CkptError, RefusedError
from tests.checkpoints.dcp import distribute
from tests.integration.dcp_ranks import SHARDINGS
from tests.integration.training_ranks import state

MODES: tuple[Mode, ...] = ("thread", "process")


def local_tensors(placed: dict[str, Any]) -> list[torch.Tensor]:
    return [one.to_local() if hasattr(one, "to_local") else one for one in placed.values()]


def train(tensors: list[torch.Tensor], stop: threading.Event) -> None:
    """Change every element again and again."""
    while not stop.is_set():
        for tensor in tensors:
            tensor.copy_(torch.ones_like(tensor))
            tensor.zero_()


def save_while_training(rank: int, world: int, root: Path) -> None:
    """Save every sharding in both modes; change the state as soon as the call has returned."""
    for number, (mesh, words) in enumerate(SHARDINGS[world]):
        for mode in MODES:
            placed = distribute(state(), mesh, words)
            steps = [5]
            stop = threading.Event()
            trainer = threading.Thread(target=train, args=(local_tensors(placed), stop))
            future = async_save(
                {"model": placed, "step": 5, "seen": {"steps": steps}},
                root / f"w{world}-{number}-{mode}",
                mode=mode,
                sync=False,
            )
            trainer.start()
            steps.append(6)
            assert future.staged.is_set()
            assert future.result() == root / f"w{world}-{number}-{mode}"
            assert future.path.is_dir()
            stop.set()
            trainer.join()


def prepare_too_much(rank: int, world: int, root: Path) -> None:
    """What goes wrong on one rank is raised by the next save on all, once."""
    many = {"a": torch.ones(4096)}
    with AsyncSaver(host_memory=4096 if rank else None) as saver:
        saver.prepare(many)
        saver.prepare(many)
        with pytest.raises(CkptError, match="exceeds the limit"):
            saver.save(many, root / "a", sync=False)
        assert not (root / "a").exists()
        few = {"a": torch.ones(512)}
        saver.prepare(few)
        assert saver.save(few, root / "b", sync=False).result()


def skip_alike(rank: int, world: int, root: Path) -> None:
    """The last save goes on only on rank 1; both leave the next one out."""
    timeouts(rank, world, root)
    release = threading.Event()

    def slow(_: Path) -> None:
        release.wait()

    first = async_save({"a": torch.ones(3)}, root / "first", on_published=slow if rank else None)
    if rank == 0:
        first.result()
    second = async_save({"a": torch.ones(3)}, root / "second", when_busy="skip")
    assert second.skipped
    assert second.done()
    assert second.result() is None
    assert not (root / "second").exists()
    release.set()
    first.result()
    dist.barrier()
    third = async_save({"a": torch.ones(3)}, root / "third", when_busy="skip")
    assert not third.skipped
    assert third.result() == root / "third"


def fail_alike(rank: int, world: int, root: Path) -> None:
    """Whatever fails on one rank is raised on all, once; then saving works again."""
    good = {"a": torch.ones(3), f"own{rank}": torch.ones(2)}
    for leaf in (lambda: 0, signal.SIGINT):
        with pytest.raises(CkptError, match="`b` cannot be saved") as found:
            async_save(good | {"b": leaf if rank == 1 else 1}, root / "staging")
        assert type(leaf).__qualname__ in str(found.value.where)
    assert async_save(good, root / "next", sync=False).result()

    future = async_save(good, root / "same", sync=False)
    future.result()
    future = async_save(good, root / "same", sync=False)
    assert isinstance(future.exception(), CkptError)
    with pytest.raises(CkptError, match="exists"):
        async_save(good, root / "after")
    assert not (root / "after").exists()

    with pytest.raises(RefusedError, match="disagree on how to save"):
        async_save(good, root / f"path-{rank}")
    with pytest.raises(RefusedError, match="disagree on how to save"):
        async_save(good, root / "busy", when_busy="skip" if rank else "wait")

    with no_thread_starts(rank == 1), pytest.raises(CkptError, match="cannot start a thread"):
        async_save(good, root / "unstarted")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("ckptctl.storage.execution.run_files.LocalSink.write", disk_full)
        future = async_save(good, root / "full", sync=False)
        error = future.exception()
    assert isinstance(error, CkptError)
    assert "No space" in str(error.why) + str(error), error
    with pytest.raises(CkptError):
        async_save(good, root / "after")
    assert async_save(good, root / "after", sync=False).result()
    dist.barrier()
    seen = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    assert seen == ["after", "next", "same"]


@contextmanager
def no_thread_starts(really: bool = True) -> Iterator[None]:
    """Let threads of saves fail to start."""
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if really and thread.name.startswith("save "):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        yield


def disk_full(*_: object) -> None:
    raise CkptError("cannot write", why="No space left on device")


def two_savers(rank: int, world: int, root: Path) -> None:
    """Two savers, one of them of a part of the ranks, at the same time."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    tensor = torch.full((1000,), float(rank // 2))
    with AsyncSaver() as whole, AsyncSaver(mine, mode="process") as half:
        for step in range(4):
            futures = [
                half.save({"a": tensor}, root / f"half{rank // 2}-{step}", sync=False),
                whole.save({"step": step}, root / f"whole-{step}", sync=False),
            ]
        for future in futures:
            future.result()
    with pytest.raises(RefusedError, match="closed"):
        whole.save({"step": 1}, root / "closed")


def group_destroyed(rank: int, world: int, root: Path) -> None:
    """The group is destroyed while a save waits: it ends, whole or without a trace."""
    async_save({"a": torch.ones(3)}, root / "good", sync=False).result()
    wait = threading.Event()
    future = async_save(
        {"a": torch.ones(3)}, root / "late", sync=False, on_staged=lambda _: wait.wait()
    )
    dist.barrier()
    dist.destroy_process_group()
    wait.set()
    failed = future.exception(timeout=20) is not None
    assert (root / "late").exists() != failed
    os._exit(0)  # `run_on_ranks` ends with a barrier


def rank_killed(rank: int, world: int, root: Path) -> None:
    """One rank dies while all write: the others learn of it, and the last save is untouched."""
    async_save({"a": torch.ones(3)}, root / "step-1", sync=False).result()

    def die(_: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    callback: Callable[[Path], None] | None = die if rank == 1 else None
    future = async_save({"a": torch.ones(3)}, root / "step-2", on_staged=callback, sync=False)
    assert future.exception(timeout=20) is not None
    assert [path.name for path in root.iterdir()] == ["step-1"]
    (root.parent / f"seen-{rank}").touch()


def replicated(rank: int, world: int, root: Path) -> None:
    """From the second save on each rank copies only what it writes; changes are noticed."""
    copied: list[int] = []

    def noted(*arguments: Any) -> Any:
        found = copy_shards_to_host(*arguments)
        copied.append(found.nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch, AsyncSaver() as saver:
        patch.setattr("ckptctl.distributed.background.async_save.copy_shards_to_host", noted)
        for step in range(5):
            rows = 7 if step == 3 and rank == 0 else 6  # this rank alone holds more
            tensors = {f"l{index}": torch.full((2000, 10), float(step)) for index in range(6)}
            own = {f"own{rank}": torch.full((rows, 10), float(step))}
            saver.save(tensors | own | {"step": step}, root / f"{step}", sync=False)
            for tensor in (tensors | own).values():
                tensor.zero_()
    total = 6 * 80_000 + 240
    more = 40 if rank == 0 else 0
    least = 2 * 80_000 + 240  # the last plan of the other ranks is that of the step before
    assert copied == [total, least, least, total + more, total]


def without_collectives(rank: int, world: int, root: Path) -> None:
    """Ranks save at their own pace, each only for itself."""
    time.sleep(0.2 * rank)
    placed = distribute(state(), *SHARDINGS[world][0])
    future = async_save({"model": placed}, root / "alone", collectives=False, sync=False)
    for tensor in local_tensors(placed):
        tensor.zero_()
    future.result()


def timeouts(rank: int, world: int, root: Path) -> None:
    """What the background waits for other ranks is what the user's group does."""
    parent = dist.new_group(timeout=timedelta(seconds=77), backend="gloo")
    with AsyncSaver(parent) as saver:
        saver.save({"a": torch.ones(3)}, root / "a", sync=False).result()
        assert saver._ranks
        for ranks in saver._ranks:
            assert isinstance(ranks, HostGroup)
            assert isinstance(ranks.collectives, GlooCollectives)
            assert ranks.collectives.gloo.options._timeout == timedelta(seconds=77)
