"""Measure ``ckptctl convert`` and its like against ``cp -r``, a bare loop and the peers' own ways.

::

    python -m tests.benchmarks.convert --size 1GB,4GB --peers           # tmpfs: slopes
    python -m tests.benchmarks.convert --size 3GB --disk --where /var/tmp  # durable
    python -m tests.benchmarks.convert --size 12GB --disk --runs 1 --where /var/tmp  # memory
    python -m tests.benchmarks.convert --tensors 100000 --runs 1        # many small tensors

Every number is that of a whole process. The contestants of a round run in turn, in the reverse
order in every other round. Sources and outputs are removed as soon as they are not needed; space
for about 2.5 times the sizes together is. ``--trainers`` names a Python that has deepspeed,
torch_checkpointing, nemo-automodel and torchsnapshot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.benchmarks import report, startup
from tests.benchmarks.directions import BY_NAME, DEFAULT, Direction, Setting, commands
from tests.benchmarks.families import KINDS
from tests.benchmarks.measure import PYTHON, TOOL, ProcessFailed, Sample, in_turn, run
from tests.benchmarks.options import MEMORY, machine, names_of, numbers, parser_of
from tests.benchmarks.pages import pool
from tests.benchmarks.peers import WAYS
from tests.benchmarks.report import Measured
from tests.benchmarks.workspace import Workspace, discard, nbytes

FIND = "import sys, importlib.util as u; sys.exit(u.find_spec(sys.argv[1]) is None)"
INSPECTED = {"hf", "dcp", "torch", "meta1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return 1 if a process failed."""
    given = _parser().parse_args(argv)
    given.where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=given.where) as scratch:
        bench = Bench(given, Path(scratch))
        pages = bench.footprint if given.where == MEMORY else 0
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
        self.setting = Setting(given.disk, given.jobs, given.trainers)
        sizes = [f"{count}t" for count in given.tensors] or map(str, given.size)
        self.space = Workspace(scratch, tuple(sizes), given.trainers or PYTHON)
        self.results: list[Measured] = []
        self.start: dict[str, list[Sample]] = {}
        self.failures: list[str] = []
        self.skipped = self._find_missing_peers() if given.peers else {}

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
        head = machine(self.given.where) + ("; durable" if self.setting.disk else "")
        parts = [head, report.markdown(self.results)]
        if self.start:
            parts.append(startup.markdown(self.start))
        parts += [f"skipped {who}: {why}" for who, why in self.skipped.items()]
        return "\n\n".join(parts)

    def document(self) -> dict[str, object]:
        """Return the JSON document."""
        options = {name: str(value) for name, value in vars(self.given).items()}
        return {"options": options, **report.document(self.results, self.start)}

    def _find_missing_peers(self) -> dict[str, str]:
        """Map the contestants that cannot take part to the reason."""
        names = {name for direction in self._directions() for name in direction.peers}
        missing = {}
        for way in (WAYS[name] for name in sorted(names)):
            if way.package and not self.given.trainers:
                missing[way.contestant] = "--trainers is not given"
            elif way.package:
                try:
                    run([self.given.trainers, "-c", FIND, way.package])
                except ProcessFailed:
                    missing[way.contestant] = f"{self.given.trainers} has no {way.package}"
        return missing

    def _directions(self) -> list[Direction]:
        chosen = [BY_NAME[name] for name in self.given.only]
        if self.given.tensors:  # families come by bytes alone
            chosen = [direction for direction in chosen if direction.source not in KINDS]
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
        for number in range(self.given.runs):
            self._round(direction, result, number)

    def _round(self, direction: Direction, result: Measured, number: int) -> None:
        entries = []
        for size in self.space.sizes:
            source, assets = self.space.source(direction.source, size), self.space.assets(size)
            keywords = direction.keywords(assets, result.nbytes[size], self.setting.jobs)
            found = commands(direction, source, self.space.target, keywords, self.setting)
            if not self.given.peers or number >= self.given.peer_runs:
                found = {who: found[who] for who in ("ckptctl", "cp", "bare")}
            for who in self.skipped.keys() & found.keys():
                del found[who]
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
            self.start[name] = [run(command) for _ in range(min(self.given.runs, 7))]

    def _startup(self) -> None:
        folder, runs = self.space.root / "start", self.given.runs
        self.start = startup.measure(folder, runs, self.setting, self._directions())

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            step(*arguments)
        except ProcessFailed as failure:
            self.failures.append(str(failure))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("convert", __doc__, runs=7, size="1GB,4GB", several=True)
    add = parser.add_argument
    add("--tensors", type=numbers, default=(), help="numbers of small tensors instead, by comma")
    add("--disk", action="store_true", help="durable: sync -f after cp -r, fsync in the loop")
    names = f"directions, by comma: {', '.join(DEFAULT)}; +nocrc on any"
    add("--only", type=names_of(BY_NAME), default=DEFAULT, help=names)
    add("--no-checksum", action="store_true", help="every direction with --no-checksum")
    add("--peers", action="store_true", help="the peers' own ways as well")
    add("--peer-runs", type=int, default=3, help="rounds that they take part in (default 3)")
    add("--trainers", help="a Python with deepspeed and the like")
    add("--jobs", type=int, help="threads of ckptctl and of the bare loop")
    add("--no-startup", dest="startup", action="store_false", help="skip the tiny model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
