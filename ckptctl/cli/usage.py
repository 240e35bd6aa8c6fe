"""Usage errors: Typer's parse errors, rewritten in the style of all other errors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from ckptctl.cli.commands import first_sentence
from ckptctl.cli.output import FORMAT
from ckptctl.errors import UsageError, find_nearest

OTHER_COMMANDS = {
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
"""Names that other programs use for the commands."""
OTHER_OPTIONS = {
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
"""Names that other programs use for the options."""
OUTPUTS = ("-o", "--out", "--output", "--output-dir", "--dst", "--dest")


def no_such_command(name: str, known: Sequence[str]) -> UsageError:
    """Return the error for an unknown command, with a suggestion if one is similar."""
    meant = OTHER_COMMANDS.get(name) or find_nearest(name, known)
    hint = f"did you mean `{meant}`?" if meant else "see `ckptctl --help`"
    return UsageError(f"unknown command `{name}`", hint=hint)


# Typer's own classes of contexts, commands and errors are not public, hence Any.
def explained(error: Any, group: Any, words: Sequence[str]) -> UsageError:
    """Convert Typer's *error* to a `UsageError` with a hint.

    Args:
        error: Typer's or click's exception.
        group: Context of the program.
        words: Arguments of the command line.
    """
    context = error.ctx or group
    name = group.invoked_subcommand if context is group else context.info_name
    command = group.command.get_command(group, name) if name else group.command
    path = f"ckptctl {name}" if name else "ckptctl"
    shows = f"see `{path} --help`"
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if option and parameter is None:
        parameter = next((p for p in command.params if option in p.opts), None)
    if option and parameter is None:
        hint = _instead(option, command, group, words) or shows
        return UsageError(f"unknown option `{option}`", hint=hint)
    if parameter is None:
        said = str(error.format_message()).removesuffix(".")
        extra = re.fullmatch(r"Got unexpected extra argument\(?s?\)? \((.*)\)", said, re.DOTALL)
        what = f"too many arguments: `{extra[1]}`" if extra else said
        shows = f"quote arguments that contain spaces, or {shows}" if extra else shows
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        return UsageError(what[:1].lower() + what[1:], why=f"usage: {usage}", hint=shows)
    argument = parameter.param_type_name == "argument"
    shown = parameter.metavar if argument else option or max(parameter.opts, key=len)
    example = _example(command, "" if argument else shown)
    if option and parameter.is_flag:
        return UsageError(f"{shown} does not take a value", hint=f"use only `{shown}`")
    if option:
        return UsageError(f"{shown} requires a value", hint=example or shows)
    kind = "argument" if argument else "option"
    first = first_sentence(parameter.help).removesuffix(".")
    meaning = first if first[1:2].isupper() else first[:1].lower() + first[1:]
    what = f"missing {kind} {shown} ({meaning})"
    return UsageError(what, hint=example or shows)


def _instead(option: str, command: Any, group: Any, words: Sequence[str]) -> str | None:
    """Return a hint for an unknown *option*, or None if nothing is similar."""
    known = {name: p for p in command.params for name in p.opts if name.startswith("--")}
    general = {name for p in group.command.params for name in p.opts} - {"--help", "-h"}
    meant = OTHER_OPTIONS.get(option, option)
    if command is not group.command and meant in general:
        kept = [word for word in words if word != option]
        return f"put it before the command: `{shlex.join(['ckptctl', meant, *kept])}`"
    if command is group.command:
        for number, word in enumerate(words):
            wanted = command.get_command(group, word)
            if wanted and any(option in p.opts for p in wanted.params):
                line = ["ckptctl", word, *words[:number], *words[number + 1 :]]
                return f"put it after the command: `{shlex.join(line)}`"
    if option == FORMAT and "--json" in known:
        return "pass `--json` for JSON, the only other format"
    arguments = [p.metavar for p in command.params if p.param_type_name == "argument"]
    if option in OUTPUTS and "DST" in arguments:
        names = " ".join(arguments)
        return f"pass the destination after the source: `ckptctl {command.name} {names}`"
    if meant.split()[0] not in known:
        close = find_nearest(option.strip("-"), [name.strip("-") for name in known])
        meant = f"--{close}" if close else ""
    return f"did you mean `{meant}`?" if meant else None


def _example(command: Any, option: str) -> str | None:
    """Return the first example of a command that uses *option*, or None if there is none."""
    given = (line for line in str(command.epilog).splitlines() if line.startswith(" "))
    # An example may end with an explanation in brackets, or with a pipe to another program.
    ends = (line.strip().partition(" (")[0].partition(" |")[0].strip() for line in given)
    lines = [line for line in ends if line.startswith("ckptctl ")]
    fitting = [line for line in lines if not option or option in line.split()]
    return f"for example `{fitting[0]}`" if fitting else None
