"""Usage errors: Typer's parse errors, rewritten in the style of all other errors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from ckptctl.cli.commands import get_first_sentence
from ckptctl.cli.output import FORMAT_OPTION
from ckptctl.errors import UsageError, find_nearest

COMMAND_SYNONYMS = {
    "cat": "extract",
    "check": "verify",
    "cmp": "diff",
    "compare": "diff",
    "delete": "prune",
    "dump": "inspect",
    "export": "convert",
    "get": "extract",
    "info": "inspect",
    "list": "ls",
    "rm": "prune",
    "show": "inspect",
    "validate": "verify",
}
"""Command names of other programs, with the corresponding commands of ckptctl."""
OPTION_SYNONYMS = {
    "-f": "--overwrite",
    "-j": "--jobs",
    "-t": "--to",
    "--alone": "--single-process",
    "--arch": "--model-type",
    "--bf16": "--dtype bf16",
    "--continue": "--resume",
    "--family": "--model-type",
    "--force": "--overwrite",
    "--fp16": "--dtype fp16",
    "--fp32": "--dtype fp32",
    "--model": "--model-type",
    "--num-workers": "--jobs",
    "--output-format": "--to",
    "--precision": "--dtype",
    "--shard-size": "--max-shard-size",
    "--target": "--to",
    "--threads": "--jobs",
    "--tp": "--mp",
    "--type": "--model-type",
    "--workers": "--jobs",
}
"""Option names of other programs, with the corresponding options of ckptctl."""
OUTPUT_OPTIONS = ("-o", "--out", "--output", "--output-dir", "--dst", "--dest")


def unknown_command_error(name: str, command_names: Sequence[str]) -> UsageError:
    """Build the error for an unknown command, which suggests a similar command if one exists."""
    words = [other.partition(" ")[2] for other in command_names if other.startswith(f"{name} ")]
    if words:
        return UsageError(
            f"`{name}` is the first word of several commands",
            hint=f"add one of: {', '.join(words)}; see `ckptctl {name} {words[0]} --help`",
        )
    suggestion = COMMAND_SYNONYMS.get(name) or find_nearest(name, command_names)
    hint = f"did you mean `{suggestion}`?" if suggestion else "see `ckptctl --help`"
    return UsageError(f"unknown command `{name}`", hint=hint)


# Typer's own classes of contexts, commands and errors are not public, hence Any.
def to_usage_error(error: Any, group: Any, words: Sequence[str]) -> UsageError:
    """Convert Typer's *error* to a `UsageError` with a hint.

    Args:
        error: Typer's or click's exception.
        group: Click context of the program, which contains all commands.
        words: Arguments of the command line.
    """
    context = error.ctx or group
    name = group.invoked_subcommand if context is group else context.info_name
    command = group.command.get_command(group, name) if name else group.command
    path = f"ckptctl {name}" if name else "ckptctl"
    help_hint = f"see `{path} --help`"
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if option and parameter is None:
        parameter = next((p for p in command.params if option in p.opts), None)
    if option and parameter is None:
        hint = _suggest_option(option, command, group, words) or help_hint
        return UsageError(f"unknown option `{option}`", hint=hint)
    if parameter is None:
        message = str(error.format_message()).removesuffix(".")
        extra = re.fullmatch(r"Got unexpected extra argument\(?s?\)? \((.*)\)", message, re.DOTALL)
        summary = f"too many arguments: `{extra[1]}`" if extra else message
        help_hint = f"quote arguments that contain spaces, or {help_hint}" if extra else help_hint
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        return UsageError(summary[:1].lower() + summary[1:], why=f"usage: {usage}", hint=help_hint)
    is_argument = parameter.param_type_name == "argument"
    display_name = parameter.metavar if is_argument else option or max(parameter.opts, key=len)
    example = _find_example(command, "" if is_argument else display_name)
    if option and parameter.is_flag:
        return UsageError(
            f"{display_name} does not take a value", hint=f"use only `{display_name}`"
        )
    if option:
        return UsageError(f"{display_name} requires a value", hint=example or help_hint)
    kind = "argument" if is_argument else "option"
    first = get_first_sentence(parameter.help).removesuffix(".")
    meaning = first if first[1:2].isupper() else first[:1].lower() + first[1:]
    summary = f"missing {kind} {display_name} ({meaning})"
    return UsageError(summary, hint=example or help_hint)


def _suggest_option(option: str, command: Any, group: Any, words: Sequence[str]) -> str | None:
    """Return a hint for an unknown *option*, or None if no known option is similar."""
    option_by_flag = {name: p for p in command.params for name in p.opts if name.startswith("--")}
    global_flags = {name for p in group.command.params for name in p.opts} - {"--help", "-h"}
    suggestion = OPTION_SYNONYMS.get(option, option)
    if command is not group.command and suggestion in global_flags:
        other_words = [word for word in words if word != option]
        return f"put it before the command: `{shlex.join(['ckptctl', suggestion, *other_words])}`"
    if command is group.command:
        for number, word in enumerate(words):
            subcommand = command.get_command(group, word)
            if subcommand and any(option in p.opts for p in subcommand.params):
                line = ["ckptctl", word, *words[:number], *words[number + 1 :]]
                return f"put it after the command: `{shlex.join(line)}`"
    if option == FORMAT_OPTION and "--json" in option_by_flag:
        return "pass `--json` for JSON, the only other format"
    arguments = [p.metavar for p in command.params if p.param_type_name == "argument"]
    if option in OUTPUT_OPTIONS and "DST" in arguments:
        names = " ".join(arguments)
        return f"pass the destination after the source: `ckptctl {command.name} {names}`"
    if suggestion.split()[0] not in option_by_flag:
        close = find_nearest(option.strip("-"), [name.strip("-") for name in option_by_flag])
        suggestion = f"--{close}" if close else ""
    return f"did you mean `{suggestion}`?" if suggestion else None


def _find_example(command: Any, option: str) -> str | None:
    """Return the first example of a command that uses *option*, or None if there is none."""
    example_lines = (line for line in str(command.epilog).splitlines() if line.startswith(" "))
    # An example may end with an explanation in brackets, or with a pipe to another program.
    command_lines = (
        line.strip().partition(" (")[0].partition(" |")[0].strip() for line in example_lines
    )
    own_examples = [line for line in command_lines if line.startswith("ckptctl ")]
    matches = [line for line in own_examples if not option or option in line.split()]
    return f"for example `{matches[0]}`" if matches else None
