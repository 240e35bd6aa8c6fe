"""``ckptctl consolidate``, on what trainers wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ckptctl.errors import UsageError

DATA = Path(__file__).parents[2] / "data"
RANKS = DATA / "dcp-rank-local" / "w2" / "ckpt"
ZERO = DATA / "deepspeed" / "z3_fp32" / "ckpt"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    copy = tmp_path / "ranks"
    shutil.copytree(RANKS, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy


def test_consolidate_writes_safetensors_by_default(run, tmp_path):
    result = run("consolidate", str(ZERO), str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert "deepspeed → hf" in result.stderr
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_consolidate_with_optimizer_writes_dcp(run, tmp_path):
    result = run("consolidate", str(ZERO), str(tmp_path / "out"), "--optimizer", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "ckptctl.consolidate/1" and document["to_format"] == "dcp"
    assert (tmp_path / "out" / ".metadata").is_file()


@pytest.fixture
def torn(ranks: Path) -> Path:
    """Return a directory of which rank 1's data is missing."""
    (ranks / "__1_0.distcp").unlink()
    return ranks


def test_allow_missing_lists_missing_tensors_and_exits_7(run, torn, tmp_path):
    target = str(tmp_path / "out")
    assert run("consolidate", str(torn), target).exit_code == 4
    result = run("consolidate", str(torn), target, "--allow-missing")
    assert result.exit_code == 7
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    missing = {row[1]: row[2] for row in rows if row[0] == "missing"}
    assert "model.l1.weight" in missing and all("__1_0.distcp" in why for why in missing.values())
    assert (
        f"error: the source is incomplete: {len(missing)} tensors are missing in `{target}`"
        in result.stderr
    )
    written = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert written and not {name.removeprefix("model.") for name in missing} & written


def test_missing_tensors_error_precedes_notes(run, torn, tmp_path):
    result = run("consolidate", str(torn), str(tmp_path / "out"), "--allow-missing")
    labels = [line.partition(":")[0] for line in result.stderr.splitlines()]
    assert labels.index("error") < labels.index("note") and labels.count("error") == 1


@pytest.mark.parametrize("dry", [True, False])
def test_missing_tensors_are_listed_in_json(run, torn, tmp_path, dry):
    arguments = ["--allow-missing", "--json", *(["--dry-run"] if dry else [])]
    result = run("consolidate", str(torn), str(tmp_path / "out"), *arguments)
    assert result.exit_code == 7
    document, error = json.loads(result.stdout), json.loads(result.stderr)["error"]
    assert document["dry_run"] is dry and "model.l1.weight" in document["missing"]
    assert (error["code"], error["exit_code"]) == ("partial", 7)
    assert (tmp_path / "out").exists() is not dry


def test_complete_source_with_allow_missing_exits_0(run, ranks, tmp_path):
    flags = ("--allow-missing", "--verify-replicas", "--tied", "drop")
    result = run("consolidate", str(ranks), str(tmp_path / "out"), *flags, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["missing"] == {}


def test_consolidate_options_reach_plan(run, ranks, tmp_path, monkeypatch):
    seen = []

    def planned(src, dst, options):
        seen.append(options)
        raise UsageError("enough")

    monkeypatch.setattr("ckptctl.conversion.convert.plan_conversion", planned)
    flags = ("--allow-missing", "--verify-replicas", "--tied", "copy")
    assert run("consolidate", str(ranks), str(tmp_path / "out"), *flags).exit_code == 2
    assert run("consolidate", str(ranks), str(tmp_path / "out")).exit_code == 2
    chosen = [(o.allow_missing, o.verify_replicas, o.tied) for o in seen]
    assert chosen == [(True, True, "copy"), (False, False, None)]


def test_metadata_only_writes_only_metadata_file(run, ranks):
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
        ([str(ZERO)], "missing argument DST"),
        ([str(ZERO), "out", "--metadata-only"], "DST conflicts with"),
        ([str(RANKS), "--metadata-only", "-n", "--optimizer"], "`--optimizer` is not supported"),
        ([str(RANKS), "--metadata-only", "-n", "--max-shard-size", "5GB"], "is not supported"),
        ([str(ZERO), "out", "--weights", "both"], "known: master, module"),
        ([str(ZERO), "out", "--tied", "both"], "known: drop, copy"),
        ([str(RANKS), "out", "--weights", "master"], "is not supported for"),
    ],
)
def test_invalid_consolidate_arguments_are_usage_errors(run, arguments, said):
    result = run("consolidate", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
