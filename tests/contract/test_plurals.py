"""No message writes the plural of a number itself: ``units.pluralize`` knows when there is one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.structure import nodes_of

PACKAGE = Path(__file__).parents[2] / "ckptctl"
PLURAL = re.compile(r"^ (?:(?!of )[a-z0-9]+ )?([a-z]{2,}s)\b")
"""A plural behind a number, perhaps with one adjective before it."""
NO_NOUNS = frozenset(
    (
        *("adds", "as", "asks", "begins", "belongs", "contradicts", "describes", "disagrees"),
        *("does", "follows", "has", "is", "its", "keeps", "lacks", "leaves", "lists", "names"),
        *("needs", "occurs", "overlaps", "passes", "records", "says", "states", "takes", "this"),
    )
)
NEVER_ONE = {
    ("ckptctl/errors.py", "more"),  # one other is named
    ("ckptctl/errors.py", "count"),  # a single type is named
    ("ckptctl/families.py", "len(known)"),  # the families of this package
    ("ckptctl/formats/__init__.py", "len(list_format_names())"),  # its formats
    ("ckptctl/formats/foreign.py", "len(format_names)"),
    ("ckptctl/formats/shared/findings.py", "len(wanted)"),  # the verb is that of those missing
    ("ckptctl/conversion/recognition/roots.py", "len(names)"),  # one is named
}
"""Files and expressions whose value is never one where the message is printed."""


def is_count(value: ast.FormattedValue) -> bool:
    """Return whether *value* is a number of things, and no constant of the program."""
    text = ast.unparse(value.value)
    spec = ast.unparse(value.format_spec) if value.format_spec else ""
    constant = re.fullmatch(r"[A-Z_]+(\.[A-Z_]+)*", text)
    return not constant and ("," in spec or text.startswith(("len(", "sum(")))


def own_plurals(file: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the f-strings among *nodes* with a number and a plural behind it."""
    for node in nodes:
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            found = PLURAL.match(str(text.value))
            known = (file, ast.unparse(value.value)) in NEVER_ONE
            if found and found[1] not in NO_NOUNS and is_count(value) and not known:
                yield f"{file}:{node.lineno}: {ast.unparse(node)}"


def test_messages_count_with_units_counted() -> None:
    found = [
        line
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in own_plurals(str(path.relative_to(PACKAGE.parent)), nodes_of(path))
    ]
    assert not found, "say it with `units.pluralize`:\n" + "\n".join(found)


def test_hand_written_plural_is_detected() -> None:
    assert [*own_plurals("x", ast.walk(ast.parse('f"lacks {number:,} tensors"')))]
    assert [*own_plurals("x", ast.walk(ast.parse('f"{len(names)} other files are missing"')))]
    assert not [*own_plurals("x", ast.walk(ast.parse('f"{LIMIT:,} tensors"')))]
    assert not [*own_plurals("x", ast.walk(ast.parse("f\"{pluralize(number, 'tensor')} here\"")))]
