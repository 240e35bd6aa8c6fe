"""Write the descriptions of formats into ``docs/reference/formats.md``.

``python docs/generate_formats.py`` replaces the text between ``<!-- generated: KEY -->`` and
``<!-- end -->``, where KEY is ``written``, ``read only``, ``sidecar files`` or a format's name; the
rest is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptctl.cli.formats import format_layout, split_facts
from ckptctl.formats.sidecar_files import GLOBS_BY_KIND
from ckptctl.verbs.known_formats import KnownFormat, list_known_formats

PAGE = Path(__file__).parent / "reference" / "formats.md"
BLOCK = re.compile(r"(<!-- generated: ([^\n]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
WRITTEN = (
    *("format", "output", "layout", "non-tensor values", "tied tensors"),
    *("options for splitting", "sidecar files", "unsupported dtypes"),
)


def render() -> str:
    """Return the page. A format without a place is left out."""
    page = PAGE.read_text()
    blocks = {"written": _written(), "read only": _read_only(), "sidecar files": _sidecar_files()}
    blocks |= {one.format.name: _facts(one) for one in _built_in()}
    return BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n{match[3]}", page)


def _built_in() -> Iterator[KnownFormat]:
    return (one for one in list_known_formats() if one.package is None)


def _written() -> str:
    return _table(WRITTEN, (_written_row(one) for one in _built_in() if one.written))


def _written_row(known: KnownFormat) -> Iterator[str]:
    found = known.written
    assert found is not None
    yield _linked(known.format.name)
    yield "directory" if found.directory else "single file"
    yield format_layout(known.format)
    yield "kept" if found.leaves else "skipped"
    yield found.ties
    yield _quoted(found.cut_by) or "-"
    yield "copied" if found.side_files else "not copied"
    yield _quoted(found.lacks) or "-"


def _read_only() -> str:
    rows = ((_linked(o.format.name), o.format.title) for o in _built_in() if not o.written)
    return _table(("format", "description"), rows)


def _sidecar_files() -> str:
    return _table(
        ("kind", "file names"), ((kind, _quoted(names)) for kind, names in GLOBS_BY_KIND.items())
    )


def _facts(known: KnownFormat) -> str:
    texts = known.format
    proof = re.sub(r"tests/[\w/]+\.py", r"[`\g<0>`](../../\g<0>)", texts.proof)
    rows = (
        ("description", [texts.title]),
        ("detected by", split_facts(texts.recognized)),
        ("complete when", split_facts(texts.wholeness)),
        ("options", [f"`{one.option}`: {one.meaning}" for one in known.choices]),
        ("tested against", split_facts(texts.tested)),
        ("comparisons", split_facts(proof)),
    )
    named = ((name if not n else "", text) for name, texts in rows for n, text in enumerate(texts))
    return _table(("property", "value"), named)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = (names, ["---"] * len(names), *rows)
    return "".join(f"| {' | '.join(map(_cell, cells))} |\n" for cells in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _linked(name: str) -> str:
    return f"[`{name}`](#{name})"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render())
