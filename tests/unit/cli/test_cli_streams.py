"""The real program on real streams: pipes, terminals, their environment."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.runs import save_step
from tests.sweeps import one_in
from tests.unit.cli.conftest import environment, program


@pytest.mark.parametrize(
    "args", [[], ["--tensors"], ["--markdown"], ["--json"], ["-q"], ["--depth", "2"]]
)
def test_piped_output_is_plain_text(piped, tiny_llama3_hf, args):
    done = piped("inspect", tiny_llama3_hf, *args, FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert not set("│┃━─┏╭…") & set(done.stdout)


def test_json_of_real_checkpoint_matches_its_facts(piped, tiny_llama3_hf):
    body = json.loads(piped("inspect", tiny_llama3_hf, "--json").stdout)
    assert (body["format"], body["model_type"], body["complete"]) == ("hf", "llama3", True)
    assert body["parameters"] == sum(use["elements"] for use in body["dtypes"].values())


def test_terminal_output_is_styled_without_tabs(terminal, tiny_llama3_hf):
    shown = terminal("inspect", tiny_llama3_hf)
    assert "\x1b[1m" in shown
    assert "\t" not in shown
    assert "complete" in shown


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_disables_color(terminal, tiny_llama3_hf, env):
    assert "\x1b" not in terminal("inspect", tiny_llama3_hf, **env)


@pytest.mark.slow
def test_ascii_output_encoding_is_respected(piped, tiny_llama3_hf):
    done = piped("inspect", tiny_llama3_hf, "--stats", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", one_in(3, [[], ["--json"], ["-q"]]))
def test_full_disk_exits_8_after_work_is_done(tmp_path, options, unbuffered):
    """The work is done all the same: this may be the command that frees the disk."""
    for step in (1, 2):
        folder = tmp_path / "run" / f"step-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    asked = ("prune", tmp_path / "run", "--keep-last", "1", "--force", "--yes", *options)
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            program(*asked),
            env=environment(PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 8, done.stderr
    assert "standard output" in done.stderr and "has finished" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["step-2"]


@pytest.mark.slow
def test_full_disk_overrides_diff_exit_code(tmp_path):
    for name, value in (("a", 0), ("b", 1)):
        save_file({"w": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            program("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors"),
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 8
    assert "standard output" in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("words", "env", "answer", "said"),
    one_in(
        4,
        [
            ([], {}, False, False),
            ([], {"FORCE_COLOR": "1"}, False, True),
            ([], {"CLICOLOR_FORCE": "1"}, False, True),
            ([], {"FORCE_COLOR": "0"}, False, False),
            ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
            (["--color=always"], {"NO_COLOR": "1"}, True, True),
            (["--color=never"], {"FORCE_COLOR": "1"}, False, False),
            (["--color=auto"], {"FORCE_COLOR": "1"}, False, True),
        ],
    ),
)
@pytest.mark.parametrize("before", [False, True])
def test_color_option_overrides_environment(run, tmp_path, words, env, answer, said, before):
    """`--color` wins; what a program may read is colored by nothing else."""
    save_step(tmp_path / "step-1")
    (tmp_path / "last.ckpt").write_bytes(b"torn")
    line = [*words, "ls", tmp_path] if before else ["ls", tmp_path, *words]
    result = run(*line, **env)
    assert ("\x1b[32mcomplete\x1b[0m" in result.stdout) == answer, result.output
    assert ("\x1b[36mnote:\x1b[0m" in result.stderr) == said, result.output
    assert ("\x1b" in result.stdout) == answer and ("\x1b" in result.stderr) == said


@pytest.mark.parametrize("line", [["--color=pink", "ls", "."], ["ls", ".", "--color=pink"]])
def test_unknown_color_value_is_a_usage_error(run, line):
    result = run(*line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--color" in result.stderr and "auto, always, never" in result.stderr


def test_color_option_overrides_terminal_detection(terminal, tiny_llama3_hf):
    assert "\x1b" not in terminal("inspect", tiny_llama3_hf, "--color", "never")
    assert "\x1b[32m" in terminal("inspect", tiny_llama3_hf, "--color=always", NO_COLOR="1")
