"""What ``merge`` says and passes on; what it does is tested with the operation."""

import json
from pathlib import Path

import pytest

from ckptctl.conversion.recognition.lacking import UNKNOWN_ADAPTER
from tests.checkpoints import differences, load_any_reference, save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.contract.test_docs import documented_fields, fields_of

STATE, CONFIG = tiny_llama("llama3")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_hf(tmp_path / "base", STATE, CONFIG)
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_peft(tmp_path / "adapter", random_adapter(STATE))


def test_merge_reports_adapter_and_changed_tensors(run, base, adapter, tmp_path):
    result = run("merge", base, adapter, tmp_path / "out", "--verify")
    assert result.exit_code == 0, result.output
    assert "adapter peft, layout peft · 14 tensors changed (scale 2)\n" in result.stderr
    assert "verified" in result.stdout or "verified\tyes" in result.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_dry_run_writes_nothing(run, base, adapter, tmp_path):
    before = sorted(tmp_path.iterdir())
    result = run("merge", base, adapter, tmp_path / "out", "-n", "--to", "dcp")
    assert result.exit_code == 0 and sorted(tmp_path.iterdir()) == before


def test_merge_json_fields_are_documented(run, base, adapter, tmp_path):
    result = run("merge", base, adapter, tmp_path / "out", "--json")
    found = json.loads(result.stdout)
    assert found["schema"] == "ckptctl.merge/1"
    assert (found["adapter"], found["merged"], found["scales"]) == (str(adapter), 14, [2.0])
    known = documented_fields("json.md", "ckptctl.merge/1")
    conversion = documented_fields("json.md", "ckptctl.convert/1")
    assert known <= set(fields_of(found)) <= known | conversion


def test_merge_errors_set_exit_codes(run, base, adapter, tmp_path):
    assert run("merge", base, base, tmp_path / "out").exit_code == 5
    assert run("merge", base, tmp_path / "nothing", tmp_path / "out").exit_code == 3
    assert run("merge", base, adapter, tmp_path / "out", "--lora-alpha", "-1").exit_code == 2
    assert run("merge", base, adapter, tmp_path / "out", "--lora-alpha", "9").exit_code == 2
    assert run("merge", base, adapter, tmp_path / "out", "--to", "nothing").exit_code == 2
    assert run("merge", base, adapter, base).exit_code != 0
    assert not (tmp_path / "out").exists()


def test_inspect_recognizes_adapter(run, adapter):
    found = json.loads(run("inspect", adapter, "--json").stdout)
    assert (found["format"], found["layout"]) == ("peft", "peft")
    assert (found["verdict"], found["complete"], found["scope"]) == ("complete", None, "structure")
    assert UNKNOWN_ADAPTER in found["notes"]
    assert any(name.endswith("-lora") for name in found["candidates"])


def test_convert_roundtrips_adapter_through_torchtune(run, base, adapter, tmp_path):
    options = ["--assets", base, "--to-layout", "torchtune"]
    result = run("convert", adapter, tmp_path / "tune.pt", "--to", "torch", *options)
    assert result.exit_code == 0, result.output
    assert "rank (4) and alpha (8)" in result.stderr
    options = ["--assets", base, "--lora-alpha", "8", "--json"]
    result = run("convert", tmp_path / "tune.pt", tmp_path / "peft", "--to", "peft", *options)
    assert result.exit_code == 0, result.output
    assert {file["path"] for file in json.loads(result.stdout)["files"]} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "ckptctl.manifest.json",
    }
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 8, 7)
    first, again = (
        load_any_reference(folder / "adapter_model.safetensors")
        for folder in (adapter, tmp_path / "peft")
    )
    assert not differences(again, first)
    result = run("convert", tmp_path / "tune.pt", tmp_path / "more", "--to", "peft", *options[:2])
    assert result.exit_code == 2 and "--lora-alpha" in result.stderr


def test_converting_model_to_peft_is_a_usage_error(run, base, tmp_path):
    result = run("convert", base, tmp_path / "out", "--to", "peft")
    assert result.exit_code == 2 and "the `peft` format only stores adapters" in result.stderr


@pytest.mark.parametrize("target", ["hf", "dcp"])
def test_lora_alpha_for_a_model_is_a_usage_error(run, base, tmp_path, target):
    result = run("convert", base, tmp_path / "out", "--to", target, "--lora-alpha", "3")
    assert result.exit_code == 2 and "`--lora-alpha` only applies to adapters" in result.stderr
    assert "no lora_A/lora_B tensors found" in result.stderr
    assert not (tmp_path / "out").exists()


def test_lora_alpha_that_equals_the_configured_one_is_accepted(run, base, adapter, tmp_path):
    result = run("merge", base, adapter, tmp_path / "out", "--lora-alpha", "8")
    assert result.exit_code == 0 and "(scale 2)" in result.stderr
