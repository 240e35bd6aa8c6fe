"""Measure ``ckptctl convert`` against ``cp -r``, a bare loop and torch's own ways.

::

    python -m tests.benchmarks.convert --size 1GB --size 4GB --peers      # tmpfs: slopes
    python -m tests.benchmarks.convert --size 3GB --disk --where /var/tmp # durable
    python -m tests.benchmarks.convert --size 12GB --disk --pairs 1 --where /var/tmp  # memory
    python -m tests.benchmarks.convert --tensors 100000 --pairs 1         # many small tensors

Every number is that of a whole process. The contestants of a round run in turn, in the reverse
order in every other round. Sources and outputs are removed as soon as they are not needed; space
for about 2.5 times the sizes together is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from ckptctl.units import parse_bytes
from tests.benchmarks import report, startup
from tests.benchmarks.directions import BY_NAME, DEFAULT, Direction, Setting, commands
from tests.benchmarks.measure import TOOL, ProcessFailed, Sample, in_turn, run
from tests.benchmarks.pages import pool
from tests.benchmarks.report import Measured
from tests.benchmarks.workspace import Workspace, discard, nbytes

INSPECTED = {"hf", "dcp", "torch", "meta1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return 1 if a process failed."""
    given = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=given.where) as scratch:
        bench = Bench(given, Path(scratch))
        pages = 0 if given.disk else bench.footprint
        with pool(Path(scratch), pages) if pages else nullcontext():
            bench.all()
    print(bench.markdown())
    if given.json:
        given.json.write_text(json.dumps(bench.document(), indent=1))
    for failure in bench.failures:
        print(failure, file=sys.stderr)
    return 1 if bench.failures else 0


class Bench:
    """One run: what was asked for, where, and what came of it."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given = given
        self.setting = Setting(given.disk, given.jobs)
        sizes = [str(size) for size in given.size or []]
        sizes += [f"{count}t" for count in given.tensors or []]
        self.space = Workspace(scratch, tuple(sizes or ["1000000000", "4000000000"]))
        self.results: list[Measured] = []
        self.start: dict[str, list[Sample]] = {}
        self.failures: list[str] = []

    def all(self) -> None:
        """Measure everything; a failed process costs its direction, not the run."""
        if self.given.startup:
            self._guarded(self._startup)
        # By source, so that each is made once.
        for direction in sorted(self._directions(), key=lambda d: d.source):
            self._guarded(self._direction, direction)

    @property
    def footprint(self) -> int:
        """Return the bytes of the sources and of the largest output: a cast to float32."""
        sizes = [int(size) for size in self.space.sizes if size.isdigit()]
        return sum(sizes) * 5 // 4 + max(sizes, default=0) * 9 // 4

    def markdown(self) -> str:
        """Return the tables, headed by the machine and the setting."""
        where = "disk, durable" if self.setting.disk else "tmpfs"
        if self.given.where != Path("/dev/shm"):
            where += f" ({self.given.where})"
        cores = len(os.sched_getaffinity(0))
        head = f"{where}; {cores} cores; Python {platform.python_version()}; {platform.machine()}"
        parts = [head, report.markdown(self.results)]
        if self.start:
            parts.append(startup.markdown(self.start))
        return "\n\n".join(parts)

    def document(self) -> dict[str, object]:
        """Return the JSON document."""
        options = {name: str(value) for name, value in vars(self.given).items()}
        return {"options": options, **report.document(self.results, self.start)}

    def _directions(self) -> list[Direction]:
        names = self.given.only or DEFAULT
        chosen = [BY_NAME[name] for name in names]
        if self.given.no_checksum:
            chosen = [d.without_checksum() if d.checksum else d for d in chosen]
        return list({direction.name: direction for direction in chosen}.values())

    def _direction(self, direction: Direction) -> None:
        result = Measured(direction.name)
        for size in self.space.sizes:
            source = self.space.source(direction.source, size)
            result.nbytes[size] = nbytes(source)
            if direction.source in INSPECTED and size == self.space.sizes[-1]:
                self._inspect(direction.source, source)
        self.results.append(result)
        for number in range(self.given.pairs):
            self._round(direction, result, number)

    def _round(self, direction: Direction, result: Measured, number: int) -> None:
        entries = []
        for size in self.space.sizes:
            source, assets = self.space.source(direction.source, size), self.space.assets(size)
            keywords = direction.keywords(assets, result.nbytes[size], self.setting.jobs)
            found = commands(direction, source, self.space.target, keywords, self.setting)
            if not self.given.peers or number >= self.given.peer_pairs:
                found.pop("torch", None)
            entries += [(size, who, command) for who, command in found.items()]
        for size, who, command in in_turn(entries, number):
            self._settle()
            try:
                result.add(who, size, run(command))
            finally:
                discard(self.space.target)

    def _settle(self) -> None:
        discard(self.space.target)
        if self.setting.disk:
            os.sync()

    def _inspect(self, kind: str, source: Path) -> None:
        name = f"inspect ({kind}, {nbytes(source) / 1e9:.2f} GB)"
        if name not in self.start:
            command = [*TOOL, "inspect", str(source)]
            self.start[name] = [run(command) for _ in range(min(self.given.pairs, 7))]

    def _startup(self) -> None:
        folder, runs = self.space.root / "start", self.given.pairs
        self.start = startup.measure(folder, runs, self.setting, self._directions())

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            step(*arguments)
        except ProcessFailed as failure:
            self.failures.append(str(failure))


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(BY_NAME)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", type=parse_bytes, action="append", help="bytes, as in 4GB; repeat for slopes")
    add("--tensors", type=int, action="append", help="a number of small tensors instead")
    add("--where", type=Path, default=Path("/dev/shm"), help="scratch (default /dev/shm)")
    add("--disk", action="store_true", help="durable: sync -f after cp -r, fsync in the loop")
    add("--only", type=_names, help=f"directions, by comma: {', '.join(DEFAULT)}; +nocrc on any")
    add("--no-checksum", action="store_true", help="every direction with --no-checksum")
    add("--pairs", type=int, default=7, help="rounds (default 7)")
    add("--peers", action="store_true", help="torch's own ways as well")
    add("--peer-pairs", type=int, default=3, help="rounds that they take part in (default 3)")
    add("--jobs", type=int, help="threads of ckptctl and of the bare loop")
    add("--no-startup", dest="startup", action="store_false", help="skip the tiny model")
    add("--json", type=Path, help="file for every sample")
    return parser


if __name__ == "__main__":
    sys.exit(main())
