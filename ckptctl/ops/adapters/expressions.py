"""Regular expressions from an adapter's configuration: none of them may take for ever to match.

Python's engine tries one way after the other to match an expression; how many there are can double
with every character of it. They are counted before anything is matched.

Source: ``get_pattern_key`` in peft's ``utils/other.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from ckptctl.errors import RefusedError, UnsupportedError

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!]|P<\w+>)|\(\??|\{\d*(?:,\d*)?\}|.",
    re.DOTALL,
)
_LENGTH = 64
_MOST = 1 << 20


def check_expressions(patterns: Mapping[str, object], where: str) -> None:
    """Refuse expressions that are malformed, or could keep the matching busy for hours.

    Raises:
        UnsupportedError: One of them is malformed.
        RefusedError: There are too many ways to match them.
    """
    for text in patterns:
        try:
            re.compile(text)
            _compiled(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UnsupportedError(
                f"`{_short(text)}` is malformed", where=where, why=str(error)
            ) from error
    ways = 0.0
    for text in patterns:
        ways += _ways(text)
        if ways > _MOST:
            raise RefusedError(
                f"`{_short(text)}` is too complicated",
                where=where,
                why="repetitions and alternatives inside of each other take for ever to match",
                hint="write the names of the modules out",
            )


def matching(patterns: Mapping[str, float], module: str, otherwise: float | None) -> float | None:
    """Return the value of the first pattern that *module* ends with, as PEFT looks it up."""
    for key, value in patterns.items():
        if _compiled(key).match(module):
            return value
    return otherwise


@lru_cache(maxsize=1 << 14)
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({text})$")


def _ways(text: str) -> float:
    """Return about how many ways there are to match *text*; infinite: not known.

    A repetition that is part of a repetition, and what changes how the rest is to be read, count
    as infinitely many.
    """
    ways, before = 1.0, ""
    alternatives = [1]
    for token in _TOKEN.findall(text):
        repeats = token in ("*", "+") or (token[0] == "{" and len(token) > 1)
        if token == "(?" or (repeats and (before == ")" or before in ("*", "+", "?", "}"))):
            return math.inf
        if token[0] == "(":
            alternatives.append(1)
        elif token == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        elif token == "|":
            alternatives[-1] += 1
        else:
            ways *= _LENGTH if repeats else 2 if token == "?" else 1
        before = "}" if repeats and token[0] == "{" else token
    return ways * math.prod(alternatives)


def _short(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"
