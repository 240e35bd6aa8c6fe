"""Errors and notes are written once, as the command line speaks; Python's name Python's options.

Every text of the library that names an option is found in its source, and said as three functions
say it that take few of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptctl
from ckptctl.keywords import noted
from ckptctl.ops.inspection.options import InspectOptions
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.runs.options import PruneOptions

LIBRARY = Path(ckptctl.__file__).parent
SPELLED = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
PROGRAMS = "ckptctl|hf|pip|python|sbatch"
COMMAND = re.compile(rf"`[^`]*?(?:{PROGRAMS}|-m ckptctl) [^`]*`")
OF_COMMANDS = {"cli", "options.py", "doctor.py", "known_formats.py", "__main__.py", "group.py"}
"""What speaks of command lines, and to those who type them."""
FIELDS = ("JsonField", "Format")
"""Calls whose texts describe: no function raises or notes them."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield where each text stands that is raised or noted, and the text."""
    for file in sorted(LIBRARY.rglob("*.py")):
        place = file.relative_to(LIBRARY)
        if OF_COMMANDS & {place.parts[0], place.name}:
            continue
        source = file.read_text()
        if SPELLED.search(source):
            for line, text in said(ast.parse(source)):
                yield f"{place}:{line}", text


def said(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield texts that name an option; what is put into them is `X`."""
    nodes = [*ast.walk(tree)]
    unsaid = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in FIELDS:
            unsaid |= {id(inner) for inner in ast.walk(node)}
        elif isinstance(node, ast.JoinedStr):
            unsaid |= {id(part) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in unsaid:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [one.value if isinstance(one, ast.Constant) else "X" for one in parts]
            text = "".join(map(str, values)).replace("--keep-X", "--keep-last")
            part = text[:1] == " " or SPELLED.fullmatch(text)  # of a command, or of a text
            if SPELLED.search(COMMAND.sub("", text)) and not part:
                yield node.lineno, text


def test_no_text_speaks_of_a_command_line() -> None:
    found = dict(texts())
    assert len(found) > 120
    left = {
        where: said
        for where, text in found.items()
        for options in (LoadOptions, InspectOptions, PruneOptions)
        if SPELLED.search(COMMAND.sub("", said := noted(text, options)))
    }
    assert not left, "name the function that has the option in `keywords.FUNCTIONS`"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("`--assets DIR --trust-assets` takes it", "`assets=DIR, trust_assets=True` takes it"),
        ("read it with `--from torch`", "read it with `format='torch'`"),
        ("use `--exclude x.*` to skip it", "use `ckptctl.convert(exclude='x.*')` to skip it"),
        ("`--to hf --overwrite`", "`ckptctl.convert(to='hf', overwrite=True)`"),
        ("`convert --resume` goes on", "`ckptctl.convert(resume=True)` goes on"),
        ("`--mp` has to divide 8", "`mp` of `ckptctl.convert` has to divide 8"),
        ("(--include, --tag)", "(include, tag)"),
        ("`ckptctl ls --json`, `--unknown 3`", "`ckptctl ls --json`, `--unknown 3`"),
    ],
)
def test_what_load_says(text: str, said: str) -> None:
    assert noted(text, LoadOptions) == said
