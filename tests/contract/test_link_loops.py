"""A link that leads to itself, in place of any file and in any folder: an answer, never a bug."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import app
from tests.runs import save_step
from tests.sweeps import one_in

DATA = Path(__file__).parents[1] / "data"
BUG = 70
SAMPLES = {
    "hf": None,
    "dcp": DATA / "dcp/torchtitan/steps/ckpt/checkpoint/step-8",
    "bytecheckpoint": DATA / "wrappers/bytecheckpoint/ckpt/global_step_1",
    "torchsnapshot": DATA / "wrappers/torchsnapshot/ckpt/snap",
}
LOOP = "loop"
FOLDERS = 2


@pytest.fixture(params=one_in(3, SAMPLES))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a run of two equal checkpoints."""
    for step in (1, 2):
        path, source = tmp_path / "run" / f"step-{step}", SAMPLES[request.param]
        if source is None:
            save_step(path, files=2)
        else:
            shutil.copytree(source, path)
    return tmp_path / "run"


def commands(run: Path, one: Path) -> list[list[str]]:
    return [
        ["ls", str(run)],
        ["latest", str(run)],
        ["prune", str(run), "--keep-last", "1", "--include-incomplete", "--force", "--dry-run"],
        ["inspect", str(one)],
        ["verify", str(one)],
        ["convert", str(one), str(run / "out"), "--to", "dcp", "--dry-run"],
        ["diff", str(one), str(run / "step-1")],
    ]


def answers(run: Path, one: Path) -> dict[str, int]:
    return {words[0]: CliRunner().invoke(app, words).exit_code for words in commands(run, one)}


@pytest.mark.slow
def test_symlink_loop_replacing_file_causes_no_internal_error(run: Path) -> None:
    one = run / "step-2"
    for file in sorted(item for item in one.rglob("*") if item.is_file()):
        data = file.read_bytes()
        file.unlink()
        file.symlink_to(file.name)
        inside = one if file.parent == one or not (one / "model").is_dir() else file.parent
        found = answers(run, inside)
        assert BUG not in found.values(), f"{file.relative_to(run)}: {found}"
        file.unlink()
        file.write_bytes(data)


def test_symlink_loop_in_folder_causes_no_internal_error(run: Path) -> None:
    one = run / "step-2"
    inside = [item for item in sorted(one.rglob("*")) if item.is_dir()]
    for folder in (run, one, *inside[:FOLDERS]):
        (folder / LOOP).symlink_to(LOOP)
        assert BUG not in answers(run, one).values(), folder
        (folder / LOOP).unlink()


def test_symlink_loop_as_path_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / LOOP
    loop.symlink_to(LOOP)
    found = answers(loop, loop)
    assert set(found.values()) <= {2, 3, 6}, found
