"""Words not to use, looked up in everything that a user reads: ``python -m tests.vocabulary``.

The words are those of the last section of ``docs/contributing/glossary.md``. A user reads pages,
help, messages, what ``--json`` documents are described with, and the docstrings of the public API.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.structure import nodes_of

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "contributing" / "glossary.md"
SECTION = "## Words not to use"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
TARGET = re.compile(r"\]\([^)]*\)")
NOT_PROSE = (
    (FENCED, "\n"),
    (re.compile(r"<!--.*?-->|</?\w+>", re.DOTALL), "\n"),
    (re.compile(r"^\s*\|.*$", re.MULTILINE), ""),
    (re.compile(r"(`+)[^`]+?\1"), "`code`"),
    (re.compile(r"!?\[((?:[^][]|\[[^][]*\])*)\]\([^)\s]*\)"), r"\1"),
)
"""What is no sentence of a page, and what it becomes, in this order."""
WORDS = 25
"""The most words that a sentence should have."""
SPELLINGS = (
    r"(quantis|recognis|initialis|serialis|normalis|organis|optimis(?!t)|randomis|summaris"
    r"|minimis|maximis|generalis|specialis|materialis|synchronis|parallelis(?!m)|customis"
    r"|analys(?=e[ds]?\b|ing)|colour|behaviour|neighbour|favour|honour|centre\b|licence|catalogue"
    r"|artefact|labelled|modelled|travelled|journalled|towards|whilst|amongst|\bgrey\b)"
)
SPELLING = re.compile(SPELLINGS)
BRITISH = re.compile(rf"\w*{SPELLINGS}\w*", re.IGNORECASE)


@dataclass(frozen=True)
class Word:
    """A word or phrase that pages and messages avoid.

    Attributes:
        pattern: Finds it.
        instead: Words to use.
        allowed: Finds the uses that stay, which :attr:`pattern` finds, too.
    """

    pattern: re.Pattern[str]
    instead: str
    allowed: re.Pattern[str] | None

    def uses(self, text: str) -> Iterator[re.Match[str]]:
        """Yield every use in *text* that is not allowed."""
        spans = [m.span() for m in self.allowed.finditer(text)] if self.allowed else []
        for match in self.pattern.finditer(text):
            if not any(start <= match.start() and match.end() <= end for start, end in spans):
                yield match


@cache
def words() -> tuple[Word, ...]:
    """Return the words of the glossary's table: the word, its replacement, uses that stay."""
    _, _, section = GLOSSARY.read_text().partition(SECTION)
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) ?\|$", section, re.MULTILINE)
    return tuple(
        Word(_any_of(avoided), instead, _any_of(allowed) if "`" in allowed else None)
        for avoided, instead, allowed in rows
    )


@cache
def _some_word() -> re.Pattern[str]:
    """Return a pattern for all words in lower case: most texts have none of them."""
    return re.compile("|".join(word.pattern.pattern.lower() for word in words()))


def _any_of(cell: str) -> re.Pattern[str]:
    """Return a pattern for the phrases that *cell* quotes; ``...`` stands for up to three words."""
    phrases = (re.escape(phrase) for phrase in re.findall(r"`([^`]+)`", cell))
    spaced = (phrase.replace(r"\ \.\.\.\ ", r"\s+(?:[\w'-]+\s+){0,3}?") for phrase in phrases)
    joined = "|".join(phrase.replace(r"\ ", r"\s+") for phrase in spaced)
    return re.compile(rf"\b(?:{joined})\b", re.IGNORECASE)


def prose(page: str) -> str:
    """Return a page's text with blocks, code and link targets blanked out, lines kept."""
    for pattern in (FENCED, CODE, TARGET):
        page = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), page)
    return page


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a page's prose: not of its code blocks, tables and comments.

    A code span counts as one word, a link as its text.
    """
    page = path.read_text()
    for pattern, replacement in NOT_PROSE:
        page = pattern.sub(replacement, page)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.|#+) )", page):
        text = re.sub(r"^\s*(?:[*>-]|\d+\.|#+) ", "", paragraph)
        for sentence in re.split(
            r"(?<=[.!?])[)*_\"]*\s+(?=[A-Z`*_(\"\[\d]|ckptctl\b|torch\b)", " ".join(text.split())
        ):
            if re.search(r"\w", sentence):
                yield sentence


def long_sentences(path: Path) -> list[str]:
    """Return the sentences of a page's prose that have more than :data:`WORDS` words."""
    return [text for text in sentences(path) if len(re.findall(r"\S*\w\S*", text)) > WORDS]


def pages() -> Iterator[Path]:
    """Yield every page."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def modules() -> Iterator[Path]:
    """Yield every module that may print something."""
    for folder in ("ckptctl", "converters"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def messages(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string of a module that may be shown: of several words."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
                else "{}"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in docstrings | bare and re.search(r"[A-Za-z}`]\s+[`{A-Za-z]", text):
            yield node.lineno, text


def violations(path: Path) -> Iterator[str]:
    """Yield every word of *path* that is not to be used, with its place and what to use."""
    name = path.relative_to(ROOT)
    if path.suffix == ".py":
        texts = dict.fromkeys(messages(nodes_of(path)))
    else:
        content = path.read_text()
        content = content.partition(SECTION)[0] if path == GLOSSARY else content
        texts = dict.fromkeys([(1, prose(content))])
    for line, text in texts:
        lower = text.lower()
        if not _some_word().search(lower) and not SPELLING.search(lower):
            continue
        for word in words():
            for match in word.uses(text):
                place = line + text.count("\n", 0, match.start()) if path.suffix != ".py" else line
                yield f"{name}:{place}: `{match[0]}` (use {word.instead}): {_around(text, match)}"
        for match in BRITISH.finditer(text):
            place = line + text.count("\n", 0, match.start()) if path.suffix != ".py" else line
            yield f"{name}:{place}: `{match[0]}` (American spelling)"


def _around(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(0, match.start() - 50) : match.end() + 30].split())


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT]
    for path in (*pages(), *modules()):
        if any(path.is_relative_to(place) for place in chosen):
            print(*violations(path), sep="\n", end="\n" if [*violations(path)] else "")
