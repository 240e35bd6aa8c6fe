"""What holds for every command in Python: a function of its name, with its options and defaults."""

from __future__ import annotations

import inspect

import pytest

import ckptctl
from ckptctl.cli import commands
from ckptctl.cli.commands import Command
from ckptctl.options import Argument, declared

OF_THE_TERMINAL = {"dry_run", "json", "no_header", "quiet", "yes"}
OF_A_LAUNCHER = {"alone"}  # Python's functions run in their process alone, whatever started it
OF_A_TREE = {"depth", "markdown", "sort", "tensors"}  # how `inspect` shows what it has found
"""Options that say what is printed or asked: a command's function declares them itself."""
NOT_IN_PYTHON = {
    "formats": "that name is the package's; a format is an object with attributes in Python",
    "schema": "it describes what commands print",
}
COMMANDS = {one.name: one for one in commands.commands()}


def test_commands_without_a_function() -> None:
    assert set(NOT_IN_PYTHON) == COMMANDS.keys() - {*ckptctl.__all__}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_IN_PYTHON.keys()))
def test_a_command_has_its_function(name: str) -> None:
    command: Command = COMMANDS[name]
    function = getattr(ckptctl, name)
    taken = inspect.signature(function).parameters
    own = declared(command.run)
    arguments = {one.name for one in own if isinstance(one.option, Argument)}
    terminal = {one.name for one in own} - arguments
    known = OF_THE_TERMINAL | OF_A_LAUNCHER | OF_A_TREE
    assert terminal <= known, "declare what Python needs, too, in a dataclass of `ckptctl/ops/`"
    offered = [one for many in command.parameters().values() for one in many or ()]
    shared = {one.name: one for one in offered if one.name not in terminal}
    assert taken.keys() - {"progress"} == shared.keys()
    for one in shared.values():
        if one.name not in arguments:
            assert taken[one.name].default == one.default, one.name
    assert inspect.getdoc(function) and all(f"{one}:" in function.__doc__ for one in shared)
    if "dry_run" in terminal:
        plans = [one for one in ckptctl.__all__ if one.startswith(f"plan_{name[:4]}")]
        assert len(plans) == 1, "a dry run is a plan"
        planned = inspect.signature(getattr(ckptctl, plans[0])).parameters
        assert planned.keys() == taken.keys() - {"progress"}
