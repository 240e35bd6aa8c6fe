"""The real program on real streams: pipes, terminals, their environment."""

import json

import pytest


@pytest.mark.parametrize(
    "args", [[], ["--tensors"], ["--markdown"], ["--json"], ["-q"], ["--depth", "2"]]
)
def test_nothing_but_text_in_a_pipe(piped, tiny_llama3_hf, args):
    done = piped("inspect", tiny_llama3_hf, *args, FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert not set("│┃━─┏╭…") & set(done.stdout)


def test_json_of_a_real_checkpoint(piped, tiny_llama3_hf):
    body = json.loads(piped("inspect", tiny_llama3_hf, "--json").stdout)
    assert (body["format"], body["model_type"], body["complete"]) == ("hf", "llama3", True)
    assert body["parameters"] == sum(use["elements"] for use in body["dtypes"].values())


def test_terminal(terminal, tiny_llama3_hf):
    shown = terminal("inspect", tiny_llama3_hf)
    assert "\x1b[1m" in shown
    assert "\t" not in shown
    assert "complete" in shown


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour(terminal, tiny_llama3_hf, env):
    assert "\x1b" not in terminal("inspect", tiny_llama3_hf, **env)


def test_ascii_terminal(piped, tiny_llama3_hf):
    done = piped("inspect", tiny_llama3_hf, "--stats", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
