"""Messages are written once; each front end spells the options that they name.

Every text of the library names options by `format_option`, and each of these is spelled as three
functions do that take few options.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import format_option, rename_options_in_messages
from ckptctl.keywords import show_options_as_keywords
from ckptctl.run_options import PruneOptions
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from tests.structure import nodes_of

LIBRARY = Path(ckptctl.__file__).parent
SPELLED = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
PROGRAMS = "ckptctl|hf|pip|python|sbatch"
COMMAND = re.compile(rf"`[^`]*?(?:{PROGRAMS}|-m ckptctl) [^`]*`")
OF_COMMANDS = {
    *("cli", "doctor.py", "known_formats.py", "__main__.py", "group.py"),
    *(file.name for file in LIBRARY.rglob("*options.py")),
}
"""What speaks of command lines, and to those who type them."""
APART = ("format_option", "JsonField", "Format", "Option")
"""Calls that name options, and those whose texts describe: no function raises or notes them."""


def files() -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Yield what each module of the library that names an option consists of."""
    for file in sorted(LIBRARY.rglob("*.py")):
        place = file.relative_to(LIBRARY)
        source = file.read_text()
        if SPELLED.search(source) and not OF_COMMANDS & {place.parts[0], place.name}:
            yield str(place), nodes_of(file)


def text_of(node: ast.AST) -> str:
    """Return a text; what is put into it is `X`."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    values = [one.value if isinstance(one, ast.Constant) else "X" for one in parts]
    return "".join(map(str, values)).replace("--keep-X", "--keep-last")


@cache
def mentions() -> dict[str, tuple[str, ...]]:
    """Return where options are named, and which."""
    found = {}
    for place, nodes in files():
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "format_option":
                texts = tuple(map(text_of, node.args))
                if all(text.startswith("--") for text in texts):  # others are variables
                    found[f"{place}:{node.lineno}"] = texts
    return found


def unspelled() -> Iterator[tuple[str, str]]:
    """Yield texts that name an option in themselves."""
    for place, nodes in files():
        apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in APART:
                apart |= {id(inner) for inner in ast.walk(node)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                apart |= {id(part) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in apart:
                text = COMMAND.sub("", text_of(node))
                command = text[:1] == " " or text.startswith("ckptctl ") or SPELLED.fullmatch(text)
                if SPELLED.search(text) and not command:
                    yield f"{place}:{node.lineno}", text


def test_messages_spell_options_only_through_spell_option() -> None:
    described = (
        *("formats/hf_rank_shards.py", "formats/dcp_rank_local.py"),
        "pre_commit.py",  # the command line that it runs
    )
    left = {place: text for place, text in unspelled() if not place.startswith(described)}
    assert not left, "name the option with `format_option`"


@pytest.mark.parametrize("options", [LoadOptions, InspectOptions, PruneOptions])
def test_messages_in_python_mention_no_cli_options(options: type) -> None:
    found = mentions()
    assert len(found) > 120
    with show_options_as_keywords(options):
        said = {place: format_option(*texts) for place, texts in found.items()}
    left = {place: text for place, text in said.items() if SPELLED.search(text)}
    assert not left, "name the function that has the option in `keywords.FUNCTIONS`"


@pytest.mark.parametrize(
    ("options", "of", "typed", "said"),
    [
        (("--assets DIR", "--trust-assets"), "", None, "`assets=DIR, trust_assets=True`"),
        (("--from torch",), "", None, "`format='torch'`"),
        (("--exclude x.*",), "", None, "`ckptctl.convert(exclude='x.*')`"),
        (("--exclude 'x *'",), "", None, "`ckptctl.convert(exclude='x *')`"),
        (("--to hf", "--overwrite"), "", None, "`ckptctl.convert(to='hf', overwrite=True)`"),
        (("--resume",), "convert", "`convert --resume`", "`ckptctl.convert(resume=True)`"),
        (("--mp",), "", None, "`mp` of `ckptctl.convert`"),
        (("--set h=8",), "", None, "`sizes={'h': 8}`"),
        (("--tag",), "", None, "`tag`"),
    ],
)
def test_spell_option_uses_cli_or_python_form(
    options: tuple[str, ...], of: str, typed: str | None, said: str
) -> None:
    assert format_option(*options, command=of) == (typed or f"`{' '.join(options)}`")
    with show_options_as_keywords(LoadOptions):
        assert format_option(*options, command=of) == said


def test_spell_option_applies_renaming() -> None:
    with rename_options_in_messages({"--from": "--format-a"}):
        assert format_option("--from hf", "--from-layout x") == "`--format-a hf --from-layout x`"
    with (
        show_options_as_keywords(LoadOptions),
        rename_options_in_messages({"--dtype": "cast=True"}),
    ):
        assert format_option("--dtype") == "`cast=True`"
