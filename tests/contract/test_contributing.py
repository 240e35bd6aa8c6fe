"""The pages for contributors name files and things that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import vocabulary

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs/contributing").glob("*.md"))]
PATH = re.compile(r"`((?:ckptctl|converters|docs|tests)/[\w./-]*)`(?: \(`(\w+)`\))?")
WORDS = 40
"""The least that the glossary has."""


def named(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths that *page* names, and what it says stands there."""
    yield from PATH.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    gone = [path for path, _ in named(page) if not (REPOSITORY / path).exists()]
    assert not gone, "named, and moved or removed"
    for path, thing in named(page):
        if thing:
            stands = rf"^\s*(?:class|(?:async )?def) {thing}\b|^{thing}\b[^=\n]*="
            assert re.search(stands, (REPOSITORY / path).read_text(), re.M), f"{thing} in {path}"


def test_the_glossary_has_its_words_once_in_order_and_each_with_a_place() -> None:
    text, _, _ = vocabulary.GLOSSARY.read_text().partition(vocabulary.SECTION)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"][2:]
    words = [row[0] for row in rows]
    assert words == sorted(set(words))
    assert len(words) >= WORDS
    assert all(PATH.search(row[2]) for row in rows)
