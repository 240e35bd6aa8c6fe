"""``load`` in training against stock ``dcp.load`` and a bare loop of ``preadv``, in one run.

Llama-shaped tensors, saved by stock ``dcp.save`` on some gloo ranks and loaded on some, in the same
sharding and in another. The bare loop reads as many bytes per rank from the same files, with the
same number of threads, into memory that exists.

Run as ``python -m tests.benchmarks.training_load``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gloo import run_on_ranks

BLOCK = 8 << 20
ROUNDS = 3
CASES = (
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


def measure(rank: int, world: int, folder: str, gigabytes: float, words: str, out: str) -> None:
    """Time the three ways in turn, and note the best of each on rank 0."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load as stock

    from ckptctl.distributed.loading import load

    state = state_of_shapes(gigabytes, world, words, 0.5)
    locals_ = [tensor.to_local() for tensor in state.values()]
    best: dict[str, float] = {}
    ways: dict[str, Callable[[], Any]] = {
        "bare preadv": lambda: _bare(folder, locals_, rank),
        "ckptctl": lambda: load({"model": state}, folder, broadcast=False),
        "ckptctl broadcast": lambda: load({"model": state}, folder, broadcast=True),
        "dcp.load": lambda: stock({"model": state}, checkpoint_id=folder),
    }
    if words != "R":
        del ways["ckptctl broadcast"]
    peak: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            for tensor in locals_:
                tensor.fill_(0.25)
            _forget()
            before = _resident()
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
            peak[name] = max(peak.get(name, 0), _peak() - before)
            if name != "bare preadv":
                assert all(bool((tensor == 1.5).all()) for tensor in locals_), name
    if rank == 0:
        Path(out).write_text(json.dumps({"seconds": best, "extra": peak}))


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


def _bare(folder: str, tensors: list[Any], rank: int, jobs: int = 0) -> None:
    """Read as many bytes as *tensors* have into their memory, from anywhere in the files."""
    from ckptctl.distributed.state import memory

    files = sorted(Path(folder).glob("*.distcp"))
    sizes = [file.stat().st_size for file in files]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    work: list[tuple[int, int, memoryview]] = []
    number, offset = rank % len(files), 0
    for tensor in tensors:
        view = memory(tensor)
        for start in range(0, len(view), BLOCK):
            part = view[start : start + BLOCK]
            if offset + len(part) > sizes[number]:
                number, offset = (number + 1) % len(files), 0
            work.append((descriptors[number], offset, part))
            offset += len(part)
    lock = threading.Lock()

    def loop() -> None:
        while True:
            with lock:
                if not work:
                    return
                descriptor, at, part = work.pop()
            os.preadv(descriptor, [part], at)

    threads = [threading.Thread(target=loop) for _ in range(jobs or min(4, os.cpu_count() or 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in descriptors:
        os.close(descriptor)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))
    asked = parser.parse_args()
    print("case                      way                 seconds   of bare   of dcp   extra MiB")
    for title, saved, before, loaded, after in CASES:
        folder = Path(tempfile.mkdtemp(dir=asked.root))
        try:
            run_on_ranks(
                "tests.benchmarks.training_load:save",
                [saved],
                str(folder / "c"),
                asked.gigabytes,
                before,
                timeout=600,
            )
            out = folder / "out.json"
            run_on_ranks(
                "tests.benchmarks.training_load:measure",
                [loaded],
                str(folder / "c"),
                asked.gigabytes,
                after,
                str(out),
                timeout=600,
            )
            found = json.loads(out.read_text())
        finally:
            shutil.rmtree(folder)
        for way, seconds in found["seconds"].items():
            bare, stock = found["seconds"]["bare preadv"], found["seconds"]["dcp.load"]
            print(
                f"{title + f' ({loaded})':25} {way:18} {seconds:8.2f} {bare / seconds:9.2f} "
                f"{stock / seconds:8.2f} {found['extra'][way] >> 20:11,}",
                flush=True,
            )


if __name__ == "__main__":
    main()
