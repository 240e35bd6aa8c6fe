"""The command ``extract``: names that are no tensor's, slices, previews and where it writes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptctl.verbs.extraction.extract import MAX_PREVIEWS
from tests.checkpoints import save_dcp, save_hf, tiny_llama


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.pt"
    state = {"w": torch.arange(6.0), "b": torch.ones(2)}
    torch.save({"model": state, "step": 500, "lr": 3e-4, "note": "warm", "list": [1, 2]}, path)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "base", *tiny_llama("llama3"))


def test_two_slices_are_a_usage_error(run, whole):
    result = run("extract", whole, "w[0]", "--slice", "[0:2]")
    assert result.exit_code == 2 and "two slices were given" in result.stderr


def test_tensor_name_with_brackets_can_be_sliced(run, tmp_path):
    save_file({"w[0]": torch.arange(3.0)}, tmp_path / "odd.safetensors")
    result = run("extract", tmp_path / "odd.safetensors", "w[0]", "--slice", "[1:2]")
    assert result.exit_code == 0 and result.stdout.splitlines()[1] == "[1]"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("step", "its value is 500"),
        ("lr", "its value is 0.0003"),
        ("note", "its value is 'warm'"),
        ("list", "it is an object"),
    ],
)
def test_extracting_non_tensor_is_an_error_that_shows_value(run, whole, name, why):
    result = run("extract", whole, name)
    assert result.exit_code == 5
    assert f"error: `{name}` is not a tensor" in result.stderr
    assert f"why:   {why}\n" in result.stderr
    hint = result.stderr.split("hint: ")[1]
    shown = run(*shlex.split(hint.split("`")[1])[1:])
    assert shown.exit_code == 0 and "step = 500" in shown.stdout


def test_value_of_non_tensor_in_dcp_is_shown(run, tmp_path):
    path = save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "step": 7})
    assert "its value is 7" in run("extract", path, "step").stderr


def test_key_of_another_layout_hints_at_layout_option(run, base):
    key = "layers.0.attention.wq.weight"
    result = run("extract", base, key)
    assert result.exit_code == 5
    assert "hint: add `--layout meta`: this key belongs to that layout" in result.stderr
    assert run("extract", base, key, "--layout", "meta").exit_code == 0
    own = run("extract", base, "model.layers.0.self_attn.q_proj.weight", "--layout", "meta")
    assert own.exit_code == 5 and "omit `--layout`" in own.stderr


def test_root_option_selects_prefix(run, tmp_path):
    state = {"w": torch.zeros(1)}
    path = tmp_path / "two.pt"
    torch.save({"model": state, "ema": {"w": torch.ones(1)}}, path)
    assert run("extract", path, "w").stdout.startswith("tensor\tmodel.w")
    assert run("extract", path, "w", "--root", "ema").stdout.startswith("tensor\tema.w")
    wrong = run("extract", path, "w", "--root", "nowhere")
    assert wrong.exit_code == 2 and "prefix `nowhere`" in wrong.stderr


def test_each_preview_follows_its_row(run, whole):
    lines = run("extract", whole, "model.*").stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines[::2]] == [
        ["tensor", "model.w"],
        ["tensor", "model.b"],
    ]
    assert lines[1::2] == ["[0 1 2 3 4 5]", "[1 1]"]


def test_omitted_previews_are_noted(run, tmp_path):
    path = tmp_path / "many.safetensors"
    save_file(
        {name: torch.ones(1) for name in ["x", *(f"w{n}" for n in range(MAX_PREVIEWS))]}, path
    )
    result = run("extract", path, "*")
    assert (
        result.stderr == f"note: values are only shown for up to {MAX_PREVIEWS} tensors; "
        f"{MAX_PREVIEWS + 1} match\n"
    )
    assert not run("extract", path, "w*").stderr
    assert not run("extract", path, "*", "-o", tmp_path / "out.pt").stderr


def test_folder_is_not_replaced_by_file(run, whole, tmp_path):
    target = tmp_path / "out.pt"
    target.mkdir()
    for command in (["extract", whole, "w"], ["report", whole]):
        result = run(*command, "-o", target, "--overwrite")
        assert result.exit_code == 6 and "is a folder, but the output is a file" in result.stderr
    for more in ([], ["--dry-run"]):
        result = run("convert", whole, target, "--to", "torch", "--overwrite", *more)
        assert result.exit_code == 6 and "is a folder, but the output is a file" in result.stderr
    assert target.is_dir() and not any(target.iterdir())


def test_output_accepts_file_url_but_not_s3(run, whole, tmp_path):
    target = tmp_path / "out.safetensors"
    assert run("extract", whole, "w", "-o", f"file://{target}").exit_code == 0
    assert load_file(target)["model.w"].tolist() == [0, 1, 2, 3, 4, 5]
    for url in ("s3://bucket/out.safetensors", "s3:/bucket/out.safetensors"):
        result = run("extract", whole, "w", "-o", url)
        assert result.exit_code == 2 and f"where: {url}\n" in result.stderr
    shown = run("extract", whole, "w", "-o", "").stderr
    assert "the path is empty" in shown and "pass the file to write" in shown
