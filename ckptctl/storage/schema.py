"""The structure of foreign data, stated once as types, and typed values read by it.

::

    @dataclass(frozen=True, slots=True)
    class Rule(Schema):
        names: Annotated[tuple[str, ...], sized(1, 64)]
        dim: Annotated[int, within(0, MAX_RANK)] | None = None
        size: str | None = None

    with malformed("malformed rules file", where):
        rules = read_as(tuple[Rule, ...], content["rule"], "rule")

The data may be hostile. Nothing is called that it names, a value that lies in many places is read
once, so that time and memory grow with the input, and messages show little of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""Characters of a value, or of a key, that a message shows."""
T = TypeVar("T")
_Seen = dict[Any, dict[int, Any]]
"""What was read, by the reader and the identity of the value."""
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
    """A base of dataclasses that state what a dict contains.

    Fields without a default are required. What a class does not mention is ignored.
    """

    __slots__ = ()


class ClosedSchema(Schema):
    """A base of those that mention all that there may be."""

    __slots__ = ()


class ObjectSchema(Schema):
    """A base of those that state the attributes of an object that a pickle describes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """A requirement on a value, next to its type in ``Annotated``.

    Attributes:
        expected: What the value has to be, with an article.
        test: Decides about a value of the type.
    """

    expected: str
    test: Callable[[Any], bool]


def within(least: int, end: int) -> Constraint:
    """Require an integer from *least* on and below *end*."""
    return Constraint(f"an integer from {least} to {end - 1}", lambda value: least <= value < end)


def sized(least: int, most: int) -> Constraint:
    """Require at least *least* and at most *most* items."""
    return Constraint(
        f"{least:,} to {counted(most, 'item')}", lambda value: least <= len(value) <= most
    )


Natural = Annotated[int, Constraint("a non-negative integer", lambda value: 0 <= value < 1 << 63)]
FILLED = Constraint("a collection that is not empty", bool)


class MalformedError(ValueError):
    """Evidence that foreign data are malformed, for :func:`malformed` around the raise."""


class MismatchError(MalformedError):
    """A value that differs from its schema.

    Args:
        expected: What it has to be, with an article.
        value: What it is.
        name: Its name, or the last part of it.
        problem: What is said instead of both.
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
    """Return what *value* is, in a few words."""
    if isinstance(value, str):
        return repr(value[:SHOWN])
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {counted(value.bit_length(), 'bit')}"
    if value is None or type(value) in (bool, int, float):
        return str(value)
    name = value.name[:SHOWN] if isinstance(value, Inert) else type(value).__name__
    return _CALLED.get(type(value), f"of class `{name}`")


def read_as(kind: type[T], value: object, name: str = "") -> T:
    """Return *value* as *kind* states it.

    Args:
        kind: A :class:`Schema`, a plain type, or a collection of them.
        value: What was read from a file.
        name: What messages call it.

    Raises:
        MismatchError: It has another structure; see :func:`malformed`.
    """
    try:
        found: T = _reader(cast("Any", kind))(value, {})
    except MismatchError as error:
        error.path.append(name)
        raise
    return found


def find(kind: type[T], value: object, *names: str) -> T | None:
    """Return a member of *value*, by the names on the way to it, if it is of that kind, or None."""
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
    """Turn what goes wrong while fields are taken out of foreign data into one error."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as found:
        exact = isinstance(found, MalformedError)
        why = str(found) if exact else f"{type(found).__name__}: {found}"
        raise error(what, where=where, why=why, hint=hint) from found


def attributes(record: object) -> Mapping[str, object]:
    """Return the attributes of an inert record, from its dict or its slots."""
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, tuple) and len(state) == 2:
        slots = [one or {} for one in state]
        state = slots[0] | slots[1] if all(isinstance(one, dict) for one in slots) else None
    if not isinstance(state, dict):
        raise MismatchError("an object with attributes", record)
    return state


@lru_cache(maxsize=1024)
def _reader(kind: Any) -> _Reader:
    """Return the reader of a kind: a function of a value and of what was read before."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _checked(_reader(inner[0]), inner[1])
    if origin in (Union, UnionType):
        return _either([_reader(one) for one in inner])
    if origin is Literal:
        return _checked(_any, Constraint(" or ".join(map(repr, inner)), partial(_is_one, inner)))
    if origin is tuple and inner[-1] is not Ellipsis:
        return _once(_row([_reader(one) for one in inner]))
    if origin in (tuple, list):
        return _once(_elements(origin, _reader(inner[0])))
    if origin in (dict, Mapping):
        return _once(_entries(_reader(inner[0]), _reader(inner[1])))
    if kind in (Any, object):
        return _any
    return _once(_members(kind)) if issubclass(kind, Schema) else _instance(kind)


def _any(value: object, _: _Seen) -> object:
    return value


def _is_one(choices: tuple[object, ...], value: object) -> bool:
    return type(value) in map(type, choices) and value in choices


def _once(reader: _Reader) -> _Reader:
    """Return a reader that reads a value once, however often it occurs."""

    def read_once(value: object, seen: _Seen) -> object:
        known = seen.setdefault(reader, {})
        found = known.get(id(value), known)
        if found is known:
            found = known[id(value)] = reader(value, seen)
        return found

    return read_once


def _instance(kind: type) -> _Reader:
    plain, expected = kind in _CALLED, _CALLED.get(kind, f"of class `{kind.__name__}`")

    def read_instance(value: object, _: _Seen) -> object:
        if type(value) is not kind and (plain or not isinstance(value, kind)):
            raise MismatchError(expected, value)
        return value

    return read_instance


def _checked(reader: _Reader, constraint: Constraint) -> _Reader:
    test = constraint.test

    def read_checked(value: object, seen: _Seen) -> object:
        found = reader(value, seen)
        if not test(found):
            raise MismatchError(constraint.expected, value)
        return found

    return read_checked


def _either(readers: Sequence[_Reader]) -> _Reader:
    """Return a reader that takes the first kind that fits, or else tells of the closest one."""

    def read_either(value: object, seen: _Seen) -> object:
        errors = []
        for reader in readers:
            try:
                return reader(value, seen)
            except MismatchError as error:
                errors.append(error)
        inside = [error for error in errors if error.path]
        raise (
            inside[0] if inside else MismatchError(either([one.expected for one in errors]), value)
        )

    return read_either


def _row(readers: Sequence[_Reader]) -> _Reader:
    def read_row(value: object, seen: _Seen) -> object:
        if not isinstance(value, list | tuple) or len(value) != len(readers):
            raise MismatchError(f"a list of {counted(len(readers), 'item')}", value)
        return tuple(_read_each(readers, value, seen))

    return read_row


def _elements(make: Callable[[list[object]], object], reader: _Reader) -> _Reader:
    def read_elements(value: object, seen: _Seen) -> object:
        if not isinstance(value, list | tuple):
            raise MismatchError("a list", value)
        return make(_read_each(repeat(reader), value, seen))

    return read_elements


def _read_each(readers: Iterable[_Reader], values: Sequence[object], seen: _Seen) -> list[object]:
    found: list[object] = []
    try:
        for reader, one in zip(readers, values, strict=False):
            found.append(reader(one, seen))
    except MismatchError as error:
        error.path.append(f"[{len(found)}]")
        raise
    return found


def _entries(key_reader: _Reader, reader: _Reader) -> _Reader:
    def read_entries(value: object, seen: _Seen) -> object:
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

    return read_entries


def _members(kind: type[Any]) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    is_object, is_closed = issubclass(kind, ObjectSchema), issubclass(kind, ClosedSchema)
    members = {one.name: _reader(hints[one.name]) for one in fields(kind)}
    required = {one.name for one in fields(kind) if one.default is one.default_factory}

    def read_members(value: object, seen: _Seen) -> object:
        held, found = attributes(value) if is_object else value, {}
        if not isinstance(held, dict):
            raise MismatchError("a dict", value)
        if is_closed and (strange := [key for key in held if key not in members]):
            name = str(strange[0])[:SHOWN]
            close = nearest(name, [*members])
            advice = f"; did you mean `{close}`?" if close else ""
            raise MismatchError("", name=f".{name}", problem=f"is unknown{advice}")
        for name, reader in members.items():
            try:
                if name in held:
                    found[name] = reader(held[name], seen)
                elif name in required:
                    raise MismatchError("", problem="is missing")
            except MismatchError as error:
                error.path.append(f".{name}")
                raise
        return kind(**found)

    return read_members
