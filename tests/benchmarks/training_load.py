"""``load`` in training against stock ``dcp.load`` and a bare loop of ``preadv``, in one run.

Llama-shaped tensors, saved by stock ``dcp.save`` on some gloo ranks and loaded on some, in the same
sharding and in another. The bare loop reads the same bytes from the same places, found out before
the clock starts (:mod:`tests.benchmarks.bare_load`), with as many threads, into the same memory,
which has been written to. Where rows become columns that is one short read for each row; a loop
that reads as many bytes in long reads, which are not those that are wanted, stands beside it.

Used by :mod:`tests.benchmarks.training`.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.bare_load import BareFiles, read_all
from tests.gloo import run_on_ranks

ELSEWHERE = "bare preadv, long reads elsewhere"
Case = tuple[str, int, str, int, str]
"""Name; ranks and sharding that it was saved with; those that it is loaded with."""
CASES: tuple[Case, ...] = (
    ("same sharding", 2, "S0", 2, "S0"),
    ("same sharding", 4, "S0", 4, "S0"),
    ("2 to 4 ranks", 2, "S0", 4, "S0"),
    ("rows to columns", 2, "S0", 2, "S1"),
    ("replicated", 2, "S0", 4, "R"),
)


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Return bfloat16 shapes of so many gigabytes: layers of a width of 4,096."""
    width, hidden = 4096, 14336
    layer = {
        "attention.wq.weight": (width, width),
        "attention.wk.weight": (width // 4, width),
        "attention.wv.weight": (width // 4, width),
        "attention.wo.weight": (width, width),
        "feed_forward.w1.weight": (hidden, width),
        "feed_forward.w2.weight": (width, hidden),
        "feed_forward.w3.weight": (hidden, width),
        "attention_norm.weight": (width,),
    }
    each = sum(_count(shape) * 2 for shape in layer.values())
    layers = max(1, round(gigabytes * 1e9 / each))
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def state_of_shapes(gigabytes: float, world: int, words: str, fill: float) -> dict[str, Any]:
    """Return a state dict of DTensors on a mesh of all ranks."""
    return {name: _sharded(shape, world, words, fill) for name, shape in shapes(gigabytes).items()}


def _sharded(shape: tuple[int, ...], world: int, words: str, fill: float) -> Any:
    import torch
    from torch.distributed.tensor import full as distributed_full

    from tests.checkpoints.dcp import _mesh, placements_of

    placements = placements_of("w", len(shape), words, 1)
    return distributed_full(
        shape, fill, dtype=torch.bfloat16, device_mesh=_mesh((world,)), placements=placements
    )


def save(rank: int, world: int, folder: str, gigabytes: float, words: str) -> None:
    """Save with stock torch."""
    from torch.distributed.checkpoint.state_dict_saver import save as stock

    state = state_of_shapes(gigabytes, world, words, 1.5)
    stock({"model": state}, checkpoint_id=folder)


def measure(
    rank: int, world: int, folder: str, gigabytes: float, words: str, rounds: int, out: str
) -> None:
    """Time all ways in turn, each round beginning with another one; rank 0 notes all of it."""
    import torch.distributed as dist

    state = state_of_shapes(gigabytes, world, words, 0.5)
    locals_ = [tensor.to_local() for tensor in state.values()]
    found: dict[str, list[tuple[float, float]]] = {}
    extra: dict[str, int] = {}
    read: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        compared = ways(state, folder, words, stack)
        for number in range(rounds + 1):
            for name in turned(list(compared), number):
                for tensor in locals_:
                    tensor.fill_(0.25)
                _forget()
                before = _resident()
                dist.barrier()
                spent, start = cpu(), time.perf_counter()
                report = compared[name]()
                dist.barrier()
                wall = time.perf_counter() - start
                mine = (cpu() - spent, _peak() - before, getattr(report, "bytes_read", 0))
                said: list[Any] = [None] * world
                dist.all_gather_object(said, mine)
                if name != ELSEWHERE:
                    assert all(bool((tensor == 1.5).all()) for tensor in locals_), name
                if number:
                    found.setdefault(name, []).append((wall, sum(one[0] for one in said)))
                    extra[name] = max(extra.get(name, 0), *(one[1] for one in said))
                    read[name] = sum(one[2] for one in said)
    if rank == 0:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        result = {"samples": found, "extra": extra, "read": read, "nbytes": nbytes}
        Path(out).write_text(json.dumps(result))


def ways(
    state: dict[str, Any], folder: str, words: str, stack: contextlib.ExitStack
) -> dict[str, Callable[[], Any]]:
    """Return what is compared, by name."""
    from torch.distributed.checkpoint.state_dict_loader import load as stock

    from ckptctl.distributed.group import threads
    from ckptctl.distributed.loading.load import PLANS, load

    jobs = threads(0)
    files = stack.enter_context(BareFiles(folder))
    ranges = files.ranges(state)

    def first() -> Any:
        PLANS.clear()
        return load({"model": state}, folder)

    found: dict[str, Callable[[], Any]] = {
        "bare preadv": lambda: read_all(ranges, jobs),
        "ckptctl.load": lambda: load({"model": state}, folder),
        "ckptctl.load, planned anew": first,
        "dcp.load": lambda: stock({"model": state}, checkpoint_id=folder),
    }
    if words == "S1":
        long = files.elsewhere(state)
        found[ELSEWHERE] = lambda: read_all(long, jobs)
    if words == "R":
        found["ckptctl.load, broadcast"] = lambda: load({"model": state}, folder, broadcast=True)
    return found


def turned(names: list[str], number: int) -> list[str]:
    """Return *names* in another order in each round."""
    first = number % len(names)
    return names[first:] + names[:first]


def cpu() -> float:
    """Return the seconds of user and system time that this process has taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _forget() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def run(case: Case, root: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Return what :func:`measure` notes of one case."""
    _, saved, before, loaded, after = case
    folder = Path(tempfile.mkdtemp(dir=root))
    checkpoint, out = str(folder / "c"), folder / "out.json"
    try:
        first = (checkpoint, gigabytes, before)
        run_on_ranks("tests.benchmarks.training_load:save", [saved], *first, timeout=600)
        second = (checkpoint, gigabytes, after, rounds, str(out))
        run_on_ranks("tests.benchmarks.training_load:measure", [loaded], *second, timeout=900)
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    finally:
        shutil.rmtree(folder)
