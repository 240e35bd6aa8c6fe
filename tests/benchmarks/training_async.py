"""How long a save in the background blocks training.

Run as ``python -m tests.benchmarks.training_async``. One process, 16 tensors. In each round, one
after the other: a plain copy by torch into memory that was written before, with torch's own threads
and with one; ``ckptctl.async_save`` in both modes; ``dcp.async_save`` as it is called by default.
Then ratios of medians; the first round, in which everybody finds memory and starts processes, is
shown apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from ckptctl.distributed.background.async_save import AsyncSaver, Mode

TENSORS = 16
Blocked = Callable[[int], tuple[float, float]]
"""Returns the seconds until training goes on, and until the save is over."""


def copying(state: dict[str, torch.Tensor], threads: int) -> Blocked:
    """Copy by torch, into memory that is there."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def run(_: int) -> tuple[float, float]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        start = time.perf_counter()
        for name, tensor in state.items():
            copies[name].copy_(tensor)
        end = time.perf_counter() - start
        torch.set_num_threads(before)
        return end, end

    return run


def ours(state: dict[str, torch.Tensor], root: Path, mode: Mode) -> Blocked:
    """Save by ``ckptctl.async_save``."""
    saver = AsyncSaver(mode=mode)

    def run(number: int) -> tuple[float, float]:
        start = time.perf_counter()
        future = saver.save(state, root / f"{mode}-{number}", sync=False)
        blocked = time.perf_counter() - start
        future.result()
        end = time.perf_counter() - start
        shutil.rmtree(future.path)
        return blocked, end

    return run


def stock(state: dict[str, torch.Tensor], root: Path) -> Blocked:
    """Save by ``dcp.async_save``."""

    def run(number: int) -> tuple[float, float]:
        path = root / f"dcp-{number}"
        start = time.perf_counter()
        future = cast(Future[Any], dcp_async_save(state, checkpoint_id=path, no_dist=True))
        blocked = time.perf_counter() - start
        future.result()
        end = time.perf_counter() - start
        shutil.rmtree(path)
        return blocked, end

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path, help="where all samples go instead")
    options = parser.parse_args()
    elements = int(options.gib * (1 << 30)) // TENSORS // 4
    state = {f"layers.{index}.weight": torch.randn(elements) for index in range(TENSORS)}
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        root = Path(scratch)
        measured: dict[str, Blocked] = {
            "torch copy": copying(state, torch.get_num_threads()),
            "torch copy, 1 thread": copying(state, 1),
            "async_save thread": ours(state, root, "thread"),
            "async_save process": ours(state, root, "process"),
            "dcp.async_save": stock(state, root),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
        for number in range(options.rounds):
            for name, run in measured.items():
                times[name].append(run(number))
    if options.json:
        options.json.write_text(json.dumps(times))
    else:
        _report(times)


def _report(times: dict[str, list[tuple[float, float]]]) -> None:
    medians = {
        name: [statistics.median(column) for column in zip(*found[1:], strict=True)]
        for name, found in times.items()
    }
    copy = min(medians["torch copy"][0], medians["torch copy, 1 thread"][0])
    dcp = medians["dcp.async_save"][0]
    print(
        "| | blocked s | least | first | total s | / copy | / dcp |\n|---|---|---|---|---|---|---|"
    )
    for name, (blocked, total) in medians.items():
        least = min(one for one, _ in times[name][1:])
        print(
            f"| {name} | {blocked:.3f} | {least:.3f} | {times[name][0][0]:.3f} | {total:.3f} "
            f"| {blocked / copy:.2f} | {blocked / dcp:.2f} |"
        )


if __name__ == "__main__":
    main()
