"""The pages for contributors name files and things that are there."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.cli.commands import Command
from tests import vocabulary
from tests.conftest import DATA

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs/contributing").glob("*.md"))]
PATH = re.compile(r"`((?:ckptctl|converters|docs|tests)/[\w./-]*)`(?: \(`(\w+)`\))?")
NAME = re.compile(r"`((?:ckptctl|converters)(?:\.\w+)+)(?<!\.json)`")
STEP = re.compile(r"^\d+\. `([\w.]+)`", re.MULTILINE)
ARCHITECTURE = REPOSITORY / "docs/contributing/architecture.md"
WORDS = 40
"""The least that the glossary has."""


def named(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths that *page* names, and what it says stands there."""
    yield from PATH.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_symbols_named_in_contributor_pages_exist(page: Path) -> None:
    gone = [path for path, _ in named(page) if not (REPOSITORY / path).exists()]
    assert not gone, "named, and moved or removed"
    for path, thing in named(page):
        if thing:
            stands = rf"^\s*(?:class|(?:async )?def) {thing}\b|^{thing}\b[^=\n]*="
            assert re.search(stands, (REPOSITORY / path).read_text(), re.M), f"{thing} in {path}"


def resolve(name: str) -> object:
    """Import the module that *name* starts with, and return the attribute that the rest names."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AttributeError(f"no module `{parts[0]}`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_dotted_names_in_contributor_pages_resolve(page: Path) -> None:
    unknown = []
    for name in sorted({*NAME.findall(page.read_text())}):
        try:
            resolve(name)
        except AttributeError as error:
            unknown.append(f"{name}: {error}")
    assert not unknown, f"{page.name} names code that was moved or renamed; change the page"


def code_of(value: Any) -> CodeType:
    """Return the code of a function, or of the function of a command."""
    code: CodeType = inspect.unwrap(value.run if isinstance(value, Command) else value).__code__
    return code


def trace_first_calls(work: Callable[[], object]) -> list[CodeType]:
    """Return all functions that *work* calls, in any thread, in the order of their first calls."""
    called: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.setdefault(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(called)


def convert_a_sample(folder: Path) -> None:
    words = ("convert", str(DATA / "tiny-llama3-hf"), str(folder / "out"), "--to", "dcp")
    assert CliRunner().invoke(app, words).exit_code == 0


def save_a_state(folder: Path) -> None:
    ckptctl.save({"model": {"weight": torch.ones(3)}, "step": 1}, folder / "step-1")


@pytest.mark.parametrize(
    ("section", "work"), [("A conversion", convert_a_sample), ("A save", save_a_state)]
)
def test_architecture_steps_match_call_order(
    tmp_path: Path, section: str, work: Callable[[Path], object]
) -> None:
    _, _, text = ARCHITECTURE.read_text().partition(f"\n## {section}\n")
    names = STEP.findall(text.partition("\n## ")[0])
    assert len(names) > 5
    codes = {code_of(resolve(name)): name for name in names}
    called = trace_first_calls(lambda: work(tmp_path))
    assert [codes[code] for code in called if code in codes] == names


def test_architecture_page_is_at_most_105_lines() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) <= 105


def test_glossary_words_are_unique_sorted_and_linked_to_code() -> None:
    text, _, _ = vocabulary.GLOSSARY.read_text().partition(vocabulary.SECTION)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"][2:]
    words = [row[0] for row in rows]
    assert words == sorted(set(words))
    assert len(words) >= WORDS
    assert all(PATH.search(row[2]) for row in rows)
