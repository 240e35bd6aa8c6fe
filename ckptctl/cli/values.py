"""Values of parameters that need no conversion are taken as they are.

Typer 0.29 has pydantic convert every value, defaults as well: importing it and building a model for
each parameter takes longer than most commands. What is not sure to come out the same without it is
left to Typer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

DIGITS = 18
"""So many make a number that fits into 64 bits."""


NUMBERS: dict[Any, tuple[re.Pattern[str], str]] = {
    int: (re.compile(r"\s*[-+]?[0-9][0-9_]*(\.0*)?\s*"), "a whole number"),
    float: (
        re.compile(
            r"\s*[-+]?(nan|inf(inity)?|([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(e[-+]?[0-9]+)?)\s*",
            re.IGNORECASE,
        ),
        "a number",
    ),
}


class _UnsureError(Exception):
    """Typer has to say what a value means."""


# Typer's own classes are not public, hence Any.
def plain(params: list[Any]) -> list[Any]:
    """Let the parameters of a Typer command take plain values as they are, and return them."""
    for param in params:
        if hasattr(param, "type_descriptor") and "process_value" not in vars(param):
            param.process_value = partial(_processed, param, param.process_value)
    return params


def _processed(param: Any, process: Callable[[Any, Any], Any], context: Any, given: Any) -> Any:
    try:
        value = _meant(param, given)
    # A parser's ValueError becomes a message there; Typer's attributes may be others one day.
    except (_UnsureError, ValueError, AssertionError, AttributeError):
        return process(context, given)
    if param.required and param.value_is_missing(value):
        return process(context, given)
    return value if param.callback is None else param.callback(context, param, value)


def _meant(param: Any, value: Any) -> Any:
    """Return what Typer would make of *value*.

    Raises:
        _UnsureError: That is not sure.
    """
    kind, parser = param.type_descriptor.annotation, param.type_descriptor.parameter_info.parser
    several = param.multiple or param.nargs != 1
    if value is None and param.nargs in (1, -1):
        return () if several else None
    if several and parser is None and kind == list[str] and isinstance(value, (list, tuple)):
        if all(type(one) is str for one in value):
            return list(value)
    elif not several and parser is not None:
        return parser(value)
    elif not several and kind in (bool, int, str) and not param.type_descriptor.is_ranged:
        if type(value) is kind:
            return value
        if kind is int and value.isascii() and value.isdigit() and len(value) <= DIGITS:
            return int(value)
    if not several and parser is None and kind in NUMBERS and isinstance(value, str):
        _require_number(kind, value)
    raise _UnsureError


def _require_number(kind: type, text: str) -> None:
    """Say of what no reading makes a number that it is none; pydantic would not repeat it."""
    pattern, noun = NUMBERS[kind]
    if not pattern.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not {noun}")
