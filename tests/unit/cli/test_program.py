"""The forks that other tests run in place of new processes of the program."""

from __future__ import annotations

import os

import pytest

from tests.program import needs_start, run_program


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["inspect", "tests/data/tiny-llama3-hf", "--json"], 0),
        (["inspect", "nowhere"], 3),
        (["models", "llama3", "--no-such-option"], 2),
    ],
)
def test_fork_ends_like_new_process(words: list[str], code: int) -> None:
    forked, started = run_program(words), run_program(words, PYTHONUNBUFFERED="1")
    assert needs_start({"PYTHONUNBUFFERED": "1"}) and not needs_start({"NO_COLOR": "1"})
    assert forked.returncode == started.returncode == code
    assert (forked.stdout, forked.stderr) == (started.stdout, started.stderr)


def test_fork_has_folder_and_environment_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["inspect", "tests"]).returncode == 3
    for width in (70, 160):
        shown = run_program(["models", "--format=table"], COLUMNS=str(width)).stdout
        assert width - 20 < max(map(len, shown.splitlines())) <= width
    assert "COLUMNS" not in os.environ or os.environ["COLUMNS"] not in ("70", "160")
