"""Functions that expose options as keyword arguments of Python functions.

Messages and notes name options with :func:`ckptctl.errors.format_option`. In Python, the options
are shown as keyword arguments. An option that the called function does not have is shown as an
argument of a function that has it, such as ``ckptctl.convert(to='hf')``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from ckptctl.errors import (
    FormatMention,
    OptionMention,
    UsageError,
    find_nearest,
    override_option_format,
)
from ckptctl.options import DeclaredOption, list_options

OWNER_FUNCTIONS = (
    *("convert", "merge", "consolidate", "verify", "diff", "extract", "inspect", "map", "prune"),
    *("extract_lora", "average", "convert_run"),
)
"""Public functions to search, in order, for an option that the called function lacks."""
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


def accept_keywords(options: Callable[P, O_co], excluded: Sequence[str] = ()) -> _Keywords[P, O_co]:
    """Return a decorator that replaces a parameter for options with keyword arguments.

    The parameter is the last one of the function, and its value is a dataclass of options. The
    signature, docstring and static types of the function are derived from the dataclass. Errors and
    notes show options as keyword arguments.

    Args:
        options: Dataclass of options.
        excluded: Fields of the dataclass that the function does not accept.
    """
    options_class: Callable[..., O_co] = options
    declared_options = [entry for entry in list_options(options) if entry.name not in excluded]
    types = {entry.name: entry.type for entry in declared_options}

    def decorate_function(function: Callable[..., R]) -> Callable[..., R]:
        *own_parameters, last = inspect.signature(function).parameters.values()
        parameters = [
            entry.replace(annotation=types[entry.name])
            for entry in inspect.signature(options).parameters.values()
            if entry.name in types
        ]
        signature = inspect.signature(function).replace(parameters=[*own_parameters, *parameters])
        names = [entry.name for entry in parameters]
        spell = partial(_format_as_keywords, names=_map_keyword_names(declared_options))

        @wraps(function)
        def call_with_options(*args: Any, **arguments: Any) -> R:
            for name in arguments.keys() - signature.parameters.keys():
                close = find_nearest(name, names)
                raise UsageError(
                    f"unknown option `{name}`", hint=f"did you mean `{close}`?" if close else None
                )
            try:
                bound = signature.bind(*args, **arguments).arguments
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}(): {error}") from None
            for entry in own_parameters:
                if entry.annotation == "str" and not isinstance(bound[entry.name], str):
                    raise UsageError(f"{bound[entry.name]!r} is not a string", where=entry.name)
            with override_option_format(spell):
                chosen = options_class(**{name: bound.pop(name) for name in names if name in bound})
                return function(**bound, **{last.name: chosen})

        call_with_options.__signature__ = signature  # type: ignore[attr-defined]
        call_with_options.options = declared_options  # type: ignore[attr-defined]
        call_with_options.__doc__ = _insert_option_docs(function.__doc__ or "", declared_options)
        return call_with_options

    return decorate_function


def show_options_as_keywords(*options: Any) -> AbstractContextManager[None]:
    """Return a context manager that shows options as keyword arguments in messages.

    *options* are the dataclasses that declare them.
    """
    names = _map_keyword_names(
        [option for options_class in options for option in list_options(options_class)]
    )
    return override_option_format(partial(_format_as_keywords, names=names))


def _format_as_keywords(
    mention: OptionMention, _: FormatMention, *, names: Mapping[str, str]
) -> str:
    """Format *mention* as keyword arguments.

    Arguments of another public function are shown for options that are not in *names*.
    """
    name_value_pairs = [text.partition(" ")[::2] for text in mention.options]
    unknown_names = [
        name for name, _ in name_value_pairs if name.startswith("--") and name not in names
    ]
    owner = mention.command
    if unknown_names:
        owner = next(
            (
                _map_option_owners()[name][0]
                for name in unknown_names
                if name in _map_option_owners()
            ),
            owner,
        )
    if owner:
        owner_names = {
            name: text
            for name, (function, text) in _map_option_owners().items()
            if function == owner
        }
        names = {**names, **owner_names}
    assignments = ", ".join(
        _format_assignment(names.get(name, name), value) for name, value in name_value_pairs
    )
    if not owner:
        return f"`{assignments}`"
    return (
        f"`ckptctl.{owner}({assignments})`"
        if "=" in assignments
        else f"`{assignments}` of `ckptctl.{owner}`"
    )


def _insert_option_docs(text: str, fields: Sequence[DeclaredOption]) -> str:
    """Replace the docstring entry of the last parameter in *text* with entries for *fields*."""
    return re.sub(
        r"^( *)options: .*\n",
        lambda match: "".join(
            f"{match[1]}{option.name}: {get_python_help(option)}\n" for option in fields
        ),
        text,
        flags=re.MULTILINE,
    )


def get_python_help(declared_option: DeclaredOption) -> str:
    """Return the help text of an option, adapted for Python docstrings."""
    text = declared_option.option.python or declared_option.option.help.replace(" Repeatable.", "")
    text, default, value = text.partition("[default: ")
    if default:
        text = f"{text.rstrip()} Default: {value.removesuffix(']')}."
    return " ".join(_mark_code(word, declared_option.words) for word in text.split(" "))


def _mark_code(word: str, values: Sequence[str]) -> str:
    """Mark *word* as code if it is one of *values*."""
    bare = word.strip("(),.:;")
    return word.replace(bare, f"``{bare}``") if bare in values else word


@cache
def _map_option_owners() -> Mapping[str, tuple[str, str]]:
    """Map each option to a public function that accepts it, and to the keyword argument."""
    package = importlib.import_module("ckptctl")
    owners: dict[str, tuple[str, str]] = {}
    for function in OWNER_FUNCTIONS:
        names = _map_keyword_names(getattr(package, function).options)
        owners = {**{spelling: (function, name) for spelling, name in names.items()}, **owners}
    return owners


def _format_assignment(name: str, value: str) -> str:
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


def _map_keyword_names(fields: Sequence[DeclaredOption]) -> dict[str, str]:
    """Map the command-line names of options to names of keyword arguments."""
    return {
        spelling: f"{option.name}={not option.default}" if option.flag else option.name
        for option in fields
        for spelling in option.spellings
        if spelling.startswith("--")
    }
