"""What a whole process costs before there is anything to copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.directions import BY_NAME, DEFAULT, PYTHON, Setting, ours
from tests.benchmarks.measure import REPOSITORY, Sample, run
from tests.benchmarks.report import spread, table
from tests.benchmarks.workspace import discard

TINY = REPOSITORY / "tests" / "data" / "tiny-llama3-hf"


def measure(folder: Path, runs: int, setting: Setting) -> dict[str, list[Sample]]:
    """Return samples of every direction on the tiny model, of ``inspect`` and of ``--help``.

    Args:
        folder: Scratch.
        runs: How often each.
        setting: Disk or tmpfs, threads.
    """
    commands = _commands(_sources(folder, setting), folder / "out", setting)
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
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


def _sources(folder: Path, setting: Setting) -> dict[str, Path]:
    folder.mkdir()
    sources = {"hf": TINY}
    making = {"dcp": ("dcp",), "torch": ("torch",), "meta1": ("meta",), "meta2": ("meta", "2")}
    for kind, (to, *shards) in making.items():
        target = folder / (kind + (".pt" if to == "torch" else ""))
        mp = ["--mp", *shards] if shards else []
        convert = [PYTHON, "-m", "ckptctl", "convert", str(TINY), str(target), "--to", to]
        run([*convert, *mp, "-q"])
        sources[kind] = target
    return sources


def _commands(sources: Mapping[str, Path], target: Path, setting: Setting) -> dict[str, list[str]]:
    tool = [PYTHON, "-m", "ckptctl"]
    found = {
        "python -c pass": [PYTHON, "-c", "pass"],
        "--help": [*tool, "--help"],
        "convert --help": [*tool, "convert", "--help"],
        "inspect (tiny hf)": [*tool, "inspect", str(TINY)],
    }
    for name in DEFAULT:
        direction = BY_NAME[name]
        found[name] = ours(direction, sources[direction.source], TINY, target, setting)
    return found
