"""Two whole conversions at once: one destination, and one that reads what the other replaces.

Both processes have imported everything before either begins. What they leave is read by
safetensors and torch; every weight of a source is one number, so a mixture would show.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckptctl.storage.publish import stage_output
from tests.checkpoints import load_any_reference, save_hf, tiny_llama

ROOT = Path(__file__).parents[2]
STATE, CONFIG = tiny_llama("llama3", hidden=256, vocab=8192, ffn=768)
ONE, TWO = 1.0, 2.0
DIRECTIONS = [("dcp", "out"), ("torch", "out.pt"), ("hf", "out"), ("meta", "out")]
RUNS = 10
FEW = 2
"""One for each of the directions."""
WAITING = """
import importlib, sys
import ckptctl.__main__
for name in (
    "cli.app",
    "cli.convert",
    "conversion.convert",
    "storage.execution.executor",
    "storage.publish",
):
    importlib.import_module("ckptctl." + name)
print("ready", flush=True)
sys.stdin.read()
ckptctl.__main__.main()
"""


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        pid: Its number.
        code: Its exit code.
        error: What it said, if it failed.
    """

    pid: int
    code: int
    error: dict[str, str]

    @property
    def said(self) -> str:
        return " ".join(filter(None, map(str, self.error.values())))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """Two checkpoints of one shape, in one of which every weight is 1, in the other 2."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        value: save_hf(
            folder / f"of-{value:.0f}",
            {name: torch.full_like(one, value) for name, one in STATE.items()},
            CONFIG,
            shards=4,
        )
        for value in (ONE, TWO)
    }


def at_once(*lines: Sequence[object]) -> list[Ended]:
    """Run the program with each of *lines* at once; return how they ended."""
    reading, writing = os.pipe()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, *map(str, line), "--json"],
            cwd=ROOT,
            stdin=reading,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in lines
    ]
    os.close(reading)
    for one in running:
        assert one.stdout and one.stdout.readline() == "ready\n"
    os.close(writing)
    ended = []
    for one in running:
        _, said = one.communicate(timeout=60)
        error = json.loads(said)["error"] if one.returncode else {}
        ended.append(Ended(one.pid, one.returncode, error))
    return ended


def value_of(path: Path) -> float:
    """Return the number that every weight of a checkpoint is, as stock readers have it."""
    if path.is_dir() and (path / "params.json").exists():
        held = torch.load(path / "consolidated.00.pth", weights_only=True)
        held.pop("rope.freqs", None)
    else:
        held = load_any_reference(path)
    assert len(held) == len(STATE), sorted(held)
    found = {float(end) for one in held.values() for end in one.aminmax()}
    assert len(found) == 1, found
    return found.pop()


def left(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("runs", [FEW, pytest.param(RUNS, marks=pytest.mark.slow)])
def test_concurrent_converts_to_same_destination_have_one_winner(
    sources: dict[float, Path], tmp_path: Path, runs: int
) -> None:
    for number in range(runs):
        to, name = DIRECTIONS[number % len(DIRECTIONS)]
        folder = tmp_path / str(number)
        folder.mkdir()
        target = folder / name
        ended = at_once(*(["convert", source, target, "--to", to] for source in sources.values()))
        assert sorted(one.code for one in ended) == [0, 6], ended
        lost = next(one for one in ended if one.code)
        won = next(one for one in ended if not one.code)
        assert lost.error["where"] == str(target)
        if "exists" not in lost.said:
            assert f"another process is writing to this destination (PID {won.pid})" in lost.said
        value = value_of(target)
        assert value in sources
        assert left(folder) == [name]


def test_convert_to_locked_destination_fails_immediately(
    sources: dict[float, Path], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    with stage_output(target):
        (lost,) = at_once(["convert", sources[ONE], target, "--to", "dcp"])
        assert lost.code == 6
        assert f"another process is writing to this destination (PID {os.getpid()})" in lost.said
    assert left(tmp_path) == []


@pytest.mark.slow
def test_concurrent_overwrites_leave_one_complete_checkpoint(
    sources: dict[float, Path], tmp_path: Path
) -> None:
    """One after the other or not at all: the last that succeeded is what is there, alone."""
    target = tmp_path / "out"
    save_hf(target, {name: torch.zeros_like(one) for name, one in STATE.items()}, CONFIG)
    lines = {
        value: ["convert", source, target, "--to", "dcp", "--overwrite"]
        for value, source in sources.items()
    }
    for _ in range(3):
        ended = at_once(*lines.values())
        codes = [one.code for one in ended]
        assert set(codes) <= {0, 6} and 0 in codes, ended
        for lost in (one for one in ended if one.code):
            # The destination may be replaced while a run looks whether it may replace it.
            assert re.search(
                r"another process is .* \(PID \d+\)|contains more than a checkpoint", lost.said
            )
        assert value_of(target) in sources
        assert left(tmp_path) == ["out"]


@pytest.mark.slow
def test_source_replaced_by_concurrent_convert_is_never_mixed(
    sources: dict[float, Path], tmp_path: Path
) -> None:
    """What is read is all of the old one or all of the new one, or the run says that it changed."""
    middle, target = tmp_path / "middle", tmp_path / "out"
    save_hf(middle, {name: torch.zeros_like(one) for name, one in STATE.items()}, CONFIG, shards=4)
    old = 0.0
    for number in range(3):
        value = (ONE, TWO)[number % 2]
        ended = at_once(
            ["convert", sources[value], middle, "--to", "hf", "--overwrite"],
            ["convert", middle, target, "--to", "dcp", "--overwrite"],
        )
        failed = [one for one in ended if one.code]
        assert value_of(middle) == value, ended
        assert len(failed) <= 1
        if failed:
            assert failed[0].code == 8, failed
        else:
            assert value_of(target) in (old, value)
        assert set(left(tmp_path)) <= {"middle", "out"}
        old = value
