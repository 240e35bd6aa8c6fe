"""Options as keyword arguments: functions take them, and what they say names them as Python does.

Messages and notes are written once, with options as the command line spells them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from ckptctl.errors import CkptError, UsageError, nearest
from ckptctl.options import Declared, declared
from ckptctl.results import Result

_SPELLED = r"(?<![\w-])--[a-z]+(?:-[a-z]+)*"
_QUOTED = rf"(?P<name>{_SPELLED})(?: (?P<value>[^`\s-][^`\s]*))?(?P<more> (?=--))?"
_IN_PROSE = rf"(?P<name>{_SPELLED})(?: (?P<value>[\w.]*[0-9]\w*|[A-Z]{{2,}}))?(?P<more>(?!))?"

_NOTES = ("notes", "warnings")
_REASONS = ("dropped", "left_out", "missing", "not_carried")
"""Attributes of results that say something to people: texts, and texts by name."""

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
    """Let the last parameter of a function, a dataclass of options, be its keyword arguments.

    Signature, docstring and static types of the function follow from the dataclass, and errors
    and notes call options what Python does.

    Args:
        options: The dataclass.
        without: Fields of it that mean nothing to the function.
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
        spelled = _keyword_names(offered)

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
            with renaming(spelled):
                chosen = made(**{name: bound.pop(name) for name in names if name in bound})
                result = function(**bound, **{last.name: chosen})
            return _with_names(result, lambda text: _renamed(text, spelled))

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__doc__ = _documented(function.__doc__ or "", offered)
        return called

    return decorated


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the options of what is run that has others, as `--format-b` for `--from`.

    Args:
        names: What options are called, by what errors call them; with their dashes. Commands that
            errors suggest stay as they are.
    """
    try:
        yield
    except CkptError as error:
        error.what = _renamed(error.what, names)
        error.why = error.why and _renamed(error.why, names)
        error.hint = error.hint and _renamed(error.hint, names)
        error.args = (error.what, *error.args[1:])
        raise


def _with_names(result: R, renamed: Callable[[str], str]) -> R:
    """Return a result, and the results in it, with notes and reasons that are *renamed*."""
    if not is_dataclass(result) or isinstance(result, type):
        return result
    renamed = cache(renamed)  # thousands of tensors have the same reason
    changed: dict[str, object] = {}
    for one in fields(result):
        value = getattr(result, one.name)
        if one.name in _NOTES and isinstance(value, tuple):
            changed[one.name] = tuple(map(renamed, value))
        elif one.name in _REASONS and isinstance(value, Mapping):
            changed[one.name] = {name: renamed(why) for name, why in value.items()}
        elif isinstance(value, Result):
            changed[one.name] = _with_names(value, renamed)
    changed = {name: new for name, new in changed.items() if new != getattr(result, name)}
    return replace(result, **changed) if changed else result


def _documented(text: str, fields: Sequence[Declared]) -> str:
    """Return a docstring with *fields* where it has its last parameter."""
    return re.sub(
        r"^( *)options: .*\n",
        lambda found: "".join(f"{found[1]}{one.name}: {python(one)}\n" for one in fields),
        text,
        flags=re.MULTILINE,
    )


def python(one: Declared) -> str:
    """Return what is said of an option in Python, where others have other names."""
    text = one.option.python or one.option.help.replace("; repeatable", "")
    for word in one.words:
        text = re.sub(rf"(?<![-`\w]){word}(?![-`\w])", f"``{word}``", text)
    return re.sub(_SPELLED, lambda found: f"`{found[0][2:].replace('-', '_')}`", text)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return *text* with other names of options, those of suggested commands apart."""

    def renamed(found: re.Match[str]) -> str:
        name = names.get(found["name"])
        if name is None or name.startswith("--"):
            return (name or found["name"]) + found[0][len(found["name"]) :]
        return _assigned(name, found["value"]) + (", " if found["more"] else "")

    return "".join(
        part
        if part.startswith("`ckptctl ")
        else re.sub(_QUOTED if part.startswith("`") else _IN_PROSE, renamed, part)
        for part in re.split(r"(`[^`]*`)", text)
    )


def _assigned(name: str, value: str | None) -> str:
    """Return how Python gives a value to the argument *name*, which a flag says already."""
    if value is None or "=" in name:
        return name + (f" {value}" if value else "")
    key, equals, number = value.partition("=")
    if equals:
        return f"{name}={{{key!r}: {number}}}"
    bare = (value.isalpha() and value.isupper()) or value.replace(".", "").isdecimal()
    return f"{name}={value if bare else repr(value)}"


def in_python(text: str, options: Any) -> str:
    """Return a note with the fields of *options*, a dataclass, called what Python does."""
    return _renamed(text, _keyword_names(declared(options)))


def _keyword_names(fields: Sequence[Declared]) -> dict[str, str]:
    """Return what Python calls options, by what the command line does."""
    return {
        spelling: f"{one.name}={not one.default}" if one.flag else one.name
        for one in fields
        for spelling in one.spellings
        if spelling.startswith("--")
    }
