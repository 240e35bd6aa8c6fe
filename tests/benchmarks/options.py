"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from ckptctl.units import parse_bytes

MEMORY = Path("/dev/shm")


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
