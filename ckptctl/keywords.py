"""Options as keyword arguments of Python functions.

Messages and notes name options with :func:`ckptctl.errors.spell_option`. In Python they become
keyword arguments. An option that the called function does not take is shown as a call of one that
does.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from ckptctl.errors import Mention, Spelling, UsageError, nearest, spelling
from ckptctl.options import Declared, declared

FUNCTIONS = (
    *("convert", "merge", "consolidate", "verify", "diff", "extract", "inspect", "map", "prune"),
    "extract_lora",
)
"""Functions that are searched, in order, for options of other functions."""
P = ParamSpec("P")
O_co = TypeVar("O_co", covariant=True)
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


class _Keywords(Protocol[P, O_co]):
    @overload
    def __call__(self, function: Callable[[O_co], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[[A, O_co], R], /) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(
        self, function: Callable[[A, B, O_co], R], /
    ) -> Callable[Concatenate[A, B, P], R]: ...
    @overload
    def __call__(
        self, function: Callable[[A, B, C, O_co], R], /
    ) -> Callable[Concatenate[A, B, C, P], R]: ...


def keywords(options: Callable[P, O_co], without: Sequence[str] = ()) -> _Keywords[P, O_co]:
    """Replace the last parameter of a function, a dataclass of options, by keyword arguments.

    Signature, docstring and static types of the function are derived from the dataclass. Errors and
    notes spell options as keyword arguments.

    Args:
        options: Dataclass of options.
        without: Fields that the function does not take.
    """
    made: Callable[..., O_co] = options
    offered = [one for one in declared(options) if one.name not in without]
    types = {one.name: one.type for one in offered}

    def decorated(function: Callable[..., R]) -> Callable[..., R]:
        *own, last = inspect.signature(function).parameters.values()
        parameters = [
            one.replace(annotation=types[one.name])
            for one in inspect.signature(options).parameters.values()
            if one.name in types
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *parameters])
        names = [one.name for one in parameters]
        spelled = partial(_as_keywords, names=_keyword_names(offered))

        @wraps(function)
        def called(*args: Any, **given: Any) -> R:
            for name in given.keys() - signature.parameters.keys():
                close = nearest(name, names)
                raise UsageError(
                    f"unknown option `{name}`", hint=f"did you mean `{close}`?" if close else None
                )
            try:
                bound = signature.bind(*args, **given).arguments
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}(): {error}") from None
            for one in own:
                if one.annotation == "str" and not isinstance(bound[one.name], str):
                    raise UsageError(f"{bound[one.name]!r} is not a string", where=one.name)
            with spelling(spelled):
                chosen = made(**{name: bound.pop(name) for name in names if name in bound})
                return function(**bound, **{last.name: chosen})

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.options = offered  # type: ignore[attr-defined]
        called.__doc__ = _documented(function.__doc__ or "", offered)
        return called

    return decorated


def in_python(*options: Any) -> AbstractContextManager[None]:
    """Spell the fields of *options*, dataclasses, as keyword arguments in messages."""
    names = _keyword_names([one for each in options for one in declared(each)])
    return spelling(partial(_as_keywords, names=names))


def _as_keywords(mention: Mention, _: Spelling, *, names: Mapping[str, str]) -> str:
    """Spell *mention* as keyword arguments, of another function if an option is not in *names*."""
    pairs = [one.partition(" ")[::2] for one in mention.options]
    foreign = [name for name, _ in pairs if name.startswith("--") and name not in names]
    other = mention.command
    if foreign:
        other = next((_elsewhere()[name][0] for name in foreign if name in _elsewhere()), other)
    if other:
        taken = {name: one for name, (function, one) in _elsewhere().items() if function == other}
        names = {**names, **taken}
    given = ", ".join(_assigned(names.get(name, name), value) for name, value in pairs)
    if not other:
        return f"`{given}`"
    return f"`ckptctl.{other}({given})`" if "=" in given else f"`{given}` of `ckptctl.{other}`"


def _documented(text: str, fields: Sequence[Declared]) -> str:
    """Replace the docstring entry of the last parameter by entries for *fields*."""
    return re.sub(
        r"^( *)options: .*\n",
        lambda found: "".join(f"{found[1]}{one.name}: {python(one)}\n" for one in fields),
        text,
        flags=re.MULTILINE,
    )


def python(one: Declared) -> str:
    """Return the help of an option for Python."""
    text = one.option.python or one.option.help.replace(" Repeatable.", "")
    text, default, value = text.partition("[default: ")
    if default:
        text = f"{text.rstrip()} Default: {value.removesuffix(']')}."
    return " ".join(_marked(word, one.words) for word in text.split(" "))


def _marked(word: str, values: Sequence[str]) -> str:
    """Mark *word* as code if it is one of *values*."""
    bare = word.strip("(),.:;")
    return word.replace(bare, f"``{bare}``") if bare in values else word


@cache
def _elsewhere() -> Mapping[str, tuple[str, str]]:
    """Map options to the function that takes them and to their keyword."""
    package = importlib.import_module("ckptctl")
    found: dict[str, tuple[str, str]] = {}
    for function in FUNCTIONS:
        names = _keyword_names(getattr(package, function).options)
        found = {**{spelled: (function, name) for spelled, name in names.items()}, **found}
    return found


def _assigned(name: str, value: str) -> str:
    """Format an option with its value as a keyword argument."""
    if not value or "=" in name:
        return name + (f" {value}" if value else "")
    if len(value) > 1 and value[0] == value[-1] == "'":  # quoted for a shell
        value = value[1:-1]
    key, equals, number = value.partition("=")
    if equals:
        return f"{name}={{{key!r}: {number}}}"
    bare = (value.isalpha() and value.isupper()) or value.replace(".", "").isdecimal()
    return f"{name}={value if bare else repr(value)}"


def _keyword_names(fields: Sequence[Declared]) -> dict[str, str]:
    """Map options of the command line to keyword arguments."""
    return {
        spelling: f"{one.name}={not one.default}" if one.flag else one.name
        for one in fields
        for spelling in one.spellings
        if spelling.startswith("--")
    }
