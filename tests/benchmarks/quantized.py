"""Quantizing and dequantizing, next to copying and to the arithmetic of the reference libraries.

::

    python -m tests.benchmarks.quantized                                  # 1 GB of bf16, 5 rounds
    python -m tests.benchmarks.quantized --size 200MB --only quantize-nvfp4,dequantize-awq
    python -m tests.benchmarks.quantized --only gguf --gguf model.gguf    # a file of your own

``ckptctl`` is a whole process; ``imports`` is a process that only imports what that one imports.
``cp`` copies the input and the output with ``cp -r``. The reference is what another library
computes for the same weights, without reading, writing and importing
(:mod:`tests.benchmarks.quantized_references`). All take turns, in the reverse order in every
other round. CPU is user and system time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.measure import TOOL, Sample, imports_of, in_turn, run
from tests.benchmarks.options import machine, names_of, parser_of, run_bench
from tests.benchmarks.report import spread, table
from tests.benchmarks.warm import Warm
from tests.benchmarks.workspace import Workspace, discard, nbytes

REFERENCES = "tests.benchmarks.quantized_references:measure"
LIMITS = {
    "copy": None,
    "quantize-fp8-block": 1.2,
    "quantize-fp8-channel": 1.2,
    "quantize-int4": 0.4,
    "quantize-int8-channel": 0.4,
    "quantize-nvfp4": 0.4,
    "quantize-mxfp4": 0.4,
    "quantize-mxfp8": 0.4,
    "dequantize-int4": 1.0,
    "dequantize-fp8": 0.5,
    "dequantize-gptq": 0.5,
    "dequantize-awq": 0.5,
    "dequantize-mxfp4": 0.5,
    "dequantize-nvfp4": 0.5,
    "gguf": 0.5,
}
"""For each row, the part of the reference's CPU time that is to be reached.

The row ``copy`` has no reference, and is to reach 1.5 times the CPU time of ``cp -r``.
"""
COPY_LIMIT = 1.5
HEAD = (
    *("work", "GB in", "GB out", "ckptctl CPU s: median (min–max)", "of it imports", "wall s"),
    *("cp CPU s", "× cp", "reference", "its CPU s", "its wall s", "CPU, × reference", "to reach"),
    *("MB beyond imports", "runs"),
)


@dataclass
class Row:
    """All samples of one kind of work.

    Attributes:
        work: Its name.
        read: Bytes of the source.
        written: Bytes of the output.
        samples: One per round, by contestant: ``ckptctl``, ``imports``, ``cp``, ``reference``.
        package: Package of the reference, or the reason that there is none.
    """

    work: str
    read: int
    written: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    package: str = "–"

    def add(self, contestant: str, sample: Sample) -> None:
        """Append the sample of one round."""
        self.samples.setdefault(contestant, []).append(sample)

    def cpus(self, contestant: str) -> list[float]:
        """Return the CPU times of a contestant."""
        return [sample.cpu for sample in self.samples.get(contestant, [])]

    def walls(self, contestant: str) -> list[float]:
        """Return the wall times of a contestant."""
        return [sample.wall for sample in self.samples.get(contestant, [])]

    def cells(self) -> Sequence[object]:
        """Return its line of the table."""
        ours, copies = self.cpus("ckptctl"), self.cpus("cp")
        beyond = max(s.rss for s in self.samples["ckptctl"]) - self.samples["imports"][0].rss
        limit = LIMITS[self.work]
        return (
            *(self.work, f"{self.read / 1e9:.2f}", f"{self.written / 1e9:.2f}", spread(ours)),
            f"{statistics.median(self.cpus('imports')):.2f}",
            spread(self.walls("ckptctl")),
            *(spread(copies), paired(ours, copies)),
            *(self.package, spread(self.cpus("reference")), spread(self.walls("reference"))),
            paired(ours, self.cpus("reference")),
            f"≤ {limit} × reference" if limit else f"≤ {COPY_LIMIT} × cp",
            *(f"{beyond / 1e6:.0f}", len(ours)),
        )


def paired(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median of the ratios, round by round, or a dash if there are none."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=False) if b]
    return f"{statistics.median(ratios):.2f}" if ratios else "–"


class Bench:
    """One run: its options, its folder and its rows."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.space = Workspace(scratch, (str(options.size),))
        self.rows: list[Row] = []

    def measure_all(self) -> None:
        """Measure every row and print it when it is complete."""
        print(table(HEAD, []), flush=True)
        for work in sorted(self.options.only, key=self._source_kind):
            row = self._measure(work)
            self.rows.append(row)
            print(table((), [row.cells()]).splitlines()[-1], flush=True)

    def _measure(self, work: str) -> Row:
        source, target = self._source(work), self.space.target
        command = [*TOOL, "convert", str(source), str(target), *self._conversion(work), "-q"]
        imports = imports_of(command, self.scratch)
        row = Row(work, nbytes(source), nbytes(target))
        output = self.scratch / "output"
        target.rename(output)
        copies = self.scratch / "copies"
        copy = 'mkdir "$3" && cp -r "$1" "$3/in" && cp -r "$2" "$3/out"'
        copying = ["sh", "-c", copy, "sh", str(source), str(output), str(copies)]
        contestants = ["ckptctl", "imports", "cp"]
        if LIMITS[work] is not None:
            contestants.append("reference")
        for number in range(self.options.runs):
            for contestant in in_turn(contestants, number):
                discard(target)
                discard(copies)
                if contestant == "ckptctl":
                    row.add(contestant, run(command))
                elif contestant == "imports":
                    row.add(contestant, run(imports))
                elif contestant == "cp":
                    row.add(contestant, run(copying))
                else:
                    self._measure_reference(row, source)
        for path in (target, copies, output):
            discard(path)
        return row

    def _measure_reference(self, row: Row, source: Path) -> None:
        """Run the reference in a process of its own, which ends with its memory."""
        with Warm() as process:
            result = process.call(REFERENCES, [row.work.replace("-", " ", 1), str(source)])
        if "missing" in result:
            row.package = result["missing"]
        else:
            row.package = result["package"]
            row.add("reference", Sample(result["wall"], result["cpu"], 0))

    def _source_kind(self, work: str) -> str:
        """Return the kind of source, by which rows are sorted so that each is made once."""
        if work == "gguf":
            return "gguf"
        verb, _, scheme = work.partition("-")
        return scheme if verb == "dequantize" else "hf"

    def _source(self, work: str) -> Path:
        if work == "gguf" and self.options.gguf:
            return Path(self.options.gguf).resolve()
        source = self.space.source(self._source_kind(work), str(self.options.size))
        return source / "model.gguf" if work == "gguf" else source

    def _conversion(self, work: str) -> list[str]:
        verb, _, scheme = work.partition("-")
        if verb == "quantize":
            return ["--to", "hf", "--quantize", scheme]
        return ["--to", "hf"] if verb == "copy" else ["--to", "hf", "--dequantize", "bf16"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return 1 if a process failed."""
    options = _parser().parse_args(argv)
    return run_bench(options, Bench, machine(options.where), pages=6 * options.size)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("quantized", __doc__, runs=5, size="1.04GB")
    add = parser.add_argument
    add("--only", type=names_of(LIMITS), default=list(LIMITS), help=f"of {', '.join(LIMITS)}")
    add("--gguf", type=Path, metavar="FILE", help="for the row gguf, instead of a file made here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
