"""What errors say to do: the nearest name, commands that run as printed."""

from __future__ import annotations

import shlex

import pytest

from ckptctl.errors import command, nearest


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("torchtun", ["torchtune", "torchtitan"], "torchtune"),
        ("orchtune", ["torchtune"], "torchtune"),
        ("meat", ["meta"], "meta"),
        ("nope", ["openai"], None),
        ("run", ["prune"], None),
        ("x", ["y"], None),
    ],
)
def test_the_nearest_name_is_near(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == found


@pytest.mark.parametrize("path", ["run", "-dash", "a b", "it's"])
def test_a_command_takes_its_path_for_one(path: str) -> None:
    words = shlex.split(command("convert", path, "DST", options=("--to", "hf")).strip("`"))
    plain = ["ckptctl", "convert", path, "DST", "--to", "hf"]
    guarded = ["ckptctl", "convert", "--to", "hf", "--", path, "DST"]
    assert words == (guarded if path == "-dash" else plain)
