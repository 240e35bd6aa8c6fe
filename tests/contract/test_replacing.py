"""What ``--overwrite`` throws away, over random destinations: what is a checkpoint's, no more.

The oracle knows how each destination was made: somebody's own files stay, at their place and with
their content, or nothing changes at all.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import build_program
from tests.runs import save_step, tear
from tests.sweeps import one_in

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = 6
COMMANDS = {
    "convert": ("{hf}", "{out}", "--to", "hf"),
    "convert to dcp": ("{hf}", "{out}", "--to", "dcp"),
    "convert to a file": ("{hf}", "{out}.pt", "--to", "torch"),
    "consolidate": ("{ranks}", "{out}"),
    "merge": ("{base}", "{adapter}", "{out}"),
    "extract": ("{hf}", "model.norm.weight", "-o", "{out}.safetensors"),
    "report": ("{hf}", "-o", "{out}.html"),
}
FOREIGN: Mapping[str, str] = {
    "notes.txt": "x",
    "train.py": "import this",
    "results.csv": "1,2",
    "run.log": "x",
    "id_rsa": "x",
    "plot.png": "x",
    "src/main.py": "x",
    "runs/events": "x",
    "thesis.tex": "x",
}
"""What somebody may have put beside weights, and no program that knows models did."""
OWN = ("README.md", "LICENSE", "tokenizer.json", "generation_config.json", "SHA256SUMS")
"""What travels with a model, or is made for it."""
TRIES = 12


@pytest.mark.parametrize("command", one_in(3, COMMANDS))
def test_overwrite_replaces_only_checkpoints(
    places: dict[str, Path], tmp_path: Path, command: str
) -> None:
    draw = random.Random(command)
    for number in range(TRIES):
        check(places, tmp_path / str(number), command, draw)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_overwrite_replaces_only_checkpoints_in_many_trials(
    places: dict[str, Path], tmp_path: Path, command: str
) -> None:
    draw = random.Random(f"many {command}")
    for number in range(20 * TRIES):
        check(places, tmp_path / str(number), command, draw)


def check(places: dict[str, Path], folder: Path, command: str, draw: random.Random) -> None:
    folder.mkdir()
    words = [word.format(out=folder / "out", **places) for word in COMMANDS[command]]
    target = next(Path(word) for word in words if word.startswith(str(folder)))
    foreign, replaceable = occupy(target, places, draw)
    (folder / "neighbor.txt").write_text("x")
    overwrite = draw.random() < 0.8
    before = snapshot(folder)
    name = command.partition(" ")[0]
    options = ["--overwrite"] if overwrite else []
    result = CliRunner().invoke(build_program(name), [name, *words, *options])
    after = snapshot(folder)
    case = f"{name} {' '.join([*words, *options])}\n{sorted(before)}\n{result.output}"
    assert {path: after.get(path) for path in foreign} == {p: before[p] for p in foreign}, case
    if result.exit_code == 0:
        assert overwrite or not before.keys() - {"neighbor.txt"}, case
        assert after != before, case
    else:
        assert (result.exit_code, after) == (REFUSED, before), case
    if overwrite and replaceable:
        assert result.exit_code == 0, case
    shutil.rmtree(folder)


def occupy(target: Path, places: dict[str, Path], draw: random.Random) -> tuple[set[str], bool]:
    """Put something at *target*; return the paths that have to stay, and whether it may go."""
    file = bool(target.suffix)
    kind = draw.choice(("nothing", "checkpoint", "torn", "stranger", "project", "link"))
    if kind == "stranger" and target.suffix == ".safetensors":
        kind = "link"  # what is named so is a checkpoint that is damaged, whatever it holds
    if kind == "nothing":
        return set(), True
    if kind == "link":
        save_step(target.parent / "behind")
        target.symlink_to("behind")
        return set(snapshot(target.parent)), False
    if kind == "stranger":
        target.write_text("somebody's own")
        return {target.name}, False
    if file:
        target.mkdir()
        (target / "thesis.tex").write_text("x")
        return set(snapshot(target.parent)), False
    if kind == "project":
        target.mkdir()
        put(target, draw, 1)
        return set(snapshot(target.parent)), False
    if draw.random() < 0.4:
        shutil.copytree(places["hf"], target)
    else:
        save_step(target, files=draw.randint(1, 2))
    if kind == "torn":
        tear(target)
    for name in draw.sample(OWN, draw.randint(0, 3)):
        (target / name).write_text("{}")
    foreign = put(target, draw, draw.choice((0, 0, 1, 2)))
    return foreign, not foreign


def put(folder: Path, draw: random.Random, count: int) -> set[str]:
    """Add somebody's own files; return their paths, relative to what *folder* lies in."""
    names = draw.sample(sorted(FOREIGN), count)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(FOREIGN[name])
    return {f"{folder.name}/{name}" for name in names}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): content for path, content in _files(folder)}


def _files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_symlink():
            yield path, str(path.readlink()).encode()
        elif path.is_file():
            yield path, path.read_bytes()
