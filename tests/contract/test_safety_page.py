"""Each promise of the page on safety is held by a test that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/explanation/safety.md").read_text()
PROMISES = PAGE.partition("## Where each promise is tested")[2]
TESTS = re.findall(r"\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", PROMISES, re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test() -> None:
    rows = PROMISES.split("| --- | --- |\n")[1].partition("\n\n")[0]
    assert len(TESTS) == len(rows.strip().splitlines())
