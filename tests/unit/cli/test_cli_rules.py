"""``--rules``: how ranks divide tensors, on every command that reads."""

import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "data" / "megatron" / "tp2_ep2" / "ckpt"
RULES = ("--rules", "megatron-core")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_reading_megatron_requires_rules(run, command):
    result = run(command, str(SOURCE), *RULES, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["format"] == "megatron"
    asked = run(command, str(SOURCE))
    assert asked.exit_code == 5
    assert "--rules megatron-core" in asked.stderr


@pytest.mark.parametrize(
    "arguments", [("convert", "--to", "dcp"), ("consolidate",)], ids=lambda found: found[0]
)
def test_rules_option_enables_convert_and_consolidate(run, tmp_path, arguments):
    command, *options = arguments
    result = run(command, str(SOURCE), str(tmp_path / "out"), *options, *RULES, "-q")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out").is_dir()


def test_rules_option_is_refused_for_other_formats(run, tmp_path):
    result = run("inspect", str(SOURCE.parents[2] / "dcp" / "dcp2" / "ckpt"), *RULES)
    assert result.exit_code == 2
    assert "`--rules` is not supported" in result.stderr


def test_missing_rules_file_exits_3(run):
    result = run("inspect", str(SOURCE), "--rules", "mine.toml")
    assert result.exit_code == 3
    assert "mine.toml" in result.stderr
