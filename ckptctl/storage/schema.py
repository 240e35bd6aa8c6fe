"""Schemas for untrusted data, declared as types, and readers that return typed values.

::

    @dataclass(frozen=True, slots=True)
    class Rule(Schema):
        names: Annotated[tuple[str, ...], sized(1, 64)]
        dim: Annotated[int, within(0, MAX_RANK)] | None = None
        size: str | None = None

    with malformed("malformed rules file", where):
        rules = read_as(tuple[Rule, ...], content["rule"], "rule")

The data may be hostile. Nothing that it names is called, a value that is referenced many times is
read once, so that time and memory grow with the input, and messages show only a few characters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import repeat
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ckptctl.errors import CkptError, UnsupportedError, either, nearest
from ckptctl.storage.pickles.inert import Inert
from ckptctl.units import counted

SHOWN = 40
"""Most characters of a value or key in a message."""
T = TypeVar("T")
_Seen = defaultdict[Any, dict[int, Any]]
"""Results by reader and identity of the value."""
_Reader = Callable[[Any, _Seen], Any]
_CALLED = {
    int: "an integer",
    str: "a string",
    bool: "a boolean",
    float: "a float",
    bytes: "bytes",
    dict: "a dict",
    list: "a list",
    tuple: "a tuple",
    NoneType: "None",
}


class Schema:
    """Base of dataclasses that describe the keys of a dict.

    Fields without a default are required. Other keys of the dict are ignored.
    """

    __slots__ = ()


class ClosedSchema(Schema):
    """Base of schemas that reject keys without a field."""

    __slots__ = ()


class ObjectSchema(Schema):
    """Base of schemas for the attributes of a pickled object."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """Requirement on a value, next to its type in ``Annotated``.

    Attributes:
        expected: Description of valid values, with an article.
        test: Returns whether a value of the type is valid.
    """

    expected: str
    test: Callable[[Any], bool]


def within(least: int, end: int) -> Constraint:
    """Require an integer with ``least <= value < end``."""
    return Constraint(f"an integer from {least} to {end - 1}", lambda value: least <= value < end)


def sized(least: int, most: int) -> Constraint:
    """Require *least* to *most* items."""
    return Constraint(
        f"{least:,} to {counted(most, 'item')}", lambda value: least <= len(value) <= most
    )


Natural = Annotated[int, Constraint("a non-negative integer", lambda value: 0 <= value < 1 << 63)]
FILLED = Constraint("a collection that is not empty", bool)


class MalformedError(ValueError):
    """Malformed data, to which :func:`malformed` adds the context."""


class MismatchError(MalformedError):
    """A value does not match its schema.

    Args:
        expected: Description of valid values, with an article.
        value: The actual value.
        name: Name of the value, or the last part of it.
        problem: Message that replaces the description of both.
    """

    def __init__(
        self, expected: str, value: object = None, name: str = "", *, problem: str = ""
    ) -> None:
        super().__init__(expected)
        self.expected = expected
        self.problem = problem or f"is {describe(value)}, expected {expected}"
        self.path = [name] if name else []

    def __str__(self) -> str:
        place = "".join(reversed(self.path)).removeprefix(".")
        return f"`{place}` {self.problem}" if place else f"it {self.problem}"


def describe(value: object) -> str:
    """Describe *value* in a few words."""
    if isinstance(value, str):
        return repr(value[:SHOWN])
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {counted(value.bit_length(), 'bit')}"
    if value is None or type(value) in (bool, int, float):
        return str(value)
    name = value.name[:SHOWN] if isinstance(value, Inert) else type(value).__name__
    return _CALLED.get(type(value), f"of class `{name}`")


def read_as(kind: type[T], value: object, name: str = "") -> T:
    """Convert *value* to the type *kind*.

    Args:
        kind: A :class:`Schema`, a built-in type, or a collection of them.
        value: Untrusted value read from a file.
        name: Name of the value in messages.

    Raises:
        MismatchError: The value does not match; see :func:`malformed`.
    """
    try:
        found: T = _reader(cast("Any", kind))(value, defaultdict(dict))
    except MismatchError as error:
        error.path.append(name)
        raise
    return found


def find(kind: type[T], value: object, *names: str) -> T | None:
    """Return the nested member *names* of *value* if it matches *kind*, or None."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    try:
        return read_as(kind, value)
    except MismatchError:
        return None


@contextmanager
def malformed(
    what: str, where: str, hint: str | None = None, error: type[CkptError] = UnsupportedError
) -> Iterator[None]:
    """Convert exceptions raised while reading untrusted data into one *error*."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as found:
        exact = isinstance(found, MalformedError)
        why = str(found) if exact else f"{type(found).__name__}: {found}"
        raise error(what, where=where, why=why, hint=hint) from found


def attributes(record: object) -> Mapping[str, object]:
    """Return the attributes of an inert record, from its ``__dict__`` or its slots."""
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, tuple) and len(state) == 2:
        slots = [one or {} for one in state]
        state = slots[0] | slots[1] if all(isinstance(one, dict) for one in slots) else None
    if not isinstance(state, dict):
        raise MismatchError("an object with attributes", record)
    return state


@lru_cache(maxsize=1024)
def _reader(kind: Any) -> _Reader:
    """Build the function that reads values of *kind*."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return partial(_read_checked, _reader(inner[0]), inner[1])
    if origin in (Union, UnionType):
        return partial(_read_either, [_reader(item) for item in inner])
    if origin is Literal:
        types = {type(choice) for choice in inner}
        words = Constraint(
            " or ".join(map(repr, inner)), lambda value: type(value) in types and value in inner
        )
        return partial(_read_checked, _any, words)
    if kind in (Any, object):
        return _any
    if origin is tuple and inner[-1] is not Ellipsis:
        reader: _Reader = partial(_read_row, [_reader(item) for item in inner])
    elif origin in (tuple, list):
        reader = partial(_read_elements, origin, _reader(inner[0]))
    elif origin in (dict, Mapping):
        reader = partial(_read_entries, _reader(inner[0]), _reader(inner[1]))
    elif issubclass(kind, Schema):
        hints = get_type_hints(kind, include_extras=True)
        members = {member.name: _reader(hints[member.name]) for member in fields(kind)}
        required = {
            member.name for member in fields(kind) if member.default is member.default_factory
        }
        reader = partial(_read_members, kind, members, required)
    else:
        return _instance(kind)
    return partial(_read_once, reader)


def _any(value: object, _: _Seen) -> object:
    return value


def _read_once(reader: _Reader, value: object, seen: _Seen) -> object:
    """Read a value, or return the result of an earlier read of the same object."""
    known, place = seen[reader], id(value)
    if place not in known:
        known[place] = reader(value, seen)
    return known[place]


def _instance(kind: type) -> _Reader:
    """Build a reader of single values, as a closure for speed."""

    def read_instance(value: object, _: _Seen) -> object:
        if type(value) is not kind and (kind in _CALLED or not isinstance(value, kind)):
            raise MismatchError(_CALLED.get(kind, f"of class `{kind.__name__}`"), value)
        return value

    return read_instance


def _read_checked(reader: _Reader, constraint: Constraint, value: object, seen: _Seen) -> object:
    found = reader(value, seen)
    if not constraint.test(found):
        raise MismatchError(constraint.expected, value)
    return found


def _read_either(readers: Sequence[_Reader], value: object, seen: _Seen) -> object:
    """Read a value with the first reader that accepts it, or raise the most specific error."""
    errors = []
    for reader in readers:
        try:
            return reader(value, seen)
        except MismatchError as error:
            errors.append(error)
    inside = [error for error in errors if error.path]
    raise inside[0] if inside else MismatchError(either([one.expected for one in errors]), value)


def _read_row(readers: Sequence[_Reader], value: object, seen: _Seen) -> object:
    if not isinstance(value, list | tuple) or len(value) != len(readers):
        raise MismatchError(f"a list of {counted(len(readers), 'item')}", value)
    return tuple(_read_each(readers, value, seen))


def _read_elements(
    make: Callable[[list[object]], object], reader: _Reader, value: object, seen: _Seen
) -> object:
    if not isinstance(value, list | tuple):
        raise MismatchError("a list", value)
    return make(_read_each(repeat(reader), value, seen))


def _read_each(readers: Iterable[_Reader], values: Sequence[object], seen: _Seen) -> list[object]:
    found: list[object] = []
    try:
        for reader, one in zip(readers, values, strict=False):
            found.append(reader(one, seen))
    except MismatchError as error:
        error.path.append(f"[{len(found)}]")
        raise
    return found


def _read_entries(key_reader: _Reader, reader: _Reader, value: object, seen: _Seen) -> object:
    if not isinstance(value, dict):
        raise MismatchError("a dict", value)
    found = {}
    key: object = None
    try:
        for key, one in value.items():
            found[key_reader(key, seen)] = reader(one, seen)
    except MismatchError as error:
        error.path.append(f"[{describe(key)}]")
        raise
    return value if reader is _any else found


def _read_members(
    kind: type[Any],
    members: Mapping[str, _Reader],
    required: Collection[str],
    value: object,
    seen: _Seen,
) -> object:
    if isinstance(value, dict):
        held: Mapping[Any, object] = value
    elif issubclass(kind, ObjectSchema):
        held = attributes(value)
    else:
        raise MismatchError("a dict", value)
    if issubclass(kind, ClosedSchema) and (strange := [key for key in held if key not in members]):
        name = str(strange[0])[:SHOWN]
        close = nearest(name, [*members])
        advice = f"; did you mean `{close}`?" if close else ""
        raise MismatchError("", name=f".{name}", problem=f"is unknown{advice}")
    found: dict[str, object] = {}
    name = ""
    try:
        for name, reader in members.items():
            if name in held:
                found[name] = reader(held[name], seen)
            elif name in required:
                raise MismatchError("", problem="is missing")
    except MismatchError as error:
        error.path.append(f".{name}")
        raise
    return kind(**found)
