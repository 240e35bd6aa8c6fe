"""Saves in the background: how long they block, how fast they write, what they cost a training.

Each function here runs in a process of its own, in which nothing was saved before; ``rows`` is a
part of :mod:`tests.benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptctl.distributed.state import to_memoryview
from tests.benchmarks import bare_gpu, bare_loop
from tests.benchmarks.build import spec_for
from tests.benchmarks.measure import in_turn
from tests.benchmarks.warm import Warm

if TYPE_CHECKING:
    from tests.benchmarks.gpu import Row

STEPS = 40
Seconds = dict[str, float]


def state_of(size: str, device: str) -> dict[str, torch.Tensor]:
    """Return a state whose bytes were written."""
    shapes = spec_for(size).shapes().items()
    return {name: torch.full(s, 0.5, dtype=torch.bfloat16, device=device) for name, s in shapes}


def saves(size: str, device: str, folder: str, mode: str, prepare: bool) -> Seconds:
    """Save three times, and once more while a training goes on."""
    from ckptctl import AsyncSaver

    state, step = state_of(size, device), training(device)
    root = Path(folder, "async")
    found: Seconds = {}
    with AsyncSaver(mode=mode) as saver:  # type: ignore[arg-type]
        if prepare:
            start = time.perf_counter()
            saver.prepare(state).result()
            found["prepare"] = time.perf_counter() - start
        for number in range(3):
            settle(device)
            start = time.perf_counter()
            future = saver.save(state, root / str(number), sync=False)
            found[f"blocks {number}"] = time.perf_counter() - start
            start = time.perf_counter()
            future.result()
            found[f"writes {number}"] = time.perf_counter() - start
            shutil.rmtree(root / str(number))
        alone = [step() for _ in range(STEPS)][STEPS // 4 :]
        future, during = saver.save(state, root / "last", sync=False), list[float]()
        while not future.done() or not during:
            during.append(step())
        shutil.rmtree(root / "last")
    return found | {"step": statistics.median(alone), "step 2": statistics.median(during)}


def stock(size: str, device: str, folder: str) -> Seconds:
    """Save three times by ``dcp.async_save``."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    state, found = state_of(size, device), Seconds()
    for number in range(3):
        path = Path(folder, "dcp")
        start = time.perf_counter()
        future = cast(Future[Any], async_save(state, checkpoint_id=path, no_dist=True))
        found[f"blocks {number}"] = time.perf_counter() - start
        start = time.perf_counter()
        future.result()
        found[f"writes {number}"] = time.perf_counter() - start
        shutil.rmtree(path)
    return found


def bare(size: str, device: str, folder: str, threads: list[int]) -> Seconds:
    """Find memory, pin it and copy into it; copy again; write it by so many threads."""
    flat = [tensor.view(-1).view(torch.uint8) for tensor in state_of(size, device).values()]
    nbytes = sum(map(len, flat))
    settle(device)
    start = time.perf_counter()
    host = bare_gpu.pinned(nbytes, pin=device == "cuda")
    found: Seconds = {"nbytes": nbytes, "prepare": time.perf_counter() - start}
    for number in range(3):
        begin, at = time.perf_counter(), 0
        for part in flat:
            host[at : at + len(part)].copy_(part, non_blocking=True)
            at += len(part)
        settle(device)
        found[f"blocks {number}"] = time.perf_counter() - (begin if number else start)
    view = to_memoryview(host)
    for count in threads:
        path = Path(folder, "bare")
        start = time.perf_counter()
        bare_loop.write([view], path, count)
        found[f"writes {count}"] = time.perf_counter() - start
        shutil.rmtree(path)
    return found


def training(device: str) -> Callable[[], float]:
    """Return a step that takes some 20 ms, half of it in many small operations."""
    side = 8192 if device == "cuda" else 256
    matrix = torch.randn(side, side, device=device).bfloat16() / side
    small = torch.zeros(64, device=device)

    def step() -> float:
        settle(device)
        start = time.perf_counter()
        for _ in range(8):
            matrix @ matrix
        for _ in range(1000):
            small.add_(1)
        settle(device)
        return time.perf_counter() - start

    return step


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def rows(given: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """Yield the rows of all ways."""
    from ckptctl import AsyncSaver
    from tests.benchmarks.gpu import Row

    at = (str(given.size), given.device, str(folder))
    calls: dict[str, tuple[str, tuple[object, ...]]] = {"bare": ("bare", (*at, given.threads))}
    for mode in ("thread", "process"):
        calls[mode] = ("saves", (*at, mode, False))
        if hasattr(AsyncSaver, "prepare"):
            calls[f"{mode}, prepared"] = ("saves", (*at, mode, True))
    if given.peers:
        calls["dcp"] = ("stock", at)
    said: dict[str, list[Seconds]] = {name: [] for name in calls}
    for number in range(given.runs):
        for name in in_turn(calls, number):
            function, arguments = calls[name]
            with Warm() as process:
                made = process.call(f"tests.benchmarks.background:{function}", arguments)
            said[name].append(made)
    nbytes = int(said["bare"][0]["nbytes"])

    def part(what: str, size: int, key: str, *keys: str, limit: str = "") -> list[Row]:
        made = []
        for name, samples in said.items():
            wanted = [sample[one] for sample in samples for one in (key, *keys) if one in sample]
            if wanted:
                ours = "" if name in ("bare", "dcp") else limit
                made.append(Row(what, size, name, wanted, "bare", ours))
        return made

    yield part("memory is made, by prepare", nbytes, "prepare")
    yield part("first async_save blocks", nbytes, "blocks 0", limit="≥ 0.83")
    yield part("next ones block", nbytes, "blocks 1", "blocks 2", limit="≥ 0.9")
    writes = [
        Row("written behind", nbytes, f"bare, {n}", [one[f"writes {n}"] for one in said["bare"]])
        for n in given.threads
    ]
    best = min(writes, key=lambda row: statistics.median(row.seconds)).way
    for row in part("written behind", nbytes, "writes 1", "writes 2", limit="≥ 0.8"):
        if row.way != "bare":
            row.beside = best
            writes.append(row)
    yield writes
    for name, samples in said.items():
        if "step" in samples[0]:
            alone = Row("a training step", 0, "alone", [sample["step"] for sample in samples])
            during = [sample["step 2"] for sample in samples]
            yield [alone, Row("a training step", 0, f"during, {name}", during, "alone", "≥ 0.97")]
