"""Write ``docs/reference/cli.md`` from the program itself: ``python docs/generate_cli.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ckptctl.cli.app import app

PAGE = Path(__file__).parent / "reference" / "cli.md"
HEAD = """# Command line

Generated from the program by `python docs/generate_cli.py`.

Results go to stdout. Progress, notes, hints and errors go to stderr. A terminal gets aligned
columns that fit its width, with long names shortened. A pipe gets all columns in full,
tab-separated and without color, below a header line that `--no-header` omits. `--format` chooses
one of them, or JSON, for any stream. See [JSON output](json.md) for `--json` and
[exit codes](exit-codes.md) for exit codes. A size is a number of bytes, or text such as `5GB`
(10^9 bytes each) or `4GiB` (2^30 bytes each).

For commands with many options, `-h` shows only the most common ones. `--help` shows all.

`ckptctl --install-completion` enables completion in bash, zsh, fish and PowerShell. It completes
commands, options, formats, model types, layouts and the names of a checkpoint's tensors. URLs are
not completed.
"""


def render() -> str:
    """Return the page."""
    # Typer's command classes are not public, hence Any.
    group: Any = typer.main.get_command(app)
    parts = [HEAD, *_command("ckptctl", group)]
    for name, command in sorted(group.commands.items()):
        parts += _command(f"ckptctl {name}", command)
    return "\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{_prose(command.help)}\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    yield "```text"
    yield " ".join([name, *map(_argument, arguments), "[OPTIONS]"])
    yield "```\n"
    if arguments:
        yield from _table("argument", ((f"`{p.metavar}`", "", p) for p in arguments))
    if options:
        yield from _table("option", ((_spelling(p), _default(p), p) for p in options))
    examples = re.findall(r"^ +(ckptctl .*)$", command.epilog or "", re.MULTILINE)
    yield from ("Examples:\n", "```text", *examples, "```\n")


def _argument(argument: Any) -> str:
    return str(argument.metavar if argument.required else f"[{argument.metavar}]")


def _table(kind: str, rows: Iterator[tuple[str, str, Any]]) -> Iterator[str]:
    yield f"| {kind} | default | |"
    yield "| --- | --- | --- |"
    for first, default, parameter in rows:
        text = (parameter.help or "").replace("|", "\\|")
        variable = f" Environment: `{parameter.envvar}`." if parameter.envvar else ""
        yield f"| {first} | {default} | {text}{variable} |"
    yield ""


def _spelling(option: Any) -> str:
    value = f" {option.metavar}" if option.metavar and not option.is_flag else ""
    names = sorted(option.opts, key=lambda name: name.startswith("--"))
    return ", ".join(f"`{name}{value if name == names[-1] else ''}`" for name in names)


def _default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.is_flag or option.default in (None, ()) else f"`{option.default}`"


def _prose(text: str | None) -> str:
    return (text or "").strip()


if __name__ == "__main__":
    PAGE.write_text(render())
