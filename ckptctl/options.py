"""Options, declared once as dataclass fields for both the command line and Python.

::

    @dataclass(frozen=True, kw_only=True)
    class CopyOptions(Options):
        jobs: Annotated[int | None, Option("Threads.", check=check_positive)] = None

This declares ``--jobs`` of a command (:mod:`ckptctl.cli.commands`), the argument ``jobs=`` of a
function (:mod:`ckptctl.keywords`), and the name of the option in errors and reference pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ckptctl.errors import UsageError, find_nearest, format_option

ParsedValues = Mapping[str, Any]
"""Values parsed from the command line up to the completed option, by field name.

The key ``""`` maps to the first positional argument.
"""

Panel = Literal[
    "Common", "Run", "Select", "Format and model", "Output", "Safety", "Performance", "Advanced"
]
"""Titles of the sections in the help of a command with many options, in display order."""
MAX_LISTED_CHOICES = 8
"""Maximum number of allowed values that an error message lists."""
_REPEATABLE = (Sequence, Mapping)
# Patterns are compiled on use, because few commands need them.
_NUMBERS = {
    int: (r"\s*[-+]?[0-9][0-9_]*(\.0*)?\s*", "an integer"),
    float: (
        r"\s*[-+]?(nan|inf(inity)?|([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(e[-+]?[0-9]+)?)\s*",
        "a number",
    ),
}
_NOUNS: dict[Any, str] = {
    str: "a string",
    bool: "True or False",
    Path: "a path",
    Sequence: "a list",
    Callable: "a function",
}


@dataclass(frozen=True, slots=True)
class OptionConflict:
    """Conflict between the option that declares it and another option.

    Attributes:
        other: Field of the other option, or ``field=value`` for one of its values.
        reason: Short reason that the error shows in parentheses after the two options.
        why: Evidence for the ``why:`` line, with placeholders ``{this}`` and ``{other}``.
        hint: Text of the ``hint:`` line, with the same placeholders.
    """

    other: str
    reason: str = ""
    _: KW_ONLY
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option, in the ``Annotated`` type of its field.

    An option of type ``bool`` is a flag that negates the default. A ``Sequence`` or ``Mapping`` can
    be repeated. A ``Literal`` lists the allowed values.

    Attributes:
        help: Help text of the option.
        flags: Spellings on the command line, as in ``-m --model-type``. If empty, the flag is the
            field name with dashes.
        metavar: Placeholder for the value in the help.
        parse: Function that parses the text, or all texts of a repeatable option.
        check: Function that returns the checked value, or raises UsageError. Not called for None.
        offers: Function that returns the values that shell completion suggests.
        python: Help text for Python docstrings, if it differs from *help*.
        panel: Section of the command help that shows the option.
        brief: Whether the short help ``-h`` shows the option. Options in *Common* are always shown.
        excludes: Conflicts with other options.
        requires: Field of another option that must be given, too, or ``field=value``.
    """

    help: str
    _: KW_ONLY
    flags: str = ""
    metavar: str = ""
    parse: Callable[[Any], object] | None = None
    check: Callable[[Any], object] | None = None
    offers: Callable[[ParsedValues], Sequence[str]] | None = None
    python: str = ""
    panel: Panel = "Common"
    brief: bool = False
    excludes: tuple[OptionConflict, ...] = ()
    requires: str = ""


@dataclass(frozen=True, slots=True)
class Argument(Option):
    """Declaration of a positional argument, in the ``Annotated`` type of its field."""


class DeclaredOption:
    """Option that a command or function declares, with its type and default value.

    Attributes:
        name: Name of the field or parameter.
        option: Declaration of the option.
        type: Annotated type of the value.
        default: Default value, or ``inspect.Parameter.empty`` if the option is required.
        required: Whether the option is required.
        flag: Whether the option takes no value.
        optional: Whether the value may be None.
        repeated: Whether the option can be repeated on the command line.
        kinds: Types that the value may have, excluding None.
        words: Allowed values if the type is a ``Literal``, or an empty tuple.
        spellings: Spellings on the command line, in the form that Typer expects.
        display_name: Name of the option in errors on the command line.
    """

    def __init__(self, name: str, option: Option, type: Any, default: Any) -> None:
        self.name, self.option, self.type, self.default = name, option, type, default
        self.required = default is inspect.Parameter.empty
        self.flag = type is bool
        union = get_args(type) if get_origin(type) in (Union, UnionType) else (type,)
        self.optional = NoneType in union
        self.kinds: tuple[Any, ...] = tuple(member for member in union if member is not NoneType)
        origins = {get_origin(member) for member in self.kinds}
        self.repeated = not origins.isdisjoint(_REPEATABLE)
        literal = origins == {Literal}
        words = (word for member in self.kinds for word in get_args(member)) if literal else ()
        self.words: tuple[str, ...] = tuple(words)
        self.spellings = tuple(option.flags.split()) or (f"--{name.replace('_', '-')}",)
        self.display_name = option.metavar if isinstance(option, Argument) else self.spellings[-1]

    def parse_value(self, raw_value: Any) -> Any:
        """Convert text from the command line to a checked value.

        Raises:
            UsageError: The text is not a valid value.
        """
        if raw_value is None:
            return self.default if self.repeated else None
        if self.option.parse:
            return self.check_value(self.option.parse(raw_value))
        if self.flag:
            return raw_value is not self.default
        kind = next((member for member in self.kinds if member in _NUMBERS), None)
        if isinstance(raw_value, str) and kind and str not in self.kinds:
            return self.check_value(parse_number(kind, raw_value))
        return self.check_value(tuple(raw_value) if self.repeated else raw_value)

    def check_value(self, value: Any) -> Any:
        """Check *value* and convert it to the type that the operation takes.

        Raises:
            UsageError: The value is invalid.
        """
        if value is None:
            return value
        if getattr(value, "shape", None) == ():
            value = _to_python_number(value)
        if self.words:
            require_choice(value, "value", self.words)
        if self.option.check:
            return self.option.check(value)
        if not any(_matches_kind(value, kind) for kind in self.kinds):
            nouns = " or ".join(
                _NOUNS.get(get_origin(member) or member, "None") for member in self.kinds
            )
            raise UsageError(f"{value!r} is not {nouns}")
        return value


def _to_python_number(value: Any) -> Any:
    """Convert a NumPy or torch number to a Python number, or raise if this is not possible."""
    try:
        return value.item()
    except (AttributeError, RuntimeError) as error:
        raise UsageError(f"{value!r} cannot be converted to a number", why=f"{error}") from error


def _matches_kind(value: object, kind: Any) -> bool:
    """Check if *value* has type *kind*, which accepts all values unless it is in ``_NOUNS``."""
    kind = get_origin(kind) or kind
    if kind is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return kind not in _NOUNS or isinstance(value, kind)


def parse_number(kind: type[int] | type[float], text: str) -> float:
    """Parse *text* as a number of type *kind*.

    Raises:
        UsageError: The text is not a number of this kind.
    """
    pattern, noun = _NUMBERS[kind]
    if not re.fullmatch(pattern, text, re.IGNORECASE):
        raise UsageError(f"`{text}` is not {noun}")
    return kind(text.partition(".")[0] if kind is int else text)


class Options:
    """Base class of frozen option dataclasses, which checks the values of a new instance."""

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            UsageError: A value is invalid, or options conflict. *where* names the option.
        """
        options, values = list_options(type(self)), {}
        try:
            for option in options:
                value = getattr(self, option.name)
                if value is None and not option.optional:
                    raise UsageError("it cannot be None", hint="omit it to use the default")
                values[option.name] = option.check_value(value)
                object.__setattr__(self, option.name, values[option.name])
        except UsageError as error:
            error.where = error.where or option.name
            raise
        require_compatible(options, values)


def require_compatible(options: Sequence[DeclaredOption], values: Mapping[str, Any]) -> None:
    """Raise if options conflict, or if an option that another one requires is missing.

    Args:
        options: Options of the command or function. Conflicts with other options are ignored.
        values: Values by field name.

    Raises:
        UsageError: Two options conflict, or a required option is missing.
    """
    options_by_name = {option.name: option for option in options}

    def is_given(name: str, value: str = "") -> bool:
        current = values[name]
        return bool(current == value if value else current != options_by_name[name].default)

    def format_declared_option(name: str, value: str = "") -> str:
        return format_option(" ".join(filter(None, (options_by_name[name].display_name, value))))

    for option in options:
        if not (option.option.excludes or option.option.requires) or not is_given(option.name):
            continue
        this = format_declared_option(option.name)
        for excluded in option.option.excludes:
            name, _, value = excluded.other.partition("=")
            if name in options_by_name and is_given(name, value):
                option_names = {"this": this, "other": format_declared_option(name, value)}
                reason = excluded.reason and f" ({excluded.reason})"
                raise UsageError(
                    "{this} conflicts with {other}".format(**option_names) + reason,
                    why=excluded.why.format(**option_names) or None,
                    hint=excluded.hint.format(**option_names) or None,
                )
        name, _, value = option.option.requires.partition("=")
        if name in options_by_name and not is_given(name, value):
            other_option = format_declared_option(name, value)
            raise UsageError(
                f"{this} requires {other_option}", hint=f"add {other_option}" if value else None
            )


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def option_group(class_: type[T]) -> type[T]:
    """Make *class_* a mixin for option dataclasses, which is never instantiated itself.

    Because generated methods slow down ``--help``, the mixin has no ``__init__``, ``__repr__`` or
    ``__eq__``.
    """
    return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(class_)


def list_options(owner: Any) -> tuple[DeclaredOption, ...]:
    """Return the options that a dataclass or function declares, in order."""
    return _find_options(owner)


@cache
def _find_options(owner: Callable[..., Any]) -> tuple[DeclaredOption, ...]:
    hints = get_type_hints(owner, include_extras=True)
    options = []
    for name, parameter in inspect.signature(owner).parameters.items():
        if get_origin(hints.get(name)) is Annotated:
            kind, *metadata = get_args(hints[name])
            option = next(
                (annotation for annotation in metadata if isinstance(annotation, Option)), None
            )
            if option is not None:
                options.append(DeclaredOption(name, option, kind, parameter.default))
    return tuple(options)


@contextmanager
def name_option_in_errors(name: str) -> Iterator[None]:
    """Add the option *name* to a UsageError that is raised in the block and names no option."""
    try:
        yield
    except UsageError as error:
        error.where = error.where or name
        raise


def require_choice(
    value: str,
    kind: str,
    choices: Sequence[str],
    aliases: Mapping[str, str] | None = None,
    list_command: str | None = None,
) -> str:
    """Return *value* if it is one of *choices*, or raise.

    Args:
        value: Value to check.
        kind: Noun for the value in the message, such as ``layout``.
        choices: Allowed values.
        aliases: Aliases of allowed values, for suggestions.
        list_command: Command that lists the allowed values, shown if there are too many for the
            message.

    Raises:
        UsageError: The value is not allowed. The message suggests the most similar one.
    """
    if value in choices:
        return value
    word, other_names = str(value).lower(), aliases or {}
    close = word if word in other_names else find_nearest(word, [*choices, *other_names])
    close = other_names.get(close or "", close)
    close = close if close in choices else None
    list_hint = (
        f"`{list_command}` lists all {len(choices)} {kind}s"
        if list_command and len(choices) > MAX_LISTED_CHOICES
        else None
    )
    raise UsageError(
        f"unknown {kind} `{value}`",
        why=None if list_hint else f"known: {', '.join(choices)}",
        hint=" ".join(filter(None, (close and f"did you mean `{close}`?", list_hint))) or None,
    )
