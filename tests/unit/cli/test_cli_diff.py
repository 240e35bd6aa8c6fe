"""The commands ``diff`` and ``extract``: what they print, and their exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import DATA
from tests.contract.test_docs import documented_fields, fields_of


@pytest.fixture
def pair(tmp_path):
    a = {"x": torch.arange(12.0).view(3, 4), "y": torch.ones(2), "z": torch.ones(1)}
    b = {"x": a["x"].clone(), "y": torch.ones(2).half(), "w\x1b[31m": torch.ones(1)}
    b["x"][1, 2] = 8.0
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({**a, "step": 1, "lr": 0.5}, paths[0])
    torch.save({**b, "step": 2, "seed": 7}, paths[1])
    return paths


def test_diff_in_pipe_lists_every_difference(run, pair):
    result = run("diff", *pair)
    assert result.exit_code == 1, result.stderr
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert ["only_a", "z"] in rows and ["only_leaf_a", "lr"] in rows
    assert ["only_leaf_b", "seed"] in rows and ["leaf", "step", "1", "2"] in rows
    assert ["tensor", "x", "values", "1 of 12", "0", "2.0", "0.25", "[1, 2]"] in rows
    assert ["tensor", "y", "dtype float32 float16", "0 of 2", "", "", "", ""] in rows
    assert ["same", "no"] in rows
    assert "\x1b" not in result.output


def test_identical_checkpoints_exit_0(run, pair):
    result = run("diff", pair[0], pair[0])
    assert result.exit_code == 0
    assert ["same", "yes"] in [line.split("\t") for line in result.stdout.splitlines()]
    assert run("diff", pair[0], pair[0], "-q").stdout == ""


def test_quiet_diff_prints_differing_names(run, pair):
    result = run("diff", *pair, "-q")
    assert result.exit_code == 1
    assert {"x", "y", "z", "step", "lr", "seed"} <= set(result.stdout.splitlines())


def test_diff_on_terminal_prints_counts_and_only_hint(run, pair, monkeypatch):
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    result = run("diff", *pair, NO_COLOR="1")
    assert result.exit_code == 1
    assert "2 tensors differ, 1 non-tensor value differs, 2 only in A, 2 only in B" in " ".join(
        result.stdout.split()
    )
    assert "--only model" in result.output
    result = run("diff", *pair, "--only", "model", NO_COLOR="1")
    said = [line for line in result.stdout.splitlines() if "not compared" in line]
    assert said == [
        "  not compared in A, not part of the model: `step`",
        "  not compared in B, not part of the model: `step`",
    ]


def test_diff_on_terminal_groups_and_caps_rows(run, tmp_path, monkeypatch):
    """Rows are grouped by what differs, which is said once."""
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    monkeypatch.setattr("ckptctl.cli.output._count_columns", lambda: 200)
    a = {f"w{n}": torch.full((2,), float(n)) for n in range(12)}
    b = {name: (value + 1).bfloat16() for name, value in a.items()}
    save_file({**a, "v": torch.zeros(2), "s": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({**b, "v": torch.ones(2), "s": torch.ones(3)}, tmp_path / "b.safetensors")
    shown = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", NO_COLOR="1").stdout
    assert shown.count("bfloat16") == 1
    assert "12 tensors differ in dtype (float32, bfloat16) and values\n" in shown
    assert "1 tensor differs in values\n" in shown and "1 tensor differs in shape\n" in shown
    assert "  and 2 more (`--json` lists all)\n" in shown and "[2] [3]" in shown
    assert shown.index("compared: 14 tensors") < shown.index("tensors differ in")


def test_diff_and_extract_json_fields_are_documented(run, pair):
    result = run("diff", *pair, "--json")
    assert result.exit_code == 1
    found = set(fields_of(json.loads(result.stdout)))
    left_out = {"a.left_out.*", "b.left_out.*"}
    assert found | left_out == documented_fields("json.md", "ckptctl.diff/1")
    shown = json.loads(run("extract", pair[0], "x", "--json").stdout)
    counts = {f"out_of_range.*{one}" for one in ("", ".infinite", ".nan", ".saturated")}
    assert set(fields_of(shown)) | counts == documented_fields("json.md", "ckptctl.extract/1")


@pytest.mark.parametrize("option", [["--atol", "-1"], ["--rtol", "nan"], ["--only", "some"]])
def test_invalid_diff_options_are_usage_errors(run, pair, option):
    assert run("diff", *pair, *option).exit_code == 2


@pytest.mark.parametrize("options", [["--structure"], ["--ignore-dtype"], ["--atol", "9"]])
def test_diff_options_make_checkpoints_equal(run, tmp_path, options):
    save_file({"x": torch.ones(3), "y": torch.ones(2)}, tmp_path / "a.safetensors")
    other = {"--structure": torch.zeros(3), "--ignore-dtype": torch.ones(3).half()}
    value = other.get(options[0], torch.full((3,), 5.0))
    save_file({"x": value, "y": torch.ones(2)}, tmp_path / "b.safetensors")
    both = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert run("diff", *both).exit_code == 1
    assert run("diff", *both, *options).exit_code == 0
    assert run("diff", *both, "--include", "y").exit_code == 0
    assert run("diff", *both, "--exclude", "x").exit_code == 0


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--weights-a", "module", "--weights-b", "module"], 0, ""),
        (["--weights-a", "module"], 1, ""),
        (["--weights-b", "module"], 1, ""),
        (["--weights-a", "both"], 2, "known: master, module"),
        (["--tag-a", "global_step2"], 0, ""),
        (["--tag-a", "nowhere"], 2, "unknown tag `nowhere`"),
        (["--tag-b", "nowhere"], 2, "unknown tag `nowhere`"),
        (["--root-a", "module.", "--root-b", "module."], 0, ""),
        (["--root-a", "nowhere."], 2, "prefix `nowhere.`"),
        (["--root-b", "nowhere."], 2, "prefix `nowhere.`"),
        (["--rules", "megatron-core"], 2, "`--rules` is not supported"),
        (["--dequantize", "bf16"], 2, "quantized"),
        (["--dequantize", "int4"], 2, "int4"),
    ],
)
def test_reader_options_of_each_side_are_applied(run, options, code, said):
    source = DATA / "deepspeed" / "z1_bf16" / "ckpt"
    result = run("diff", source, source, "--only", "model", *options)
    assert result.exit_code == code, result.output
    assert said in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--weights", "module"], 0, "bfloat16"),
        (["--weights", "master"], 0, "float32"),
        (["--tag", "global_step2"], 0, "float32"),
        (["--tag", "nowhere"], 2, "unknown tag `nowhere`"),
        (["--rules", "megatron-core"], 2, "`--rules` is not supported"),
        (["--dequantize", "bf16"], 2, "quantized"),
    ],
)
def test_extract_applies_reader_options(run, options, code, said):
    source = DATA / "deepspeed" / "z1_bf16" / "ckpt"
    result = run("extract", source, "module.fc1.weight", *options)
    assert result.exit_code == code, result.output
    assert said in result.output


def test_missing_paths_exit_3_and_missing_tensor_exits_5(run, pair, tmp_path):
    assert run("diff", pair[0], tmp_path / "nothing").exit_code == 3
    assert run("extract", tmp_path / "nothing", "x").exit_code == 3
    result = run("extract", pair[0], "nothing", "--json")
    assert result.exit_code == 5 and not result.stdout
    assert json.loads(result.stderr)["error"]["code"] == "mapping"


def test_extract_writes_file_or_prints_values(run, pair, tmp_path):
    target = tmp_path / "x.safetensors"
    result = run("extract", pair[0], "x[1]", "-o", target)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[0] == "tensor\tx\tfloat32\t[4] of [3, 4]\t16"
    assert run("extract", pair[0], "x", "-o", target).exit_code == 6
    assert run("extract", pair[0], "x", "-o", target, "--overwrite", "-q").stdout == f"{target}\n"
    shown = run("extract", pair[0], "x", "--slice", "[0:1]", "--dtype", "fp16").stdout
    assert shown.splitlines() == ["tensor\tx\tfloat16\t[1, 4] of [3, 4]\t8", "[[0 1 2 3]]"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tag-a", "x"], "`--tag-a` is not supported"),
        (["--tag-b", "x"], "`--tag-b` is not supported"),
        (["--weights-b", "module"], "`--weights-b` is not supported"),
        (["--root-a", "modle"], "did you mean `--root-a model`?"),
        (["--root-b", "modle"], "did you mean `--root-b model`?"),
    ],
)
def test_diff_errors_name_option_of_side(run, tmp_path, options, said):
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, path)
    result = run("diff", path, path, *options)
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize(("place", "option"), [(0, "--format-a"), (1, "--format-b")])
def test_diff_hints_name_option_of_side(run, pair, tmp_path, place, option):
    sides = [pair[0], pair[0]]
    sides[place] = tmp_path / "empty"
    sides[place].mkdir()
    result = run("diff", *sides)
    assert result.exit_code == 3 and f"set the format with `{option}`" in result.stderr
    assert "--from" not in result.stderr


def test_equal_values_of_different_dtype_are_reported(run, tmp_path, monkeypatch):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x": torch.ones(3)}, a)
    save_file({"x": torch.ones(3).half()}, b)
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    result = run("diff", a, b, NO_COLOR="1")
    assert "0 of 3" in result.stdout
    assert "equal numbers, different dtype: 1 tensor" in result.stdout
    assert "hint: pass `--ignore-dtype`" in result.stderr
    result = run("diff", a, b, "--structure", NO_COLOR="1")
    assert "0 of 3" not in result.stdout and "--ignore-dtype" not in result.stderr


def test_diff_in_pipe_prints_all_digits(run, tmp_path, monkeypatch):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x": torch.tensor([1.0], dtype=torch.float64)}, a)
    save_file({"x": torch.tensor([1.0 + 1 / 3], dtype=torch.float64)}, b)
    row = run("diff", a, b, "--no-header").stdout.splitlines()[0].split("\t")
    assert float(row[5]) == (1.0 + 1 / 3) - 1.0
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    assert "0.333 " in run("diff", a, b, NO_COLOR="1").stdout
