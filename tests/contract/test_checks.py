"""The files that say how things are checked name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def sessions() -> set[str]:
    tree = ast.parse((REPOSITORY / "noxfile.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if "nox.session" in map(ast.unparse, _called(node))}


def _called(function: ast.FunctionDef) -> list[ast.expr]:
    return [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]


def test_nox_sessions_named_in_contributing_and_ci_exist() -> None:
    text = "".join((REPOSITORY / name).read_text() for name in ("CONTRIBUTING.md", ".ci/run"))
    named = re.findall(r"(?:nox -s|^ *session) ([a-z]+(?: [a-z]+)*)", text, re.MULTILINE)
    assert {word for words in named for word in words.split()} <= sessions()
    assert {"lint", "types", "slow", "oracles", "servers", "docs", "wheel"} <= sessions()


def test_paths_named_in_contributing_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"\b((?:ckptctl|converters|tests|docs)/[\w./-]*)", text))
    assert len(paths) > 10
    assert not [path for path in paths if not (REPOSITORY / path).exists()]
