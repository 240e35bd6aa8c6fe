"""Options as keyword arguments: functions take them, and what they say names them as Python does.

Messages and notes are written once, with options as the command line spells them. In Python none
is left so: what the function does not take is called by the one that does.
"""

from __future__ import annotations

import importlib
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

FUNCTIONS = (
    *("convert", "merge", "consolidate", "verify", "diff", "extract", "inspect", "map", "prune"),
    "extract_lora",
)
"""Where an option is looked for that a function does not take itself, in this order."""
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
            for one in own:
                if one.annotation == "str" and not isinstance(bound[one.name], str):
                    raise UsageError(f"{bound[one.name]!r} is not a string", where=one.name)
            with _renaming(spelled):
                chosen = made(**{name: bound.pop(name) for name in names if name in bound})
                result = function(**bound, **{last.name: chosen})
            return _with_names(result, spelled)

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.options = offered  # type: ignore[attr-defined]
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
    with _saying(lambda text: _substituted(text, names)):
        yield


@contextmanager
def in_python(*options: Any) -> Iterator[None]:
    """Let errors call the fields of *options*, dataclasses, what Python does; see :func:`noted`."""
    with _renaming(_keyword_names([one for each in options for one in declared(each)])):
        yield


@contextmanager
def _renaming(spelled: Mapping[str, str]) -> Iterator[None]:
    with _saying(lambda text: _renamed(text, spelled)):
        yield


@contextmanager
def _saying(renamed: Callable[[str], str]) -> Iterator[None]:
    try:
        yield
    except CkptError as error:
        error.what = renamed(error.what)
        error.why = error.why and renamed(error.why)
        error.hint = error.hint and renamed(error.hint)
        error.args = (error.what, *error.args[1:])
        raise


def _with_names(result: R, names: Mapping[str, str]) -> R:
    """Return a result, and the results in it, with notes and reasons that name Python's options."""
    if not is_dataclass(result) or isinstance(result, type):
        return result
    renamed = cache(lambda text: _renamed(text, names))  # thousands of tensors have one reason
    changed: dict[str, object] = {}
    for one in fields(result):
        value = getattr(result, one.name)
        if one.name in _NOTES and isinstance(value, tuple):
            changed[one.name] = tuple(map(renamed, value))
        elif one.name in _REASONS and isinstance(value, Mapping):
            changed[one.name] = {name: renamed(why) for name, why in value.items()}
        elif isinstance(value, Result):
            changed[one.name] = _with_names(value, names)
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
    text = one.option.python or one.option.help.replace(" Repeatable.", "")
    text, default, value = text.partition("[default: ")
    if default:
        text = f"{text.rstrip()} Default: {value.removesuffix(']')}."
    for word in one.words:
        text = re.sub(rf"(?<![-`\w]){word}(?![-`\w])", f"``{word}``", text)
    return re.sub(_SPELLED, lambda found: f"`{found[0][2:].replace('-', '_')}`", text)


def noted(text: str, *options: Any) -> str:
    """Return a note with the fields of *options*, dataclasses, called what Python does."""
    return _renamed(text, _keyword_names([one for each in options for one in declared(each)]))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return *text* with the names that options have in Python, whatever function has them."""
    if "--" not in text:
        return text
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(_call(part, names) if part[:1] == "`" else _prose(part, names) for part in parts)


def _substituted(text: str, names: Mapping[str, str]) -> str:
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


def _prose(text: str, names: Mapping[str, str]) -> str:
    """Return what stands outside of backticks."""
    return _substituted(text, {**{name: one for name, (_, one) in _elsewhere().items()}, **names})


def _call(quoted: str, names: Mapping[str, str]) -> str:
    """Return what stands in backticks; options of another function as a call of that."""
    said = re.fullmatch(rf"`(?:(?P<command>[a-z]+) )?(?P<given>(?:{_QUOTED})+)`", quoted)
    if said is None or not _elsewhere().keys() | names.keys() >= {*re.findall(_SPELLED, quoted)}:
        return _substituted(quoted, names)
    spelled = [one["name"] for one in re.finditer(_QUOTED, said["given"])]
    other = next((_elsewhere()[name][0] for name in spelled if name not in names), said["command"])
    if other is None:
        return _substituted(quoted, names)
    taken = {name: one for name, (function, one) in _elsewhere().items() if function == other}
    given = _substituted(f"`{said['given']}`", {**names, **taken}).strip("`")
    call = "=" in given
    return f"`ckptctl.{other}({given})`" if call else f"`{given}` of `ckptctl.{other}`"


@cache
def _elsewhere() -> Mapping[str, tuple[str, str]]:
    """Return the function and the name in it of each option that errors of others speak of."""
    package = importlib.import_module("ckptctl")
    found: dict[str, tuple[str, str]] = {}
    for function in FUNCTIONS:
        names = _keyword_names(getattr(package, function).options)
        found = {**{spelled: (function, name) for spelled, name in names.items()}, **found}
    return found


def _assigned(name: str, value: str | None) -> str:
    """Return how Python gives a value to the argument *name*, which a flag says already."""
    if value is None or "=" in name:
        return name + (f" {value}" if value else "")
    if len(value) > 1 and value[0] == value[-1] == "'":  # as a shell needs it
        value = value[1:-1]
    key, equals, number = value.partition("=")
    if equals:
        return f"{name}={{{key!r}: {number}}}"
    bare = (value.isalpha() and value.isupper()) or value.replace(".", "").isdecimal()
    return f"{name}={value if bare else repr(value)}"


def _keyword_names(fields: Sequence[Declared]) -> dict[str, str]:
    """Return what Python calls options, by what the command line does."""
    return {
        spelling: f"{one.name}={not one.default}" if one.flag else one.name
        for one in fields
        for spelling in one.spellings
        if spelling.startswith("--")
    }
