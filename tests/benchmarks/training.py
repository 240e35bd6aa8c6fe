"""Saving and loading in training against stock DCP and bare loops: one command, one table.

Run as ``python -m tests.benchmarks.training``: 2 and 4 gloo ranks, Llama-shaped DTensors, on
memory and with ``--disk DIR`` on a disk. ``--plans`` adds what planning costs for many simulated
ranks, which takes minutes; ``--quick`` is a look of a minute. All ratios are of times taken in
turns by the same processes: the median over rounds of (theirs / ours), so more is better.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.benchmarks import training_load, training_save
from tests.benchmarks.measure import REPOSITORY
from tests.benchmarks.pages import pool
from tests.benchmarks.report import spread, table

MEMORY = Path("/dev/shm")
HEAD = (
    "what",
    "ranks",
    "on",
    "GB",
    "way",
    "s: median (min–max)",
    "CPU s",
    "× bare",
    "× dcp",
    "more",
)
BARE_SAVE = "bare pwrite + crc32 (isal)"
Samples = Mapping[str, Sequence[Sequence[float]]]
Row = tuple[object, ...]


def paired(samples: Samples, theirs: str, ours: str) -> str:
    """Return the median over rounds of how many times faster *ours* is than *theirs*."""
    pairs = zip(samples[theirs], samples[ours], strict=True)
    return f"{statistics.median(slow[0] / quick[0] for slow, quick in pairs):.2f}"


def rows(
    head: Row, samples: Samples, bare: str, stock: str, more: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the lines of one run."""
    for name, found in samples.items():
        cpu = f"{statistics.median(one[1] for one in found):.2f}"
        ratios = paired(samples, bare, name), paired(samples, stock, name)
        yield (*head, name, spread([one[0] for one in found]), cpu, *ratios, more.get(name, ""))


def saves(root: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """Measure ``save``."""
    for world in asked.ranks:
        with pages(root, asked.gigabytes):
            found = training_save.run(world, root, asked.gigabytes, asked.rounds)
        head = ("save", world, root, f"{found['nbytes'] / 1e9:.2f}")
        plain = {name: one for name, one in found["samples"].items() if "sync" not in name}
        synced = {name: one for name, one in found["samples"].items() if "sync" in name}
        yield from rows(head, plain, BARE_SAVE, "dcp.save", {})
        yield from rows(head, synced, f"{BARE_SAVE} + fsync", "dcp.save, sync", {})


def loads(root: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """Measure ``load``, with the memory that it takes and the bytes that are read."""
    cases = [case for case in training_load.CASES if case[3] in asked.ranks]
    for case in cases[:1] + cases[-1:] if asked.quick else cases:
        with pages(root, asked.gigabytes):
            found = training_load.run(case, root, asked.gigabytes, asked.rounds)
        nbytes, read = found["nbytes"], found["read"]
        more = {name: f"+{extra >> 20} MiB" for name, extra in found["extra"].items()}
        for name, count in read.items():
            if count:
                more[name] += f", reads {count / nbytes:.2f} × the model"
        head = (f"load, {case[0]}", case[3], root, f"{nbytes / 1e9:.2f}")
        yield from rows(head, found["samples"], "bare preadv", "dcp.load", more)


def blocked(root: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """Measure how long ``async_save`` keeps training, and how long it takes in all."""
    with tempfile.TemporaryDirectory() as folder, pages(root, asked.gigabytes):
        out = Path(folder) / "out.json"
        given = ["--gib", str(asked.gigabytes), "--rounds", str(asked.rounds + 1)]
        argv = [sys.executable, "-m", "tests.benchmarks.training_async", "--dir", str(root)]
        subprocess.run([*argv, *given, "--json", str(out)], cwd=REPOSITORY, check=True)
        times: dict[str, list[list[float]]] = json.loads(out.read_text())
    samples = {name: found[1:] for name, found in times.items()}
    copies = [name for name in samples if name.startswith("torch copy")]
    copy = min(copies, key=lambda name: statistics.median(one[0] for one in samples[name]))
    more = {
        name: f"in all {statistics.median(one[1] for one in found):.2f} s"
        for name, found in samples.items()
    }
    head = ("blocked by async save", 1, root, f"{asked.gigabytes * 1.073741824:.2f}")
    for row in rows(head, samples, copy, "dcp.async_save", more):
        yield (*row[:6], "–", *row[7:])


@contextlib.contextmanager
def pages(root: Path, gigabytes: float) -> Iterator[None]:
    """Keep pages at hand where *root* is memory."""
    if root != MEMORY:
        yield
        return
    with (
        tempfile.TemporaryDirectory(dir=root) as folder,
        pool(Path(folder), int(2.5e9 * gigabytes)),
    ):
        yield


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, help="a directory on a disk, to measure there, too")
    parser.add_argument("--plans", action="store_true", help="planning for simulated ranks")
    parser.add_argument("--quick", action="store_true", help="a minute: 2 ranks, little, twice")
    parser.add_argument("--json", type=Path, help="where the table goes as JSON, too")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.ranks, asked.gigabytes, asked.rounds = [2], 0.4, 2
    found: list[Row] = []
    print(table(HEAD, []), flush=True)
    for root in [MEMORY, *([asked.disk] if asked.disk else [])]:
        for part in (saves, loads, blocked):
            for row in part(root, asked):
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
                found.append(row)
    if asked.json:
        lines = [dict(zip(HEAD, map(str, row), strict=True)) for row in found]
        asked.json.write_text(json.dumps(lines, indent=1, ensure_ascii=False))
    if asked.plans:
        print("\n```", flush=True)
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.training_plans"], cwd=REPOSITORY, check=True
        )
        print("```")


if __name__ == "__main__":
    main()
