"""Pages, help and messages use the words of the glossary, and none that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vocabulary import ROOT, modules, pages, violations, words


@pytest.mark.parametrize(
    "path", [*pages(), *modules()], ids=lambda path: str(path.relative_to(ROOT))
)
def test_text_uses_no_replaced_words(path: Path) -> None:
    found = [*violations(path)]
    assert not found, "\n".join(found)


def test_glossary_words_are_parsed() -> None:
    """A glossary with another layout would leave nothing to look for."""
    assert len(words()) > 30
    whole = next(word for word in words() if word.pattern.fullmatch("make it whole"))
    assert whole.instead == "complete"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ValueError("the file is torn")', "torn"),
        ('what = f"{name} lacks a tensor"', "lacks"),
        ('what = (\n    "nothing is said "\n    "of the file"\n)', "said"),
        ('help = "a second file of\\nits kind"', "of\nits kind"),
        ('what = "the colour of a file"', "colour"),
        ('what = "evidence of a torn write"', ""),
        ('"""It lacks a tensor."""', ""),
        ("lacks = 1  # it lacks a tensor", ""),
        ('name = "lacks"', ""),
    ],
)
def test_violations_are_found_in_message_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: str
) -> None:
    monkeypatch.setattr("tests.vocabulary.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(source)
    lines = list(violations(tmp_path / "module.py"))
    assert bool(lines) == bool(found)
    assert all(f"`{found}`" in line for line in lines)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("A page that says what it shows.", "says"),
        ("A page\nof whole\ncheckpoints.", "whole\ncheckpoints"),
        ("`says` and [a link](says.md)\n\n```console\n$ says\n```\n", ""),
    ],
)
def test_violations_are_found_in_prose_of_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, found: str
) -> None:
    monkeypatch.setattr("tests.vocabulary.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page)
    lines = list(violations(tmp_path / "page.md"))
    assert bool(lines) == bool(found)
    assert all(f"`{found}`" in line for line in lines)
