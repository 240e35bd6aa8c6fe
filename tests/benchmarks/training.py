"""``save`` and ``load`` on several ranks against stock DCP and bare loops, in one table.

::

    python -m tests.benchmarks.training                       # 2 and 4 gloo ranks, in memory
    python -m tests.benchmarks.training --where /var/tmp --ranks 2

All ratios are of times taken in turns by the same processes: the median over rounds of (theirs /
ours), so more is better. What planning costs for thousands of ranks, ``training_plans`` says; saves
in the background are a part of ``gpu``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.benchmarks.options import MEMORY, machine, numbers, parser_of
from tests.benchmarks.pages import pool
from tests.benchmarks.report import spread, table
from tests.gloo import run_on_ranks

HEAD = ("what", "ranks", "GB", "way", "s: median (min–max)", "CPU s", "× bare", "× dcp", "more")
BARE_SAVE = "bare pwrite + crc32 (isal)"
CASES = (
    ("same sharding", 2, "S0", 2, "S0"),
    ("same sharding", 4, "S0", 4, "S0"),
    ("2 to 4 ranks", 2, "S0", 4, "S0"),
    ("rows to columns", 2, "S0", 2, "S1"),
    ("replicated", 2, "S0", 4, "R"),
)
"""Name; ranks and sharding that it was saved with; those that it is loaded with."""
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


def ask(function: str, world: int, folder: Path, *arguments: object) -> dict[str, Any]:
    """Return what :func:`tests.benchmarks.training_ranks.measure` writes down."""
    out = folder / "out.json"
    place = f"tests.benchmarks.training_ranks:{function}"
    run_on_ranks(place, [world], str(folder), *arguments, str(out), timeout=900)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def saves(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Measure ``save``."""
    for world in given.ranks:
        found = ask("saves", world, folder, str(given.size), given.runs)
        head = ("save", world, f"{found['nbytes'] / 1e9:.2f}")
        plain = {name: one for name, one in found["samples"].items() if "sync" not in name}
        synced = {name: one for name, one in found["samples"].items() if "sync" in name}
        yield from rows(head, plain, BARE_SAVE, "dcp.save", {})
        yield from rows(head, synced, f"{BARE_SAVE} + fsync", "dcp.save, sync", {})


def loads(given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Measure ``load``, with the memory that it takes and the bytes that are read."""
    for case, saved, before, world, after in CASES:
        if world not in given.ranks:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as source:
            first = (source, str(given.size), before)
            place = "tests.benchmarks.training_ranks:write_source"
            run_on_ranks(place, [saved], *first, timeout=600)
            found = ask("loads", world, Path(source), str(given.size), after, given.runs)
        nbytes, read = found["nbytes"], found["read"]
        more = {name: f"+{extra >> 20} MiB" for name, extra in found["extra"].items()}
        for name, count in read.items():
            if count:
                more[name] += f", reads {count / nbytes:.2f} × the model"
        head = (f"load, {case}", world, f"{nbytes / 1e9:.2f}")
        yield from rows(head, found["samples"], "bare preadv", "dcp.load", more)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure and print."""
    parser = parser_of("training", __doc__, runs=5, size="1GB")
    parser.add_argument("--ranks", type=numbers, default="2,4", help="how many (default 2,4)")
    given = parser.parse_args(argv)
    found: list[Row] = []
    print(f"{machine(given.where)}\n\n{table(HEAD, [])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=given.where) as scratch:
        pages = pool(Path(scratch), given.size * 5 // 2) if given.where == MEMORY else nullcontext()
        with pages:
            for part in (saves, loads):
                for row in part(given, Path(scratch)):
                    print("| " + " | ".join(map(str, row)) + " |", flush=True)
                    found.append(row)
    if given.json:
        lines = [dict(zip(HEAD, map(str, row), strict=True)) for row in found]
        given.json.write_text(json.dumps(lines, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
