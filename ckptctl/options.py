"""Options, declared once: as the fields of a dataclass, for the command line and for Python.

::

    @dataclass(frozen=True, kw_only=True)
    class CopyOptions(Options):
        jobs: Annotated[int | None, Option("Threads.", metavar="N", check=positive)] = None

From this follow ``--jobs N`` of a command (:mod:`ckptctl.cli.commands`), the argument ``jobs=`` of
a function (:mod:`ckptctl.keywords`), its name in errors and its row in both references.
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

from ckptctl.errors import UsageError, nearest, spell_option

Given = Mapping[str, Any]
"""What stands on the command line so far, by the names of fields; ``""`` is its first argument."""

Panel = Literal[
    "Common", "Select", "Format and model", "Output", "Safety", "Performance", "Advanced"
]
"""The parts of the help of a command with many options, in their order."""
FEW = 8
"""Names that a message lists."""
_MANY = (Sequence, Mapping)
# Patterns are compiled when they are needed, which few commands do.
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
class Excludes:
    """Another option that cannot be given together with the one that declares it.

    Attributes:
        other: Its field, or ``field=value`` where it is one value of it.
        reason: Why not, in brackets behind the two.
        why: Why not, in a sentence of its own, where *this* and *other* stand for the two.
        hint: What to do about it, likewise.
    """

    other: str
    reason: str = ""
    _: KW_ONLY
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """What stands in ``Annotated`` beside the type of an option.

    A ``bool`` is a flag, which makes of its default the opposite; a ``Sequence`` or a ``Mapping``
    may be given several times; the words of a ``Literal`` are all that may be given.

    Attributes:
        help: What it is for.
        flags: How it is spelled on the command line, as ``-m --model-type``; empty: its name with
            dashes.
        metavar: What stands for its value in the help.
        parse: Returns what text on the command line, or all texts of a repeatable option, mean.
        check: Returns a value other than None as the operation takes it, or raises UsageError.
        offers: Returns what a shell offers.
        python: What it is for in Python, where that is something else.
        panel: The part of the help that shows it.
        brief: Whether ``-h`` shows it, too, where that is shorter; all in *Common* are shown.
        excludes: Options that cannot be given with it.
        requires: The field of an option that has to be given with it, or ``field=value``.
    """

    help: str
    _: KW_ONLY
    flags: str = ""
    metavar: str = ""
    parse: Callable[[Any], object] | None = None
    check: Callable[[Any], object] | None = None
    offers: Callable[[Given], Sequence[str]] | None = None
    python: str = ""
    panel: Panel = "Common"
    brief: bool = False
    excludes: tuple[Excludes, ...] = ()
    requires: str = ""


@dataclass(frozen=True, slots=True)
class Argument(Option):
    """What stands in ``Annotated`` beside the type of an argument; see :class:`Option`."""


class Declared:
    """One option of a command or function.

    Attributes:
        name: The field or parameter.
        option: What is declared of it.
        type: Its type.
        default: Its default; ``inspect.Parameter.empty``: it has to be given.
        required: Whether it has to be given.
        flag: Whether it takes no value.
        optional: Whether it may be None.
        repeated: Whether it may be given several times.
        kinds: The types that a value may have, but None.
        words: All that may be given, where that is a list; else empty.
        spellings: What it is called on the command line, as Typer takes it.
        shown: What errors on the command line call it.
    """

    def __init__(self, name: str, option: Option, type: Any, default: Any) -> None:
        self.name, self.option, self.type, self.default = name, option, type, default
        self.required = default is inspect.Parameter.empty
        self.flag = type is bool
        union = get_args(type) if get_origin(type) in (Union, UnionType) else (type,)
        self.optional = NoneType in union
        self.kinds: tuple[Any, ...] = tuple(one for one in union if one is not NoneType)
        origins = {get_origin(one) for one in self.kinds}
        self.repeated = not origins.isdisjoint(_MANY)
        literal = origins == {Literal}
        words = (word for one in self.kinds for word in get_args(one)) if literal else ()
        self.words: tuple[str, ...] = tuple(words)
        self.spellings = tuple(option.flags.split()) or (f"--{name.replace('_', '-')}",)
        self.shown = option.metavar if isinstance(option, Argument) else self.spellings[-1]

    def read(self, given: Any) -> Any:
        """Return what the command line means: a text, several, or whether a flag is set.

        Raises:
            UsageError: It means nothing.
        """
        if given is None:
            return self.default if self.repeated else None
        if self.option.parse:
            return self.checked(self.option.parse(given))
        if self.flag:
            return given is not self.default
        kind = next((one for one in self.kinds if one in _NUMBERS), None)
        if isinstance(given, str) and kind and str not in self.kinds:
            return self.checked(number(kind, given))
        return self.checked(tuple(given) if self.repeated else given)

    def checked(self, value: Any) -> Any:
        """Return *value* as the operation takes it; numbers of NumPy and torch as Python's.

        Raises:
            UsageError: It makes no sense.
        """
        if value is None:
            return value
        if getattr(value, "shape", None) == ():
            value = _item(value)
        if self.words:
            among(value, "value", self.words)
        if self.option.check:
            return self.option.check(value)
        if not any(_fits(value, kind) for kind in self.kinds):
            nouns = " or ".join(_NOUNS.get(get_origin(one) or one, "None") for one in self.kinds)
            raise UsageError(f"{value!r} is not {nouns}")
        return value


def _item(value: Any) -> Any:
    """Return the number of NumPy or torch as Python's."""
    try:
        return value.item()
    except (AttributeError, RuntimeError) as error:
        raise UsageError(f"{value!r} cannot be converted to a number", why=f"{error}") from error


def _fits(value: object, kind: Any) -> bool:
    """Return whether *value* may be given where *kind* is declared; other objects may always be."""
    kind = get_origin(kind) or kind
    if kind is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return kind not in _NOUNS or isinstance(value, kind)


def number(kind: type[int] | type[float], text: str) -> float:
    """Return the number that *text* says.

    Raises:
        UsageError: It says none of that kind.
    """
    pattern, noun = _NUMBERS[kind]
    if not re.fullmatch(pattern, text, re.IGNORECASE):
        raise UsageError(f"`{text}` is not {noun}")
    return kind(text.partition(".")[0] if kind is int else text)


class Options:
    """What a command or function takes: a base of frozen dataclasses, whose values it checks."""

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            UsageError: One of them makes no sense; it says which.
        """
        options, values = declared(type(self)), {}
        try:
            for one in options:
                value = getattr(self, one.name)
                if value is None and not one.optional:
                    raise UsageError("it cannot be None", hint="omit it to use the default")
                values[one.name] = one.checked(value)
                object.__setattr__(self, one.name, values[one.name])
        except UsageError as error:
            error.where = error.where or one.name
            raise
        require_compatible(options, values)


def require_compatible(options: Sequence[Declared], values: Mapping[str, Any]) -> None:
    """Refuse options that exclude each other, or come without those that they require.

    Args:
        options: All that may be given; of others nothing is required.
        values: What is given, by the names of fields.

    Raises:
        UsageError: Two of them cannot be given together, or one is missing.
    """
    known = {one.name: one for one in options}

    def is_given(name: str, value: str = "") -> bool:
        given = values[name]
        return bool(given == value if value else given != known[name].default)

    def spelled(name: str, value: str = "") -> str:
        return spell_option(" ".join(filter(None, (known[name].shown, value))))

    for one in options:
        if not (one.option.excludes or one.option.requires) or not is_given(one.name):
            continue
        this = spelled(one.name)
        for excluded in one.option.excludes:
            name, _, value = excluded.other.partition("=")
            if name in known and is_given(name, value):
                both = {"this": this, "other": spelled(name, value)}
                reason = excluded.reason and f" ({excluded.reason})"
                raise UsageError(
                    "{this} conflicts with {other}".format(**both) + reason,
                    why=excluded.why.format(**both) or None,
                    hint=excluded.hint.format(**both) or None,
                )
        name, _, value = one.option.requires.partition("=")
        if name in known and not is_given(name, value):
            other = spelled(name, value)
            raise UsageError(f"{this} requires {other}", hint=f"add {other}" if value else None)


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(fields: type[T]) -> type[T]:
    """Make a class a part that dataclasses of options inherit, and that is never made by itself.

    It gets no ``__init__``, ``__repr__`` and ``__eq__``: ``--help`` would wait until they are made.
    """
    return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(fields)


def declared(of: Any) -> tuple[Declared, ...]:
    """Return what a dataclass or a function declares, in its order."""
    return _declared(of)


@cache
def _declared(of: Callable[..., Any]) -> tuple[Declared, ...]:
    hints = get_type_hints(of, include_extras=True)
    found = []
    for name, parameter in inspect.signature(of).parameters.items():
        if get_origin(hints.get(name)) is Annotated:
            kind, *more = get_args(hints[name])
            option = next((one for one in more if isinstance(one, Option)), None)
            if option is not None:
                found.append(Declared(name, option, kind, parameter.default))
    return tuple(found)


@contextmanager
def about(name: str) -> Iterator[None]:
    """Let a UsageError that does not say which option it is about say *name*."""
    try:
        yield
    except UsageError as error:
        error.where = error.where or name
        raise


def among(
    value: str,
    kind: str,
    known: Sequence[str],
    elsewhere: Mapping[str, str] | None = None,
    lists: str | None = None,
) -> str:
    """Return *value*, which has to be known.

    Args:
        value: What was given.
        kind: What it is, for the message.
        known: What may be given.
        elsewhere: Other words for it.
        lists: The command that lists what is known; it is named where a message cannot.

    Raises:
        UsageError: It is not known; the message says what is, and the nearest.
    """
    if value in known:
        return value
    word, others = str(value).lower(), elsewhere or {}
    close = word if word in others else nearest(word, [*known, *others])
    close = others.get(close or "", close)
    close = close if close in known else None
    many = f"`{lists}` lists all {len(known)} {kind}s" if lists and len(known) > FEW else None
    raise UsageError(
        f"unknown {kind} `{value}`",
        why=None if many else f"known: {', '.join(known)}",
        hint=" ".join(filter(None, (close and f"did you mean `{close}`?", many))) or None,
    )
