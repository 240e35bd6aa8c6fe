"""Options that say in which form the answer is printed: of every command at most one is taken."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import app
from ckptctl.cli.commands import FORM_PARAMETERS, Command, iterate_commands
from ckptctl.errors import UsageError

HF = Path(__file__).parents[1] / "data" / "tiny-llama3-hf"
COMMANDS = {one.name: one for one in iterate_commands()}
JSON_TWICE = ("--json", "--format=json")
"""What says the same twice."""


def output_options(command: Command) -> dict[str, str]:
    """Return what is declared in the panel of output options, without those that take a value."""
    every = command.list_declared_options()
    return {
        one.name: f"--{one.name.replace('_', '-')}"
        for one in every
        if one.option.panel == "Output" and one.flag
    }


def arguments(command: Command) -> list[str]:
    """Return as many arguments as the command needs; they are not looked at."""
    every = command.list_declared_options()
    needed = [one for one in every if one.required]
    words: list[str] = []
    for one in needed:
        argument = one.option.flags == "" and type(one.option).__name__ == "Argument"
        words += ["x"] if argument else [f"--{one.name.replace('_', '-')}", "dcp"]
    return words


@pytest.mark.parametrize("name", COMMANDS)
def test_conflicting_output_options_are_a_usage_error(name: str) -> None:
    command = COMMANDS[name]
    options = output_options(command)
    forms = [options[form] for form in FORM_PARAMETERS if form in options]
    pairs = list(itertools.combinations(forms, 2))
    formats = ["--format=table", "--format=tsv", "--format=json"] if command.has_rows else []
    pairs += [pair for pair in itertools.product(forms, formats) if pair != JSON_TWICE]
    without_titles = [*forms, *formats[:1], *formats[2:]]
    pairs += [(form, options["no_header"]) for form in without_titles if "no_header" in options]
    assert pairs, "each command has --json and --quiet"
    for pair in pairs:
        line = [name, *arguments(command), *pair]
        found = CliRunner().invoke(app, line, prog_name="ckptctl")
        assert found.exit_code == UsageError.exit_code, (line, found.output)
        assert " conflicts with " in found.stderr and "omit one of them" in found.stderr, line
        assert not found.stdout


@pytest.mark.parametrize(
    "pair",
    [
        ("--depth=1", "--tensors"),
        ("--depth=1", "--stats"),
        ("--depth=1", "--json"),
        ("--depth=1", "--quiet"),
        ("--stats", "--markdown"),
        ("--tensors", "--markdown"),
    ],
)
def test_conflicting_inspect_options_are_a_usage_error(pair: tuple[str, str]) -> None:
    found = CliRunner().invoke(app, ["inspect", str(HF), *pair], prog_name="ckptctl")
    assert found.exit_code == UsageError.exit_code
    assert "conflicts with" in found.stderr
    assert not found.stdout
