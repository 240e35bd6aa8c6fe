"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from ckptctl.units import parse_bytes
from tests.benchmarks.measure import ProcessFailed
from tests.benchmarks.pages import pool

MEMORY = Path("/dev/shm")


class Bench(Protocol):
    """A benchmark whose results are rows of one table."""

    rows: list[Any]

    def measure_all(self) -> None:
        """Measure every row and print it when it is complete."""


def run_bench(
    options: argparse.Namespace,
    make_bench: Callable[[argparse.Namespace, Path], Bench],
    header: str,
    pages: int = 0,
) -> int:
    """Measure in a scratch folder, and write the rows to the file of ``--json``.

    Args:
        options: Options that :func:`parser_of` parsed.
        make_bench: Builds the benchmark from the options and the scratch folder.
        header: Line on the machine, printed first.
        pages: Bytes of memory to prepare if the scratch folder is in memory.

    Returns:
        The exit code, which is 1 if a process failed.
    """
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=options.where) as folder:
        scratch = Path(folder)
        bench = make_bench(options, scratch)
        with pool(scratch, pages) if pages and options.where == MEMORY else nullcontext():
            print(f"{header}\n", flush=True)
            try:
                bench.measure_all()
            except ProcessFailed as failure:
                print(failure, file=sys.stderr)
                return 1
            finally:
                if options.json:
                    options.json.write_text(json.dumps([asdict(row) for row in bench.rows]))
    return 0


def parser_of(
    name: str, about: str | None, *, runs: int, size: str | None = None, several: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the options that all have; scratch is removed at SIGTERM, too.

    Args:
        name: Of the module.
        about: Its docstring.
        runs: Rounds, if not said.
        size: Bytes, if not said; None: the benchmark has no size.
        several: Whether there may be several sizes.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    if size:
        sizes = parse_sizes if several else parse_bytes
        add("--size", type=sizes, default=size, help=f"bytes (default {size})")
    add("--runs", type=int, default=runs, help=f"rounds (default {runs})")
    add("--where", type=Path, default=MEMORY, help=f"scratch (default {MEMORY})")
    add("--json", type=Path, help="file for every sample")
    return parser


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return what takes names apart that are joined by commas."""

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(known)}")
        return text.split(",")

    return parse


def parse_sizes(text: str) -> list[int]:
    """Take sizes apart that are joined by commas."""
    return [parse_bytes(one) for one in text.split(",") if one]


def numbers(text: str) -> list[int]:
    """Take numbers apart that are joined by commas."""
    return [int(one) for one in text.split(",")]


def machine(where: Path) -> str:
    """Return a line on what all numbers below it depend on."""
    cores = len(os.sched_getaffinity(0))
    place = "memory" if where == MEMORY else str(where)
    return f"{place}; {cores} cores; Python {platform.python_version()}; {platform.machine()}"
