"""What more threads bring: conversions beside the bare loop with as many.

::

    python -m tests.benchmarks.cores                              # 4.2 GB, tmpfs
    python -m tests.benchmarks.cores --only hf-hf9 --threads 1,16,default --size 1GB

``whole`` is the program as a process of its own; ``fill`` the same conversion, called in a process
that has done one before, and ``bare`` the loop of ``preadv``, CRC-32 and ``pwrite``, which reads
and writes as many bytes, in such a process, too. In the row ``default`` nobody says how many
threads: the loop beside it has one for each core. All take turns, in the reverse order in every
other round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.bare_loop import CRCS
from tests.benchmarks.directions import BY_NAME, Direction
from tests.benchmarks.measure import Sample, imports_of, in_turn, run
from tests.benchmarks.options import machine, names_of, parser_of, run_bench
from tests.benchmarks.report import ratio, spread, table
from tests.benchmarks.warm import Warm
from tests.benchmarks.workspace import Workspace, discard, nbytes

LIMITS = {
    "hf-hf9": 0.8,
    "hf-dcp": 0.8,
    "hf-mp8": 0.6,
    "hf-f32": 0.5,
    "fp8-bf16": 0.5,
    "int4-bf16": 0.5,
    "nvfp4-bf16": 0.5,
    "gptq-bf16": 0.5,
    "awq-bf16": 0.5,
    "hf-fp8-block": 0.2,
    "hf-nvfp4": 0.1,
    "lora-merge": 0.5,
    "gptoss-transpose": 0.5,
}
"""Of each direction, the part of the bare loop's speed that it is to reach."""
CORES = len(os.sched_getaffinity(0))
HEAD = (
    *("direction", "GB in", "GB out", "threads", "whole s: median (min–max)", "fill s", "bare s"),
    *("fill GB/s", "bare GB/s", "fill, × bare", "to reach", "MB beyond imports", "runs"),
)


@dataclass
class Row:
    """All samples of one direction with one number of threads.

    Attributes:
        direction: Its name.
        threads: How many; None: as ckptctl likes.
        read: Bytes of the source.
        written: Bytes of the output.
        samples: One per round, by contestant: ``whole``, ``fill``, ``bare``, ``imports``.
    """

    direction: str
    threads: int | None
    read: int
    written: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, who: str, sample: Sample) -> None:
        """Append the sample of one round."""
        self.samples.setdefault(who, []).append(sample)

    def walls(self, who: str) -> list[float]:
        """Return the wall times of a contestant."""
        return [sample.wall for sample in self.samples[who]]

    def cells(self) -> Sequence[object]:
        """Return its line of the table."""
        fill, bare = self.walls("fill"), self.walls("bare")
        beyond = max(s.rss for s in self.samples["whole"]) - self.samples["imports"][0].rss
        return (
            *(self.direction, f"{self.read / 1e9:.2f}", f"{self.written / 1e9:.2f}"),
            per_core(self.threads),
            *(spread(self.walls("whole")), spread(fill), spread(bare)),
            *(f"{self.read / 1e9 / statistics.median(walls):.2f}" for walls in (fill, bare)),
            f"{ratio(bare, fill) or 0:.2f}",
            *(f"≥ {LIMITS[self.direction]}", f"{beyond / 1e6:.0f}", len(fill)),
        )


def per_core(threads: int | None) -> str:
    """Return how many threads there are, and on each core where there are fewer of these."""
    if threads is None:
        return "default"
    return f"{threads} ({threads / CORES:.3g} on a core)" if threads > CORES else str(threads)


class Bench:
    """One run: what was asked for, where, and what came of it."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given = given
        self.scratch = scratch
        self.space = Workspace(scratch, (str(given.size),))
        self.rows: list[Row] = []

    def measure_all(self) -> None:
        """Measure everything, by source, so that each is made once."""
        print(table(HEAD, []), flush=True)
        chosen = [BY_NAME[name] for name in self.given.only]
        for direction in sorted(chosen, key=lambda direction: direction.source):
            for row in self._direction(direction):
                print("| " + " | ".join(map(str, row.cells())) + " |", flush=True)
                self.rows.append(row)

    def _direction(self, direction: Direction) -> Iterator[Row]:
        size = self.space.sizes[0]
        source = self.space.source(direction.source, size)
        read, target = nbytes(source), self.space.target
        keywords = direction.keywords(self.space.assets(size), read, None)
        command = direction.command(source, target, keywords)
        imports = run(imports_of(command, self.scratch))
        written = nbytes(target)
        discard(target)
        rows = [Row(direction.name, n, read, written) for n in self.given.threads]
        turns = [(row, who) for row in rows for who in ("whole", "fill", "bare")]
        ours = f"ckptctl:{direction.verb}", direction.paths(source, target)
        with Warm() as warm, Warm() as loop:
            warm.call(*ours, keywords)
            for number in range(self.given.runs):
                for row, who in in_turn(turns, number):
                    discard(target)
                    wanted = keywords | ({"jobs": row.threads} if row.threads else {})
                    if who == "whole":
                        sample = run(direction.command(source, target, wanted))
                    elif who == "fill":
                        sample = warm.timed(*ours, wanted)
                    else:
                        how = {"crc": self.given.crc, "grow": written / read}
                        bare = [str(source), str(target), row.threads or CORES]
                        sample = loop.timed("tests.benchmarks.bare_loop:copy", bare, how)
                    row.add(who, sample)
        discard(target)
        for row in rows:
            row.add("imports", imports)
        yield from rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return 1 if a process failed."""
    options = _parser().parse_args(argv)
    return run_bench(options, Bench, machine(options.where), pages=4 * options.size)


def _threads(text: str) -> list[int | None]:
    return [None if one == "default" else int(one) for one in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("cores", __doc__, runs=3, size="4.2GB")
    add = parser.add_argument
    add("--only", type=names_of(LIMITS), default=list(LIMITS), help=f"of {', '.join(LIMITS)}")
    threads = "1,2,4,8,16,default"
    add("--threads", type=_threads, default=threads, help=f"how many (default {threads})")
    add("--crc", choices=CRCS, default="isal", help="the bare loop's checksum (default isal)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
