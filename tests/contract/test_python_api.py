"""What holds for every command in Python: a function of its name, with its options and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest

import ckptctl
from ckptctl.cli import commands
from ckptctl.cli.commands import Command
from ckptctl.errors import UsageError
from ckptctl.options import Argument, DeclaredOption, list_options
from ckptctl.run_options import RunBatchOptions
from tests.contract.additions import NOT_IN_PYTHON

OF_THE_TERMINAL = {"dry_run", "json", "no_header", "quiet", "yes"}
OF_A_LAUNCHER = {"single_process"}  # Python's functions always run in their process alone
OF_A_TREE = {"depth", "markdown", "sort", "tensors"}  # how `inspect` shows what it has found
"""Options that say what is printed or asked: `ckptctl.cli` declares them."""
COMMANDS = {one.name.replace("-", "_"): one for one in commands.iterate_commands()}


FUNCTIONS = sorted(COMMANDS.keys() & {*ckptctl.__all__})


def test_not_in_python_lists_commands_without_function() -> None:
    assert {*NOT_IN_PYTHON} <= COMMANDS.keys() - {*ckptctl.__all__}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_command_has_function_with_same_options_and_defaults(name: str) -> None:
    command: Command = COMMANDS[name]
    function = getattr(ckptctl, name)
    taken = inspect.signature(function).parameters
    hints = get_type_hints(command.run)
    of_cli = [hint for hint in hints.values() if hint.__module__.startswith("ckptctl.cli.")]
    own = [*list_options(command.run), *(one for hint in of_cli for one in list_options(hint))]
    arguments = {one.name for one in own if isinstance(one.option, Argument)}
    terminal = {one.name for one in own} - arguments
    known = OF_THE_TERMINAL | OF_A_LAUNCHER | OF_A_TREE
    assert terminal <= known, "declare what Python needs, too, in the dataclass of its options"
    offered = command.list_declared_options()
    if RunBatchOptions in hints.values():
        require_function_for_run(name, offered)
        of_a_run = {one.name for one in list_options(RunBatchOptions)}
        offered = tuple(one for one in offered if one.name not in of_a_run)
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


def require_function_for_run(name: str, offered: Sequence[DeclaredOption]) -> None:
    """Check that a function for runs has all options of a command with ``--each``."""
    function = getattr(ckptctl, "verify_run" if name == "verify" else "convert_run")
    taken = inspect.signature(function).parameters
    of_the_command = {*OF_THE_TERMINAL, *OF_A_LAUNCHER, "each"}
    if name == "consolidate":
        of_the_command |= {"dst", "metadata_only", "optimizer"}  # `only="all"` keeps it in Python
    for one in offered:
        if not isinstance(one.option, Argument) and one.name not in of_the_command:
            assert one.name in taken, one.name
            assert one.required or name == "consolidate" or taken[one.name].default == one.default
    assert inspect.getdoc(function) and all(f"{one}:" in str(function.__doc__) for one in taken)


NO_PATHS = {"key", "options", "state_dict", "tensor"}
WITH_A_PATH = [
    *sorted({*FUNCTIONS} - {"map", "models"}),
    *("plan_consolidation", "plan_conversion", "plan_merge", "plan_prune", "open"),
    *("convert_run", "plan_run_conversion", "verify_run"),
    *("save", "async_save", "load", "CheckpointManager"),
]


@pytest.mark.parametrize("name", WITH_A_PATH)
@pytest.mark.parametrize("wrong", [None, 5, b"x", ["a"], "a\0b"])
def test_invalid_path_argument_is_a_usage_error(name: str, wrong: object) -> None:
    function = getattr(ckptctl, name)
    own = list(inspect.signature(function).parameters.values())
    first = [one.name for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    given = {"to": "hf", "dst": "out", "state_dict": {}, "tensor": "*", "output": "out.npz"}
    needed = [one.name for one in own if one.default is inspect.Parameter.empty]
    paths = {one: wrong for one in first if one in needed and one not in NO_PATHS}
    others = {one: given[one] for one in needed if one not in paths}
    others |= {"dst": "out"} if "consolid" in name else {}
    with pytest.raises(UsageError, match=r"is not a path|character NUL"):
        function(**(paths or {first[0]: wrong}), **others)


@pytest.mark.parametrize("wrong", [None, 5, b"x"])
def test_non_string_argument_is_a_usage_error(wrong: Any) -> None:
    with pytest.raises(UsageError, match="is not a string"):
        ckptctl.extract(".", wrong)
    with pytest.raises(UsageError, match="is not a string"):
        ckptctl.map(wrong, to_layout="hf")
