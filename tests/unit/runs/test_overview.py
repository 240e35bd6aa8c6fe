"""Folders of checkpoints where one checkpoint was asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.errors import FormatError
from ckptctl.verbs.inspection.inspect import describe_run, inspect_checkpoint
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
from tests.runs import START, age, save_step, tear
from tests.unit.cli.conftest import run

__all__ = ["run"]
DCP = Path(__file__).parents[2] / "data" / "dcp" / "torchtitan" / "steps" / "ckpt" / "checkpoint"


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """Return a run of a whole checkpoint and a newer one that was killed before its index."""
    for step in (100, 200):
        shutil.copytree(DCP / "step-8", tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-200" / ".metadata").unlink()
    for step in (100, 200):
        age(tmp_path / "run" / f"step-{step}", START + step)
    return tmp_path / "run"


def test_newer_damaged_checkpoint_blocks_opening_run(torn):
    for look in (formats.open_checkpoint, lambda path: verify_checkpoint(path, VerifyOptions())):
        with pytest.raises(FormatError, match="newest checkpoint") as caught:
            look(torn)
        assert "`step-200` is not recognized as a checkpoint" in caught.value.why
        assert f"`ckptctl ls {torn}`" in caught.value.hint


def test_older_damaged_checkpoint_is_skipped_on_open(torn):
    (torn / "step-200").rename(torn / "step-99")
    assert formats.open_checkpoint(torn).notes[0].startswith("read from `step-100`")
    (torn / "step-100").rename(torn / "step-9")
    with pytest.raises(FormatError, match="newest checkpoint"):
        formats.open_checkpoint(torn)


@pytest.mark.parametrize("name", ["checkpoint-200", "logs", "step-200.txt", "step-x"])
def test_folder_outside_series_is_not_newer_checkpoint(torn, name):
    (torn / "step-200").rename(torn / name)
    assert formats.find_only_model_checkpoint(torn) == torn / "step-100"


def test_newer_damaged_lightning_file_blocks_opening_run(tmp_path):
    sample = Path(__file__).parents[2] / "data" / "wrappers" / "lightning_plain" / "ckpt"
    shutil.copy(sample / "epoch=0-step=3.ckpt", tmp_path)
    assert formats.find_only_model_checkpoint(tmp_path)
    (tmp_path / "epoch=1-step=5.ckpt").write_bytes(b"torn")
    with pytest.raises(FormatError, match="newest checkpoint"):
        formats.find_only_model_checkpoint(tmp_path)


def test_inspect_of_run_matches_ls(run, torn):
    (torn / "step-100.bak").mkdir()
    shutil.copytree(torn / "step-100", torn / "last")
    result = run("inspect", torn)
    assert result.exit_code == 0
    assert result.stdout == run("ls", torn).stdout
    assert result.stdout.count("`.metadata` is missing") == 1
    assert "warning: 1 of 2 checkpoints is not complete\n" in result.stderr
    assert ".metadata" not in result.stderr
    quiet = run("inspect", torn, "-q").stdout
    assert quiet == run("ls", torn, "-q").stdout
    found = json.loads(run("inspect", torn, "--json").stdout)
    assert [one["verdict"] for one in found["checkpoints"]] == ["complete", "damaged"]
    assert found["checkpoints"][1]["problems"] == ["`.metadata` is missing"]
    assert (found["format"], found["complete"]) == ("run", False)
    assert inspect_checkpoint(torn).to_json().items() <= found.items()


def test_inspect_lists_run_of_only_damaged_checkpoints(run, tmp_path):
    tear(save_step(tmp_path / "step-1"))
    result = run("inspect", tmp_path)
    assert (result.exit_code, result.stdout) == (0, run("ls", tmp_path).stdout)
    assert "damaged" in result.stdout


def test_damaged_checkpoint_is_not_a_run(run, tmp_path):
    path = tear(save_step(tmp_path / "step-1"))
    assert describe_run(path) is None
    result = run("inspect", path)
    assert result.stdout != run("ls", tmp_path).stdout


def test_overview_counts_tensors_per_checkpoint(tmp_path):
    save_step(tmp_path / "step-1", files=2)
    save_step(tmp_path / "step-2", files=3)
    found = describe_run(tmp_path)
    assert found and [one.tensors for one in found.checkpoints] == [2, 3]
