"""Write what formats say of themselves into ``docs/reference/formats.md``.

``python docs/generate_formats.py`` replaces what stands between ``<!-- generated: KEY -->`` and
``<!-- end -->``, where KEY is ``written``, ``read only``, ``side files`` or a format's name; the
rest is by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptctl.cli.formats import layout
from ckptctl.formats.sidecar_files import KINDS
from ckptctl.ops.known_formats import KnownFormat, known_formats

PAGE = Path(__file__).parent / "reference" / "formats.md"
BLOCK = re.compile(r"(<!-- generated: ([^\n]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
WRITTEN = (
    *("format", "a directory", "layout", "leaves that are not tensors"),
    *("ties (shared tensors)", "cut into files by", "side files", "cannot hold"),
)


def render() -> str:
    """Return the page.

    Raises:
        LookupError: A format has no place in it.
    """
    page = PAGE.read_text()
    blocks = {"written": _written(), "read only": _read_only(), "side files": _side_files()}
    blocks |= {one.format.name: _facts(one) for one in _built_in()}
    lacking = blocks.keys() - {match[2] for match in BLOCK.finditer(page)}
    if lacking:
        raise LookupError(f"{PAGE.name} has no place for {', '.join(sorted(lacking))}")
    return BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n{match[3]}", page)


def _built_in() -> Iterator[KnownFormat]:
    return (one for one in known_formats() if one.package is None)


def _written() -> str:
    return _table(WRITTEN, (_written_row(one) for one in _built_in() if one.written))


def _written_row(known: KnownFormat) -> Iterator[str]:
    found = known.written
    assert found is not None
    yield _linked(known.format.name)
    yield "yes" if found.directory else "no, one file"
    yield layout(known.format)
    yield "kept" if found.leaves else "left out"
    yield found.ties
    yield _quoted(found.cut_by) or "-"
    yield "carried" if found.side_files else "stay behind"
    yield _quoted(found.lacks) or "-"


def _read_only() -> str:
    rows = ((_linked(o.format.name), o.format.title) for o in _built_in() if not o.written)
    return _table(("format", "what it is"), rows)


def _side_files() -> str:
    return _table(("kind", "names"), ((kind, _quoted(names)) for kind, names in KINDS.items()))


def _facts(known: KnownFormat) -> str:
    texts = known.format
    choices = "; ".join(f"`{one.option}`: {one.meaning}" for one in known.choices)
    rows = (
        ("what it is", texts.title),
        ("recognized by", texts.recognized),
        ("whole", texts.wholeness),
        ("choices", choices),
        ("proof", re.sub(r"tests/[\w/]+\.py", r"[`\g<0>`](../../\g<0>)", texts.proof)),
    )
    return _table(("", ""), (row for row in rows if row[1]))


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
