"""Sentences of the pages that people read first are short."""

from __future__ import annotations

from pathlib import Path

from tests.vocabulary import ROOT, long_sentences, sentences

SHARE = 0.05
"""The most sentences of those that may be long."""
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorial").glob("*.md")),
    *sorted((ROOT / "docs/how-to").glob("*.md")),
]


def test_few_sentences_are_long() -> None:
    long = [f"{page.name}: {text}" for page in PAGES for text in long_sentences(page)]
    total = sum(1 for page in PAGES for _ in sentences(page))
    assert len(long) <= SHARE * total, "\n".join([f"{len(long)} of {total} are long", *long])


def test_long_sentences_skip_code_tables_and_link_targets(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = "word " * 24
    page.write_text(
        f"# A heading\n\n{words}last. `{words}` is code.\n\n| {words} | {words} |\n\n"
        f"```sh\n{words}{words}\n```\n\n* {words}[a link of five words](to/there.md).\n"
        f"* {words}last word.\n"
    )
    found = long_sentences(page)
    assert [text.split()[-1] for text in found] == ["words.", "word."]
    assert len(list(sentences(page))) == 5
