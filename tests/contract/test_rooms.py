"""Rooms of the program: the core imports no extension, and no modules import each other.

``rooms.txt`` lists the exceptions of today: imports by their rooms, and circles. It may only
shrink. After removing an exception from the code, delete its line, or rewrite the list, which keeps
only what is listed already. The same command rewrites the picture and the figures in
``docs/contributing``:

    CKPTCTL_UPDATE_SNAPSHOTS=1 pytest -n 0 tests/contract/test_rooms.py
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import structure
from tests.structure import circles, edges, imports, own, room, violations

LIST = Path(__file__).parent / "rooms.txt"
CIRCLE = "circle"
UPDATE = "run CKPTCTL_UPDATE_SNAPSHOTS=1 python -m tests.structure"
LINES = "lines of `ckptctl` and `converters`"
ROUGH = {
    *(LINES, "modules of `ckptctl`", "private functions named at one other place"),
    *("modules with one importer", "imports of own modules inside functions"),
}
TOLERANCE = 0.01
STEP = 3
DRIFT = 0.1
NUMBER = re.compile(r"\d[\d,]*(?= )")
Sections = list[tuple[str, list[str]]]


def read_list() -> Sections:
    """Return the sections of the list: a heading in brackets, then a line per entry."""
    found: Sections = []
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            found.append((line.strip("[]"), []))
        elif line and not line.startswith("#"):
            found[-1][1].append(line)
    return found


def write_list(listed: Sections) -> None:
    """Replace the sections of the list."""
    text = LIST.read_text()
    head = text[: text.find("[")]
    blocks = ("\n".join((f"[{heading}]", *lines)) for heading, lines in listed)
    LIST.write_text(head + "\n\n".join(blocks) + "\n")


def sections(pairs: Iterable[tuple[str, str]], groups: Iterable[list[str]]) -> Sections:
    """Return the list that admits imports *pairs* and circles *groups*."""
    found = defaultdict(list)
    for importer, imported in sorted(pairs):
        found[f"{room(importer)} imports {room(imported)}"].append(f"{importer} {imported}")
    return [*sorted(found.items()), *((CIRCLE, group) for group in groups)]


def exceptions(listed: Sections) -> tuple[set[tuple[str, str]], list[list[str]]]:
    """Return the imports and the circles that *listed* admits."""
    lines = (line for heading, lines in listed if heading != CIRCLE for line in lines)
    pairs = {(first, second) for first, second in map(str.split, lines)}
    return pairs, [lines for heading, lines in listed if heading == CIRCLE]


def test_import_exceptions_never_grow() -> None:
    allowed, known = exceptions(read_list())
    pairs = violations(own(imports()))
    groups = circles(edges(own(imports())))
    new = [str(i) for i in own(imports()) if (i.importer, i.imported) in pairs - allowed]
    assert not new, "imports against the directions:\n  " + "\n  ".join(sorted(new))
    larger = [" ".join(group) for group in groups if not any(set(group) <= set(k) for k in known)]
    assert not larger, "modules that import each other:\n  " + "\n  ".join(larger)
    current = sections(pairs, groups)
    if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
        write_list(current)
    unneeded = sorted(allowed - pairs), [group for group in known if group not in groups]
    assert read_list() == current, f"remove from {LIST.name}: {unneeded}"


def test_rooms_match_existing_modules() -> None:
    assert structure.ROOMS.keys() == structure.LEVEL.keys() == set(map(room, structure.trees()))
    modules = {name.removesuffix(".__init__") for name in structure.PLACES}
    assert modules <= structure.trees().keys(), "remove these modules from ROOMS"


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("ckptctl.planner.boxes", "from ckptctl.facts import params"),
        ("ckptctl.storage.publish", "def f():\n    import ckptctl.remote.trees"),
        ("ckptctl.conversion.plan", "from ckptctl.formats.hf import files"),
        ("ckptctl.formats", "try:\n    from ckptctl.formats import hf\nexcept OSError:\n    pass"),
        ("ckptctl.errors", "from ckptctl.runs import names"),
        ("ckptctl.formats.hf", "from ckptctl.verbs.inspection import inspect"),
        (
            "ckptctl.runs.names",
            "class A:\n    def f(self):\n        from ckptctl.cli import ls",
        ),
    ],
)
def test_import_against_layer_direction_is_detected(importer: str, source: str) -> None:
    items = structure.imports_of(importer, ast.parse(source), structure.trees())
    assert len(violations(items)) == 1


def test_import_of_core_by_format_is_allowed() -> None:
    tree = ast.parse("from ckptctl.formats import base\nimport ckptctl.errors")
    items = structure.imports_of("ckptctl.formats.hf", tree, structure.trees())
    assert not violations(items)


def test_import_cycles_are_detected() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}}
    assert circles(graph | {"g": {"f", "a"}}) == [["a", "b", "c"], ["f", "g"]]
    assert circles(graph) == [["a", "b", "c"]]


def test_structure_figures_of_page_are_current() -> None:
    """A figure must not become worse, and one that becomes better may wait for an update.

    So small changes and new commands do not all edit the same lines of the page. Those in ``ROUGH``
    may grow by ``TOLERANCE`` or ``STEP``, and lines shrink by the former. Circles and exceptions
    are exactly as stated.
    """
    counts = structure.figures()
    if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
        structure.write_block(structure.FIGURES, structure.render(counts))
    stated = structure.stated()
    assert stated.keys() == counts.keys(), UPDATE
    worse = {
        name: f"{stated[name]:,} -> {count:,}"
        for name, count in counts.items()
        if count > stated[name] + (name in ROUGH) * max(STEP, stated[name] * TOLERANCE)
    }
    assert not worse, worse
    exact = [name for name in counts if "circles" in name or "exceptions" in name]
    assert {name: counts[name] for name in exact} == {name: stated[name] for name in exact}, UPDATE
    assert counts[LINES] >= stated[LINES] * (1 - TOLERANCE), UPDATE


def test_module_diagram_of_page_is_current() -> None:
    """Numbers may differ by ``DRIFT``: small changes need no new picture."""
    drawn = structure.draw_rooms()
    if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
        structure.write_block(structure.PICTURE, drawn)
    shown = structure.read_block(structure.PICTURE)
    assert NUMBER.sub("#", shown) == NUMBER.sub("#", drawn), UPDATE
    for stated, actual in zip(NUMBER.findall(shown), NUMBER.findall(drawn), strict=True):
        count = int(actual.replace(",", ""))
        assert abs(int(stated.replace(",", "")) - count) <= max(2, count * DRIFT), UPDATE
