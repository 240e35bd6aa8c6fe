"""The examples in the help of every command are run, on checkpoints that are called as there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ckptctl.cli.app import app
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.runs import save_step
from tests.sweeps import one_in

STAND_INS = {
    "s3://models/step-2000": "step-2000",
    "hf://org/model@main": "llama-3-8b",
    "hf://org/model": "pushed",
    "/mnt/checkpoints": ".",
    "mistral-7b": "llama-3-8b",
    "lora.safetensors": "adapter",
    "tuned-hf": "tuned",
}
"""For what lies elsewhere, and what differs in its family alone."""
FIRST_COMMAND = re.compile(r" +(?:\||>|\|\||\() .*$|   +\(.*$")
INNER = re.compile(r"\$\(ckptctl (.*?)\)")
EXAMPLES = [
    (str(info.name), line)
    for info in app.registered_commands
    for line in re.findall(r"^ +(ckptctl .*)$", str(info.epilog), re.MULTILINE)
] + [("", line) for line in re.findall(r"^ +(ckptctl .*)$", str(app.info.epilog), re.MULTILINE)]


def ckptctl(*words: str) -> str:
    result = CliRunner().invoke(app, words, prog_name="ckptctl")
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def quantize(source: Path, target: Path) -> None:
    """Write a model whose first query projection is float8 with one scale for each block."""
    state = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    state[name + "_scale_inv"] = torch.ones(1, 1)
    state[name] = state[name].to(torch.float8_e4m3fn)
    target.mkdir()
    save_file(state, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return a folder with all that the examples start from."""
    shelf = tmp_path_factory.mktemp("shelf")
    model = shelf / "llama-3-8b"
    copies = {
        "tiny-llama3-hf": ("llama-3-8b",),
        "deepspeed/z2_bf16_frozen_tied/ckpt": ("global_step1000", "zero"),
        "dcp-rank-local/w2/ckpt": ("step-100",),
        "rank_files/verl/ckpt": ("fsdp-ranks",),
    }
    for source, names in copies.items():
        for name in names:
            shutil.copytree(data / source, shelf / name, copy_function=shutil.copyfile)
    for name, options in {
        "out-dcp": "--to dcp",
        "base-dcp": "--to dcp",
        "step-800": "--to hf",
        "step-900": "--to hf",
        "step-1000": "--to dcp",
        "step-2000": "--to dcp",
        "out-meta": "--to meta",
        "out-hf": "--to hf",
        "bf16": "--to hf",
        "fp32": "--to hf --dtype fp32",
        "a": "--to hf",
        "b": "--to meta",
    }.items():
        ckptctl("convert", str(model), str(shelf / name), *options.split(), "-q")
    quantize(model, shelf / "deepseek-fp8")
    state = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    save_peft(shelf / "adapter", random_adapter(state))
    ckptctl("merge", str(model), str(shelf / "adapter"), str(shelf / "tuned"), "-q")
    steps = ("llama-3-8b", "tuned", "llama-3-8b", "tuned")
    for number, (base, new) in enumerate(pairwise(steps), 1):
        ckptctl("delta", "make", *(str(shelf / p) for p in (base, new, f"step-{number}.delta")))
    layout = ("--to", "torch", "--to-layout", "torchtune", "--assets", str(model))
    ckptctl("convert", str(shelf / "adapter"), str(shelf / "adapter_model.pt"), *layout, "-q")
    for step in range(1000, 6000, 1000):
        folder = save_step(shelf / "runs" / "llama" / f"step-{step}")
        history = [{"step": step, "eval_loss": 1.0 / step}]
        (folder / "trainer_state.json").write_text(
            json.dumps({"global_step": step, "log_history": history})
        )
    return shelf


@pytest.fixture
def desk(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(shelf, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path)


def words_of(line: str) -> list[str]:
    """Return the words of the first command in *line*, after those that it contains were run."""
    command = INNER.sub(lambda inner: ckptctl(*shlex.split(inner[1])), FIRST_COMMAND.sub("", line))
    return [STAND_INS.get(word, word) for word in shlex.split(command)[1:]]


def filtered(line: str, document: str) -> None:
    """Run the filter that follows a command in *line*: it finds what it names."""
    jq = re.search(r" \| jq (.+)$", line)
    if jq and shutil.which("jq"):
        words = ["jq", *shlex.split(jq[1])]
        done = subprocess.run(words, input=document, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "null" not in done.stdout.split(), done.stderr + done.stdout


def clear(words: list[str]) -> None:
    """Remove what *words* are to write, if another example starts from it."""
    if words[:2] == ["delta", "make"]:
        shutil.rmtree(words[4], ignore_errors=True)
    places = [word for word in words[1:4] if not word.startswith("-")]
    if words[0] in ("convert", "merge", "extract-lora", "consolidate") and len(places) > 1:
        before_options = words[1 : 1 + len(places)]
        shutil.rmtree(before_options[-1], ignore_errors=True)


@pytest.mark.parametrize(("command", "line"), one_in(3, EXAMPLES), ids=lambda text: text)
def test_help_examples_run_successfully(desk, command, line):
    words = words_of(line)
    assert f"ckptctl {command}" in line
    clear(words)
    result = CliRunner().invoke(app, words, prog_name="ckptctl")
    asked = "confirmation is required" in result.stderr and "--yes" not in words
    drawn = words[0] == "browse" and "only shown in a terminal" in result.stderr
    expected = (6,) if asked else (2,) if drawn else (0, 1) if words[0] == "diff" else (0,)
    assert result.exit_code in expected, result.output
    filtered(line, result.stdout)


def test_help_examples_do_not_mention_test_paths():
    assert not [line for _, line in EXAMPLES if "tests/" in line]
