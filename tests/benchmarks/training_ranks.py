"""What ranks do in the benchmark of training: all ways in turn, in one set of processes.

Llama shapes in bf16 as DTensors, saved by stock ``dcp.save``. The bare loops know before the clock
starts what to move where (:mod:`tests.benchmarks.bare_load`), and move it with as many threads as
ckptctl, from or to memory that has been written to. Where rows become columns that is one short
read for each row; a loop that reads as many bytes in long reads, which are not those that are
wanted, stands beside it. Used by :mod:`tests.benchmarks.training`.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ckptctl.distributed.group import choose_thread_count
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.loading.load_plan import LOAD_PLANS
from ckptctl.distributed.saving.save import save
from ckptctl.distributed.state import to_memoryview
from tests.benchmarks import bare_loop
from tests.benchmarks.bare_load import BareFiles, read_all
from tests.benchmarks.build import spec_for
from tests.benchmarks.measure import in_turn
from tests.checkpoints.dcp import _mesh, placements_of

ELSEWHERE = "bare preadv, long reads elsewhere"
Ways = Mapping[str, Callable[[], Any]]


def state_of(size: str, world: int, words: str, fill: float) -> dict[str, Any]:
    """Return DTensors on a mesh of all ranks."""
    from torch.distributed.tensor import full

    mesh = _mesh((world,))
    how: Any = {"dtype": torch.bfloat16, "device_mesh": mesh}
    return {
        name: full(shape, fill, placements=placements_of(name, len(shape), words, 1), **how)
        for name, shape in spec_for(size).shapes().items()
    }


def write_source(rank: int, world: int, folder: str, size: str, words: str) -> None:
    """Save with stock torch."""
    state_dict_saver.save({"model": state_of(size, world, words, 1.5)}, checkpoint_id=folder)


def saves(rank: int, world: int, folder: str, size: str, runs: int, out: str) -> None:
    """Measure ``save``; see :func:`measure`."""
    state = state_of(size, world, "S0", 1.5)
    views = [to_memoryview(tensor.to_local()) for tensor in state.values()]
    model, path = {"model": state}, Path(folder, "one")
    jobs = choose_thread_count(0)

    def bare(crc: str, fsync: bool = False) -> None:
        bare_loop.write(views, path / str(rank), jobs, crc, fsync)

    def dcp(sync: bool) -> None:
        state_dict_saver.save(model, storage_writer=FileSystemWriter(path, sync_files=sync))

    ways: Ways = {
        "bare pwrite": partial(bare, "none"),
        "bare pwrite + crc32 (zlib)": partial(bare, "zlib"),
        "bare pwrite + crc32 (isal)": partial(bare, "isal"),
        "bare pwrite + crc32 (isal) + fsync": partial(bare, "isal", fsync=True),
        "ckptctl.save": partial(save, model, path, sync=False),
        "ckptctl.save, sync": partial(save, model, path, sync=True),
        "dcp.save": partial(dcp, False),
        "dcp.save, sync": partial(dcp, True),
    }

    def forget(_: str) -> None:
        if rank == 0:
            shutil.rmtree(path)

    measure(state, ways, runs, out, after=forget)


def loads(rank: int, world: int, folder: str, size: str, words: str, runs: int, out: str) -> None:
    """Measure ``load``; see :func:`measure`."""
    state = state_of(size, world, words, 0.5)
    model, jobs = {"model": state}, choose_thread_count(0)
    parts = [tensor.to_local() for tensor in state.values()]

    def first() -> Any:
        LOAD_PLANS.clear()
        return load(model, folder)

    def empty() -> None:
        for part in parts:
            part.fill_(0.25)

    def filled(name: str) -> None:
        if name != ELSEWHERE:
            assert all(bool((part == 1.5).all()) for part in parts), name

    with BareFiles(folder) as files:
        ways: dict[str, Callable[[], Any]] = {
            "bare preadv": partial(read_all, files.ranges(state), jobs),
            "ckptctl.load": partial(load, model, folder),
            "ckptctl.load, planned anew": first,
            "dcp.load": partial(state_dict_loader.load, model, checkpoint_id=folder),
        }
        if words == "S1":
            ways[ELSEWHERE] = partial(read_all, files.elsewhere(state), jobs)
        if words == "R":
            ways["ckptctl.load, broadcast"] = partial(load, model, folder, broadcast=True)
        measure(state, ways, runs, out, before=empty, after=filled)


def measure(
    state: Mapping[str, Any],
    ways: Ways,
    runs: int,
    out: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[str], None],
) -> None:
    """Time *ways* in turn; rank 0 writes down what they cost all ranks.

    Args:
        state: What is moved.
        ways: By name.
        runs: Rounds, after one in which memory, plans and caches are made.
        out: File for seconds, and CPU seconds of all ranks, per round; the largest memory beyond
            what a rank had; bytes that ckptctl says it read; bytes of the state.
        before: Called before each, off the clock.
        after: The same for afterwards, with the name.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    extra, read = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    for number in range(runs + 1):
        for name in in_turn(ways, number):
            before()
            _forget_peak()
            held = _status("VmRSS")
            dist.barrier()
            spent, start = _cpu(), time.perf_counter()
            report = ways[name]()
            dist.barrier()
            wall = time.perf_counter() - start
            mine = (_cpu() - spent, _peak() - held, getattr(report, "bytes_read", 0))
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, mine)
            after(name)
            dist.barrier()
            if number:
                samples[name].append((wall, sum(one[0] for one in said)))
                extra[name] = max(extra[name], *(one[1] for one in said))
                read[name] = sum(one[2] for one in said)
    if dist.get_rank() == 0:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        found = {"samples": samples, "extra": extra, "read": read, "nbytes": nbytes}
        Path(out).write_text(json.dumps(found))


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
