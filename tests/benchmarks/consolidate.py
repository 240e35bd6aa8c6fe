"""Measure ``ckptctl consolidate`` and ``ckptctl verify`` against ``cp -r`` and the peers.

::

    python -m tests.benchmarks.consolidate --peers                     # everything, tmpfs
    python -m tests.benchmarks.consolidate --only zero1,dcp --pairs 7
    python -m tests.benchmarks.consolidate --only many                 # 1,000 tensors x 512 ranks

Every number is that of a whole process. What ``cp -r`` copies is what ``ckptctl`` wrote. The
contestants of a round run in turn, in the reverse order in every other round. The RSS beyond the
imports is that of a process that imports the same modules, subtracted. ``--trainers`` names a
Python that has deepspeed, torch_checkpointing and torchsnapshot.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptctl.units import parse_bytes
from tests.benchmarks.measure import PYTHON, TOOL, ProcessFailed, Sample, imports_of, in_turn, run
from tests.benchmarks.pages import pool
from tests.benchmarks.report import ratio, spread, table
from tests.benchmarks.workspace import discard, nbytes


@dataclass(frozen=True, slots=True)
class Form:
    """One form to consolidate.

    Attributes:
        name: As :mod:`tests.benchmarks.build_shards` calls it.
        peer: A way of :mod:`tests.benchmarks.peers`.
        to: Target format, where it is the peer's; None: safetensors.
        trainers: Whether the source needs the trainers' Python.
    """

    name: str
    peer: str | None = None
    to: str | None = None
    trainers: bool = False

    @property
    def limit(self) -> float:
        """Return how many times the wall time of ``cp -r`` it may take."""
        return 2.0 if self.name.endswith("-columns") else 1.3


FORMS = (
    Form("dcp", "dcp-torch", "torch"),
    Form("dcp-columns"),
    Form("dcp-rank-local"),
    Form("hf-rank-shards", "shards-hf"),
    Form("hf-rank-shards-columns", "shards-hf"),
    Form("rank-files"),
    Form("rank-files-columns"),
    Form("zero1", "zero-hf"),
    Form("zero3", "zero-hf"),
    Form("torch-checkpointing", trainers=True),
    Form("torchsnapshot", trainers=True),
)
BY_NAME = {form.name: form for form in FORMS}
EXTRAS = ("many", "fast", "grid")


@dataclass
class Row:
    """All samples of one form and size, or of one command.

    Attributes:
        name: The form.
        nbytes: Bytes of the result.
        samples: One per round, by contestant; ``imports`` are processes that only import.
    """

    name: str
    nbytes: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def walls(self, who: str) -> list[float]:
        """Return the wall times of a contestant."""
        return [sample.wall for sample in self.samples.get(who, ())]

    def beyond(self, who: str) -> float | None:
        """Return the largest peak RSS beyond the imports, in MB."""
        imports = [sample.rss for sample in self.samples.get("imports", ())]
        mine = [sample.rss for sample in self.samples.get(who, ())]
        return (max(mine) - statistics.median(imports)) / 1e6 if mine and imports else None


class Bench:
    """One run."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given = given
        self.scratch = scratch
        self.rows: list[Row] = []
        self.failures: list[str] = []

    def all(self) -> None:
        """Measure what was asked for; a failed process costs its form, not the run."""
        for name in self.given.only or [*BY_NAME, *EXTRAS]:
            try:
                if name in BY_NAME:
                    self._form(BY_NAME[name])
                else:
                    getattr(self, f"_{name}")()
            except ProcessFailed as failure:
                self.failures.append(str(failure))

    def say(self) -> None:
        """Print the table and the failures, and write every sample."""
        print(markdown(self.rows))
        if self.given.json:
            rows = [asdict(row) for row in self.rows]
            self.given.json.write_text(json.dumps(rows, indent=1))
        for failure in self.failures:
            print(failure, file=sys.stderr)

    def _form(self, form: Form) -> None:
        for size in self.given.size or [256_000_000, 1_000_000_000]:
            source, target = self.scratch / form.name, self.scratch / "out"
            result = self.scratch / ("like.pt" if form.to == "torch" else "like")
            discard(source)
            discard(result)
            self._build(form, source, size)
            ours = [*TOOL, "consolidate", str(source), "-q"]
            ours += ["--to", form.to] if form.to else []
            run([*ours, str(result)])
            row = Row(form.name, nbytes(result))
            self.rows.append(row)
            end = target.with_suffix(result.suffix)
            contestants = {"ckptctl": [*ours, str(end)], "cp": ["cp", "-r", str(result), str(end)]}
            if form.peer and self.given.peers:
                contestants["peer"] = self._peer(form, source, end)
            self._rounds(row, contestants, end)
        discard(source)
        discard(result)

    def _build(self, form: Form, source: Path, size: int) -> None:
        python = self.given.trainers if form.trainers else PYTHON
        model = size // 2 if form.name.startswith("zero") else size
        run([python, "-m", "tests.benchmarks.build_shards", form.name, str(source), str(model)])

    def _peer(self, form: Form, source: Path, target: Path) -> list[str]:
        python = self.given.trainers if form.peer == "zero-hf" else PYTHON
        return [python, "-m", "tests.benchmarks.peers", str(form.peer), str(source), str(target)]

    def _rounds(self, row: Row, contestants: dict[str, list[str]], target: Path) -> None:
        imports = imports_of(contestants["ckptctl"], self.scratch)
        for number in range(self.given.pairs):
            for who, command in in_turn(contestants.items(), number):
                if who == "peer" and number >= self.given.peer_pairs:
                    continue
                discard(target)
                row.samples.setdefault(who, []).append(run(command))
            row.samples.setdefault("imports", []).append(run(imports))
        discard(target)

    def _many(self) -> None:
        """Metadata-only consolidation of 1,000 tensors and 512 ranks, every item checked."""
        source = self.scratch / "many"
        run([PYTHON, "-m", "tests.benchmarks.build_ranks", str(source), "512", "1000", "40000"])
        row = Row("metadata-only, 1,000 tensors × 512 ranks", nbytes(source))
        self.rows.append(row)
        for _ in range(self.given.peer_pairs):
            discard(source / ".metadata")
            command = [*TOOL, "consolidate", str(source), "--metadata-only", "-q"]
            row.samples.setdefault("ckptctl", []).append(run(command))
        discard(source)

    def _fast(self) -> None:
        """``verify --level fast`` of 300 tensors on 8 ranks, and of an index of 32 shards."""
        for name, arguments in (("dcp", ["8", "300", "40000"]), ("hf", [])):
            source = self.scratch / f"fast-{name}"
            run([PYTHON, "-m", "tests.benchmarks.build_ranks", str(source), *arguments])
            if name == "dcp":
                run([*TOOL, "consolidate", str(source), "--metadata-only", "-q"])
            row = Row(f"verify --level fast ({name})", nbytes(source))
            self.rows.append(row)
            for _ in range(self.given.pairs):
                command = [*TOOL, "verify", str(source), "--level", "fast"]
                row.samples.setdefault("ckptctl", []).append(run(command))
            discard(source)

    def _grid(self) -> None:
        """The proof of coverage: one tensor of 256 × 256 boxes, and of 500 × 512."""
        for count in ("256", "506"):
            row = Row(f"coverage of {count} × {count} boxes")
            self.rows.append(row)
            for _ in range(self.given.pairs):
                command = [PYTHON, "-m", "tests.benchmarks.grid", count]
                row.samples.setdefault("ckptctl", []).append(run(command))
                bare = [PYTHON, "-m", "tests.benchmarks.grid", count, "--boxes-only"]
                row.samples.setdefault("imports", []).append(run(bare))


def markdown(rows: Sequence[Row]) -> str:
    """Return one table: whole processes, then what one more GB costs."""
    head = (
        *("what", "GB", "who", "wall s: median (min–max)", "CPU s", "× cp", "ckptctl is faster by"),
        *("s per additional GB", "faster by", "peak RSS MB", "beyond imports", "runs"),
    )
    return table(head, _lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    small: dict[str, Row] = {}
    for row in rows:
        before = small.setdefault(row.name, row)
        for who, samples in row.samples.items():
            if who == "imports" and "cp" in row.samples:
                continue
            beyond, mine = row.beyond(who), slope(before, row, "ckptctl")
            theirs = slope(before, row, who)
            other = who not in ("ckptctl", "imports")
            yield (
                row.name,
                f"{row.nbytes / 1e9:.2f}",
                who,
                spread(row.walls(who)),
                spread([sample.cpu for sample in samples]),
                _times(ratio(row.walls(who), row.walls("cp"))) + _limit(row, who),
                _times(ratio(row.walls(who), row.walls("ckptctl"))) if other else "–",
                "–" if theirs is None else f"{theirs:.3f}",
                _times(theirs / mine) if theirs and mine and other else "–",
                f"{max(sample.rss for sample in samples) / 1e6:.0f}",
                "–" if beyond is None or who != "ckptctl" else f"{beyond:.0f}",
                len(samples),
            )


def _limit(row: Row, who: str) -> str:
    form = BY_NAME.get(row.name)
    return f" (≤ {form.limit})" if form and who == "ckptctl" else ""


def slope(small: Row, large: Row, who: str) -> float | None:
    """Return seconds per additional GB, from the medians; None: there is one size."""
    extra = (large.nbytes - small.nbytes) / 1e9
    if extra <= 0 or not small.walls(who) or not large.walls(who):
        return None
    return (statistics.median(large.walls(who)) - statistics.median(small.walls(who))) / extra


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return 1 if a process failed."""
    given = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=given.where) as folder:
        bench = Bench(given, Path(folder))
        pages = int(3.5 * max(given.size or [1_000_000_000]))
        with pool(Path(folder), pages) if given.pages else nullcontext():
            try:
                bench.all()
            finally:
                bench.say()
    return 1 if bench.failures else 0


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in (*BY_NAME, *EXTRAS)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join((*BY_NAME, *EXTRAS))}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.consolidate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", type=parse_bytes, action="append", help="bytes of the result; repeat for slopes")
    add("--where", type=Path, default=Path("/dev/shm"), help="scratch (default /dev/shm)")
    add("--only", type=_names, help=f"by comma: {', '.join((*BY_NAME, *EXTRAS))}")
    add("--pairs", type=int, default=5, help="rounds (default 5)")
    add("--peers", action="store_true", help="the peers as well")
    add("--peer-pairs", type=int, default=3, help="rounds that they take part in (default 3)")
    add("--trainers", default=PYTHON, help="a Python with deepspeed and the like")
    add("--no-pages", dest="pages", action="store_false", help="do not hold memory at hand")
    add("--json", type=Path, help="file for every sample")
    return parser


if __name__ == "__main__":
    sys.exit(main())
