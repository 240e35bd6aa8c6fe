"""The regular expressions of the package, and input on which each of them may take long.

They are found in the sources: the literal arguments of ``re.compile``, ``re.search``, ... and the
expressions that are made of constants of their module. What is formatted into one and not known
before it runs stands for a word.
"""

from __future__ import annotations

import ast
import importlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any, cast

import ckptctl
import converters

FUNCTIONS = frozenset(
    {"compile", "match", "fullmatch", "search", "findall", "finditer", "sub", "subn", "split"}
)
SEARCHES = frozenset({"search", "findall", "finditer", "sub", "subn", "split"})
CALL = re.compile(rf"\bre\.(?:{'|'.join(sorted(FUNCTIONS))})\b")
SEARCH = re.compile(rf"\.(?:{'|'.join(sorted(SEARCHES))})\b")
WORD = "word0"
SAMPLES = " \n\t\r0a_.-:,/\\\"'([{<=+*|x9Z\x00é"
"""One character, at least, of each class that the patterns have."""
FAILING = ("", "\x00", "!", "\n!", "a", "0")
"""What follows the repetition, so that a match fails at the end."""


@dataclass(frozen=True)
class Found:
    """A pattern in the sources.

    Attributes:
        place: File and line.
        pattern: Its text.
        flags: As numbers.
        searches: Whether it is looked for anywhere in a text.
    """

    place: str
    pattern: str | bytes
    flags: int
    searches: bool


@cache
def patterns() -> tuple[Found, ...]:
    """Return all patterns of the package and of the tables."""
    return tuple(_all())


def _all() -> Iterator[Found]:
    sources, searched = {}, set[str]()
    for package in (ckptctl, converters):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            source = path.read_text("utf-8")
            if not (CALL.search(source) or SEARCH.search(source)):
                continue
            nodes = [*ast.walk(ast.parse(source))]
            searched |= {*_searched(nodes)}
            if CALL.search(source):
                name = ".".join([package.__name__, *path.relative_to(root).with_suffix("").parts])
                sources[name.removesuffix(".__init__")] = (path, nodes)
    for name, (path, nodes) in sources.items():
        place = f"{path.parent.name}/{path.name}"
        for node, owner in _calls(nodes):
            if not node.args:
                continue
            function = node.func.attr  # type: ignore[attr-defined]
            text = _text(node.args[0], name)
            if not isinstance(text, str | bytes):  # a pattern that is compiled elsewhere
                continue
            position = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(function, 2)
            given = [keyword.value for keyword in node.keywords if keyword.arg == "flags"]
            given += node.args[position : position + 1]
            flags = sum(int(_value(one, name)) for one in given)
            searches = function in SEARCHES or (function == "compile" and bool({*owner} & searched))
            yield Found(f"{place}:{node.lineno}", text, flags, searches)


def _searched(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of what is looked for anywhere: ``NAME.search``, ``re.search(NAME, ...)``."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in SEARCHES:
            yield from _names(node.value)
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            yield from _names(node.args[0]) if node.func.attr in SEARCHES else ()


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Call):
        yield f"@{node.lineno}:{node.col_offset}"


def _calls(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.Call, tuple[str, ...]]]:
    """Yield the calls of functions of :mod:`re`, and what their results are called."""
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in FUNCTIONS
    ]
    lines = sorted(call.lineno for call in calls)
    named: dict[int, tuple[str, ...]] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.keyword):
            continue
        if bisect_left(lines, node.lineno) == bisect_right(lines, node.end_lineno or node.lineno):
            continue  # it contains no call
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        names = [
            name
            for target in targets
            for part in ast.walk(
                target if isinstance(node, ast.Assign) else getattr(node, "target", ast.Pass())
            )
            for name in _names(part)
        ]
        if isinstance(node, ast.keyword) and node.arg:
            names.append(node.arg)
        for inner in ast.walk(node.value) if node.value else ():
            named[id(inner)] = (*named.get(id(inner), ()), *names)
    for call in calls:
        yield call, (*named.get(id(call), ()), f"@{call.lineno}:{call.col_offset}")


def _text(node: ast.expr, module: str) -> object:
    """Return the pattern that an expression is, names that are not known replaced by a word."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_text(part, module)) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        found = _value(node.value, module)
        return (
            found.pattern if isinstance(found, re.Pattern) else found if found is not None else WORD
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts: list[Any] = [_text(node.left, module), _text(node.right, module)]
        binary = any(isinstance(part, bytes) for part in parts)
        empty: Any = WORD.encode() if binary else WORD
        left, right = (cast(Any, empty if part is None else part) for part in parts)
        return left + right
    found = _value(node, module)
    return found.pattern if isinstance(found, re.Pattern) else found


def _value(node: ast.expr, module: str) -> Any:
    """Return what an expression of constants of its module is; None: others are in it."""
    loaded: ModuleType = importlib.import_module(module)
    try:
        return eval(compile(ast.Expression(node), module, "eval"), {**vars(loaded)})
    except Exception:
        return None


# ---------------------------------------------------------------------------------------- input


def adversarial(pattern: re.Pattern[Any], length: int) -> Iterator[str | bytes]:
    """Yield texts on which *pattern* may take more than linear time.

    Each repetition in it is repeated, with one character or what its body looks like, after what
    comes before it, and so is that together with it.
    """
    seen: set[tuple[str, str]] = set()
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    for before, pump in _pumps(list(tree), ""):
        if not pump or (before, pump) in seen:
            continue
        seen.add((before, pump))
        for body, count in (
            (pump, length // len(pump)),
            (before + pump, length // len(before + pump)),
        ):
            for failing in FAILING:
                text = before + body * count + failing
                yield (
                    text.encode("latin-1", "replace")
                    if isinstance(pattern.pattern, bytes)
                    else text
                )


def _pumps(nodes: list[Any], before: str) -> Iterator[tuple[str, str]]:
    """Yield what comes before each repetition, and what it may repeat."""
    for position, (op, value) in enumerate(nodes):
        if op in _REPEATS:
            _, most, body = value
            if most == ops.MAXREPEAT or most > 100:
                inner = list(body)
                for sample in _samples(inner):
                    yield before, sample
                # what follows may begin with the same characters
                following = _sample(nodes[position + 1 :])
                if following:
                    yield before, _sample(inner) + following
            yield from _pumps(list(body), before)
        for inner in _inside(op, value):
            yield from _pumps(inner, before)
        before += _sample([(op, value)])


_REPEATS = {ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT}


def _inside(op: Any, value: Any) -> Iterator[list[Any]]:
    if op is ops.SUBPATTERN:
        yield list(value[-1])
    elif op is ops.ATOMIC_GROUP:
        yield list(value)
    elif op in (ops.ASSERT, ops.ASSERT_NOT):
        yield list(value[1])
    elif op is ops.BRANCH:
        yield from (list(branch) for branch in value[1])
    elif op is ops.GROUPREF_EXISTS:
        yield from (list(branch) for branch in value[1:] if branch)


def _samples(nodes: list[Any]) -> Iterator[str]:
    """Yield texts that one round of a repetition takes."""
    if len(nodes) == 1 and nodes[0][0] in (ops.IN, ops.ANY, ops.NOT_LITERAL, ops.CATEGORY):
        yield from _characters(*nodes[0])
        return
    yield _sample(nodes)
    if len(nodes) == 1 and nodes[0][0] is ops.BRANCH:
        yield from (_sample(list(branch)) for branch in nodes[0][1][1])


def _sample(nodes: list[Any]) -> str:
    """Return a text that matches *nodes*, roughly."""
    found = ""
    for op, value in nodes:
        if op is ops.LITERAL:
            found += chr(value)
        elif op in (ops.IN, ops.ANY, ops.NOT_LITERAL, ops.CATEGORY):
            found += next(_characters(op, value), "")
        elif op in _REPEATS:
            least, most, body = value
            found += _sample(list(body)) * (least or min(1, most))
        elif op is ops.BRANCH:
            found += _sample(list(value[1][0]))
        elif op is ops.SUBPATTERN:
            found += _sample(list(value[-1]))
        elif op is ops.ATOMIC_GROUP:
            found += _sample(list(value))
    return found


def _characters(op: Any, value: Any) -> Iterator[str]:
    """Yield samples of what a class of characters takes."""
    takes = _takes(op, value)
    yield from (one for one in SAMPLES if takes(one))
    if op is ops.IN:
        for kind, part in value:
            if kind is ops.LITERAL and chr(part) not in SAMPLES:
                yield chr(part)


def _takes(op: Any, value: Any) -> Callable[[str], bool]:
    if op is ops.ANY:
        return lambda one: one != "\n"
    if op is ops.NOT_LITERAL:
        return lambda one: ord(one) != value
    parts = value if op is ops.IN else [(op, value)]
    return lambda one: _matches(parts, one)


_CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}


def _matches(parts: Any, one: str) -> bool:
    negated, matched = False, False
    for kind, part in parts:
        if kind is ops.NEGATE:
            negated = True
        elif kind is ops.LITERAL:
            matched |= ord(one) == part
        elif kind is ops.RANGE:
            matched |= part[0] <= ord(one) <= part[1]
        elif kind is ops.CATEGORY:
            matched |= re.match(_CATEGORIES[part], one) is not None
    return matched is not negated
