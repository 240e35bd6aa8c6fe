"""Help texts: how each is worded, where the help shows it, and what ``-h`` leaves to ``--help``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from ckptctl.api.conversion import _Conversion, _Merge
from ckptctl.api.reading import _Report
from ckptctl.cli.app import app
from ckptctl.cli.commands import MAX_SHORT_HELP_OPTIONS, Command, iterate_commands
from ckptctl.distributed.background.async_save import _AsyncSaveOptions
from ckptctl.distributed.dcp.storage_reader import _ReaderOptions
from ckptctl.distributed.loading.state_options import LoadCallOptions
from ckptctl.distributed.run.manager_options import FinalOptions, ManagerOptions
from ckptctl.distributed.saving.save import _SaveCallOptions
from ckptctl.options import DeclaredOption, Panel, list_options
from tests.vocabulary import BRITISH, words

COMMANDS = {one.name: one for one in iterate_commands()}
GROUP: Any = typer.main.get_command(app)
IN_PYTHON = (
    *(
        LoadCallOptions,
        ManagerOptions,
        FinalOptions,
        _AsyncSaveOptions,
        _Conversion,
        _Merge,
        _ReaderOptions,
    ),
    *(_Report, _SaveCallOptions),
)
SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
DEFAULT = re.compile(r"\s\s\[default: [^\[\]]+\]$")
LONGEST = 25
ADVERBS = {"if", "unless", "where", "when", "what", "which", "how", "whether", "else", "or", "as"}
"""Words that begin no help: each begins with a verb or a noun."""
SHORT = 80
"""Columns of a terminal on which ``-h`` has one line for each option."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield every help text, with what it is of."""
    for name, command in COMMANDS.items():
        yield from (
            (f"{name} {one.display_name}", one.option.help) for one in command.list_parameters()
        )
    for options in IN_PYTHON:
        for one in list_options(options):
            yield f"{options.__name__}.{one.name}", one.option.help
            if one.option.python:
                yield f"{options.__name__}.{one.name} in Python", one.option.python
    for parameter in GROUP.params:
        yield f"ckptctl {parameter.opts[-1]}", parameter.help


TEXTS = {text: name for name, text in texts()}
PROSE = {" ".join((one.run.__doc__ or "").split()): name for name, one in COMMANDS.items()}


@pytest.mark.parametrize("text", TEXTS, ids=TEXTS.get)
def test_help_starts_with_capital_and_ends_with_period(text: str) -> None:
    prose = DEFAULT.sub("", text)
    assert prose.endswith("."), text
    assert "[default" not in prose, text
    first = re.match(r"[A-Z][\w-]*\b", prose)
    assert first and first[0].lower() not in ADVERBS, text


@pytest.mark.parametrize("text", [*TEXTS, *PROSE], ids=(TEXTS | PROSE).get)
def test_help_has_short_sentences_of_agreed_words(text: str) -> None:
    assert ";" not in text
    for sentence in SENTENCES.split(DEFAULT.sub("", text)):
        assert len(sentence.split()) <= LONGEST, sentence
    found = [match[0] for word in words() for match in word.uses(text)]
    assert not found and not BRITISH.search(text), (found, text)


def test_help_panels_have_agreed_names() -> None:
    assert get_args(Panel) == (
        *("Common", "Run", "Select", "Format and model", "Output", "Safety", "Performance"),
        "Advanced",
    )
    found = {one.option.panel for command in COMMANDS.values() for one in command.list_parameters()}
    assert found == set(get_args(Panel))


@pytest.mark.parametrize(
    ("panel", "options"),
    [
        ("Performance", ("--jobs", "--memory", "--no-checksum")),
        ("Format and model", ("--model-type", "--tied", "--vocab-size", "--experts", "--untie")),
        ("Advanced", ("--rules", "--ranks", "--stack-layers", "--single-process", "--converter")),
    ],
)
def test_options_are_in_expected_help_panel(panel: str, options: tuple[str, ...]) -> None:
    panels = {one.display_name: one.option.panel for one in COMMANDS["convert"].list_parameters()}
    assert {panels[option] for option in options} == {panel}


def options_of(command: Command) -> list[DeclaredOption]:
    return [one for one in command.list_parameters() if type(one.option).__name__ == "Option"]


def shown(*line: str) -> str:
    found = CliRunner().invoke(app, line, prog_name="ckptctl", terminal_width=SHORT)
    assert found.exit_code == 0 and not found.stderr
    return found.stdout


def listed(text: str) -> set[str]:
    """Return the options that a help lists, by their long names."""
    _, _, panels = re.split(r"^(Common|Options):$", text, maxsplit=1, flags=re.MULTILINE)
    rows = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", panels, re.MULTILINE)
    assert len(rows) == len(set(rows))
    return set(rows)


@pytest.mark.parametrize("name", COMMANDS)
def test_long_help_lists_all_options(name: str) -> None:
    known = {one.display_name for one in options_of(COMMANDS[name])}
    text = shown(name, "--help")
    assert listed(text) == known | {"--help"}
    assert shown("help", name) == text


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_lists_common_and_brief_options(name: str) -> None:
    command, long, short = COMMANDS[name], shown(name, "--help"), shown(name, "-h")
    options = options_of(command)
    count = len(options) + 1
    if count <= MAX_SHORT_HELP_OPTIONS:
        assert short == long
        return
    summary = (command.run.__doc__ or "").partition("\n")[0]
    assert f"\n\n  {summary}\n\n" in short
    brief = {
        one.display_name for one in options if one.option.brief or one.option.panel == "Common"
    }
    assert listed(short) == brief | {"--help"} and len(brief) + 1 < count
    assert short.endswith(f"\n\n`ckptctl {name} --help` lists all {count} options\n")
    assert "Examples:\n" in short and "Arguments:\n" in short
    # The formats that can be written have to be there, and take two lines.
    rows = re.findall(r"^  (?:-\w, )?--.*\n(?:       .*\n)+", short, re.MULTILINE)
    assert [row for row in rows if not row.lstrip().startswith(("--to ", "--keep-best "))] == []


def test_joined_flags_with_h_print_short_help() -> None:
    assert shown("convert", "-nh") == shown("convert", "-h") != shown("convert", "-n", "--help")
    without = CliRunner().invoke(app, ["convert"], prog_name="ckptctl")
    assert without.exit_code == 2 and without.stderr.rstrip("\n") == shown("convert", "-h").rstrip()
