"""``ckptctl consolidate``, on what trainers wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

DATA = Path(__file__).parents[2] / "data"
RANKS = DATA / "dcp-rank-local" / "w2" / "ckpt"
ZERO = DATA / "deepspeed" / "z3_fp32" / "ckpt"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    copy = tmp_path / "ranks"
    shutil.copytree(RANKS, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy


def test_writes_safetensors_without_being_told(run, tmp_path):
    result = run("consolidate", str(ZERO), str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert "deepspeed → hf" in result.stderr
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_optimizer_goes_to_dcp(run, tmp_path):
    result = run("consolidate", str(ZERO), str(tmp_path / "out"), "--optimizer", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "ckptctl.consolidate/1" and document["to_format"] == "dcp"
    assert (tmp_path / "out" / ".metadata").is_file()


def test_metadata_only(run, ranks):
    before = {file.name for file in ranks.iterdir()}
    planned = run("consolidate", str(ranks), "--metadata-only", "--dry-run", "--json")
    assert json.loads(planned.stdout)["dry_run"] is True
    assert {file.name for file in ranks.iterdir()} == before
    done = run("consolidate", str(ranks), "--metadata-only", "-q")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{ranks / '.metadata'}\n"
    assert {file.name for file in ranks.iterdir()} == before | {".metadata"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(ZERO)], "DST is missing"),
        ([str(ZERO), "out", "--metadata-only"], "takes no DST"),
        ([str(ZERO), "out", "--weights", "both"], "neither"),
        ([str(RANKS), "out", "--weights", "master"], "no meaning"),
    ],
)
def test_what_cannot_be_meant(run, arguments, said):
    result = run("consolidate", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
