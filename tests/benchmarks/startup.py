"""What a whole process costs before there is anything to copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.benchmarks.directions import Direction, Setting
from tests.benchmarks.measure import PYTHON, REPOSITORY, TOOL, Sample, in_turn, run
from tests.benchmarks.report import spread, table
from tests.benchmarks.workspace import discard, nbytes

TINY = REPOSITORY / "tests" / "data" / "tiny-llama3-hf"


def measure(
    folder: Path, runs: int, setting: Setting, directions: Iterable[Direction]
) -> dict[str, list[Sample]]:
    """Return samples of *directions* on the tiny model, and of commands that answer at once.

    Args:
        folder: Scratch.
        runs: How often each.
        setting: Disk or tmpfs, threads.
        directions: Those without a tiny source are left out.
    """
    sources = _sources(folder)
    commands = _commands(folder)
    for direction in directions:
        if direction.source in sources and direction.options.get("mp") != 8:  # it has 4 heads
            keywords = direction.keywords(TINY, nbytes(TINY), setting.jobs)
            command = direction.command(sources[direction.source], folder / "out", keywords)
            commands[direction.name] = command
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for turn in range(runs):
        for name, command in in_turn(commands.items(), turn):
            samples[name].append(run(command))
            discard(folder / "out")
    return samples


def markdown(samples: Mapping[str, list[Sample]]) -> str:
    """Return the table of wall time, CPU time and peak RSS."""
    rows = [
        (
            name,
            spread([sample.wall for sample in runs]),
            spread([sample.cpu for sample in runs]),
            f"{max(sample.rss for sample in runs) / 1e6:.0f}",
        )
        for name, runs in samples.items()
    ]
    return table(("whole process", "wall s", "CPU s", "peak RSS MB"), rows)


def _sources(folder: Path) -> dict[str, Path]:
    folder.mkdir()
    sources = {"hf": TINY}
    making = {"dcp": ("dcp",), "torch": ("torch",), "meta1": ("meta",), "meta2": ("meta", "2")}
    for kind, (to, *shards) in making.items():
        target = folder / (kind + (".pt" if to == "torch" else ""))
        mp = ["--mp", *shards] if shards else []
        convert = [*TOOL, "convert", str(TINY), str(target), "--to", to]
        run([*convert, *mp, "-q"])
        sources[kind] = target
    saves = folder / "run"
    saves.mkdir()
    sources["dcp"].rename(saves / "step-1")
    return {**sources, "dcp": saves / "step-1"}


def _commands(folder: Path) -> dict[str, list[str]]:
    tiny, saves, target = str(TINY), str(folder / "run"), str(folder / "out")
    return {
        "python -c pass": [PYTHON, "-c", "pass"],
        "--help": [*TOOL, "--help"],
        "convert --help": [*TOOL, "convert", "--help"],
        "inspect --json": [*TOOL, "inspect", tiny, "--json"],
        "ls": [*TOOL, "ls", saves],
        "latest": [*TOOL, "latest", saves],
        "verify --level fast": [*TOOL, "verify", tiny, "--level", "fast"],
        "python -c 'import torch'": [PYTHON, "-c", "import torch"],
        "convert --dtype fp32": [*TOOL, "convert", tiny, target, "--to", "hf", "--dtype", "fp32"],
    }
