"""Schemas for untrusted data, declared as Python types, and readers that return typed values.

::

    @dataclass(frozen=True, slots=True)
    class Rule(Schema):
        names: Annotated[tuple[str, ...], size_between(1, 64)]
        dim: Annotated[int, value_in_range(0, MAX_RANK)] | None = None
        size: str | None = None

    with malformed_errors("malformed rules file", where):
        rules = read_as(tuple[Rule, ...], content["rule"], "rule")

The data may be hostile. Nothing that the data names is called. A value that is referenced many
times is read once, so time and memory are proportional to the size of the data. Messages show only
a few characters of a value.
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

from ckptctl.errors import CkptError, UnsupportedError, find_nearest, format_alternatives
from ckptctl.storage.pickles.inert import Inert
from ckptctl.units import pluralize

MAX_SHOWN_CHARACTERS = 40
"""Maximum number of characters of a value or key that a message shows."""
T = TypeVar("T")
_Seen = defaultdict[Any, dict[int, Any]]
"""Values that have been read already, by reader and by ``id`` of the untrusted value."""
_Reader = Callable[[Any, _Seen], Any]
_TYPE_NAMES = {
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
    """Base class of dataclasses that describe the keys of a dict.

    Fields without a default are required. Other keys of the dict are ignored.
    """

    __slots__ = ()


class ClosedSchema(Schema):
    """Base class of schemas that reject unknown keys."""

    __slots__ = ()


class ObjectSchema(Schema):
    """Base class of schemas for the attributes of a pickled object, or the keys of a dict."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """Requirement on a value, which is declared next to its type in ``Annotated``.

    Attributes:
        expected: Description of valid values, with an article.
        test: Returns whether a value of the declared type is valid.
    """

    expected: str
    test: Callable[[Any], bool]


def value_in_range(minimum: int, end: int) -> Constraint:
    """Require an integer with ``minimum <= value < end``."""
    return Constraint(
        f"an integer from {minimum} to {end - 1}", lambda value: minimum <= value < end
    )


def size_between(minimum: int, maximum: int) -> Constraint:
    """Require a collection of *minimum* to *maximum* items."""
    return Constraint(
        f"{minimum:,} to {pluralize(maximum, 'item')}",
        lambda value: minimum <= len(value) <= maximum,
    )


Natural = Annotated[int, Constraint("a non-negative integer", lambda value: 0 <= value < 1 << 63)]
NOT_EMPTY = Constraint("a collection that is not empty", bool)


class MalformedError(ValueError):
    """Malformed data error, to which :func:`wrap_malformed_errors` adds message and file name."""


class MismatchError(MalformedError):
    """A value does not match its schema.

    Args:
        expected: Description of valid values, with an article.
        value: The actual value.
        name: Last component of the path to the value, such as ``.dim`` or ``[0]``.
        problem: Message to show instead of *expected* and *value*.
    """

    def __init__(
        self, expected: str, value: object = None, name: str = "", *, problem: str = ""
    ) -> None:
        super().__init__(expected)
        self.expected = expected
        self.problem = problem or f"is {describe_value(value)}, expected {expected}"
        self.path = [name] if name else []

    def __str__(self) -> str:
        path = "".join(reversed(self.path)).removeprefix(".")
        return f"`{path}` {self.problem}" if path else f"it {self.problem}"


def describe_value(value: object) -> str:
    """Describe the type or the shortened content of *value* for a message."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN_CHARACTERS])
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {pluralize(value.bit_length(), 'bit')}"
    if value is None or type(value) in (bool, int, float):
        return str(value)
    name = value.name[:MAX_SHOWN_CHARACTERS] if isinstance(value, Inert) else type(value).__name__
    return _TYPE_NAMES.get(type(value), f"of class `{name}`")


def read_as(kind: type[T], value: object, name: str = "") -> T:
    """Convert *value* to the type *kind*.

    Args:
        kind: A :class:`Schema`, a built-in type, or a collection of them.
        value: Untrusted value read from a file.
        name: Name of the value in messages.

    Raises:
        MismatchError: The value does not match *kind*; see :func:`wrap_malformed_errors`.
    """
    try:
        result: T = _build_reader(cast("Any", kind))(value, defaultdict(dict))
    except MismatchError as error:
        error.path.append(name)
        raise
    return result


def read_nested_or_none(kind: type[T], value: object, *names: str) -> T | None:
    """Return the value at the keys *names* of nested dicts, or None if it is not a *kind*."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    try:
        return read_as(kind, value)
    except MismatchError:
        return None


@contextmanager
def wrap_malformed_errors(
    message: str, where: str, hint: str | None = None, error: type[CkptError] = UnsupportedError
) -> Iterator[None]:
    """Convert exceptions that the block raises while reading untrusted data to *error*."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as raised:
        is_malformed = isinstance(raised, MalformedError)
        why = str(raised) if is_malformed else f"{type(raised).__name__}: {raised}"
        raise error(message, where=where, why=why, hint=hint) from raised


def get_record_attributes(record: object) -> Mapping[str, object]:
    """Return the attributes of an inert record, from its ``__dict__`` or its slots."""
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, tuple) and len(state) == 2:
        slots = [part or {} for part in state]
        state = slots[0] | slots[1] if all(isinstance(part, dict) for part in slots) else None
    if not isinstance(state, dict):
        raise MismatchError("an object with attributes", record)
    return state


@lru_cache(maxsize=1024)
def _build_reader(kind: Any) -> _Reader:
    """Build the function that reads values of *kind*."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return partial(_read_checked, _build_reader(inner[0]), inner[1])
    if origin in (Union, UnionType):
        return partial(_read_union, [_build_reader(item) for item in inner])
    if origin is Literal:
        types = {type(choice) for choice in inner}
        choice_constraint = Constraint(
            " or ".join(map(repr, inner)), lambda value: type(value) in types and value in inner
        )
        return partial(_read_checked, _read_any, choice_constraint)
    if kind in (Any, object):
        return _read_any
    if origin is tuple and inner[-1] is not Ellipsis:
        reader: _Reader = partial(_read_fixed_tuple, [_build_reader(item) for item in inner])
    elif origin in (tuple, list):
        reader = partial(_read_elements, origin, _build_reader(inner[0]))
    elif origin in (dict, Mapping):
        reader = partial(_read_dict, _build_reader(inner[0]), _build_reader(inner[1]))
    elif issubclass(kind, Schema):
        hints = get_type_hints(kind, include_extras=True)
        field_readers = {member.name: _build_reader(hints[member.name]) for member in fields(kind)}
        required = {
            member.name for member in fields(kind) if member.default is member.default_factory
        }
        reader = partial(_read_schema, kind, field_readers, required)
    else:
        return _build_instance_reader(kind)
    return partial(_read_once, reader)


def _read_any(value: object, _: _Seen) -> object:
    return value


def _read_once(reader: _Reader, value: object, seen: _Seen) -> object:
    """Read *value* with *reader*, or return the result of an earlier read of the same object."""
    results, identity = seen[reader], id(value)
    if identity not in results:
        results[identity] = reader(value, seen)
    return results[identity]


def _build_instance_reader(kind: type) -> _Reader:
    """Build a reader of instances of *kind*, as a closure for speed."""

    def read_instance(value: object, _: _Seen) -> object:
        if type(value) is not kind and (kind in _TYPE_NAMES or not isinstance(value, kind)):
            raise MismatchError(_TYPE_NAMES.get(kind, f"of class `{kind.__name__}`"), value)
        return value

    return read_instance


def _read_checked(reader: _Reader, constraint: Constraint, value: object, seen: _Seen) -> object:
    result = reader(value, seen)
    if not constraint.test(result):
        raise MismatchError(constraint.expected, value)
    return result


def _read_union(readers: Sequence[_Reader], value: object, seen: _Seen) -> object:
    """Read a value with the first reader that accepts it, or raise the most specific error."""
    errors = []
    for reader in readers:
        try:
            return reader(value, seen)
        except MismatchError as error:
            errors.append(error)
    nested_errors = [error for error in errors if error.path]
    raise (
        nested_errors[0]
        if nested_errors
        else MismatchError(format_alternatives([mismatch.expected for mismatch in errors]), value)
    )


def _read_fixed_tuple(readers: Sequence[_Reader], value: object, seen: _Seen) -> object:
    if not isinstance(value, list | tuple) or len(value) != len(readers):
        raise MismatchError(f"a list of {pluralize(len(readers), 'item')}", value)
    return tuple(_read_each(readers, value, seen))


def _read_elements(
    make: Callable[[list[object]], object], reader: _Reader, value: object, seen: _Seen
) -> object:
    if not isinstance(value, list | tuple):
        raise MismatchError("a list", value)
    return make(_read_each(repeat(reader), value, seen))


def _read_each(readers: Iterable[_Reader], values: Sequence[object], seen: _Seen) -> list[object]:
    results: list[object] = []
    try:
        for reader, item in zip(readers, values, strict=False):
            results.append(reader(item, seen))
    except MismatchError as error:
        error.path.append(f"[{len(results)}]")
        raise
    return results


def _read_dict(key_reader: _Reader, reader: _Reader, value: object, seen: _Seen) -> object:
    if not isinstance(value, dict):
        raise MismatchError("a dict", value)
    results = {}
    key: object = None
    try:
        for key, item in value.items():
            results[key_reader(key, seen)] = reader(item, seen)
    except MismatchError as error:
        error.path.append(f"[{describe_value(key)}]")
        raise
    return value if reader is _read_any else results


def _read_schema(
    kind: type[Any],
    members: Mapping[str, _Reader],
    required: Collection[str],
    value: object,
    seen: _Seen,
) -> object:
    if isinstance(value, dict):
        content: Mapping[Any, object] = value
    elif issubclass(kind, ObjectSchema):
        content = get_record_attributes(value)
    else:
        raise MismatchError("a dict", value)
    if issubclass(kind, ClosedSchema) and (
        unknown_keys := [key for key in content if key not in members]
    ):
        name = str(unknown_keys[0])[:MAX_SHOWN_CHARACTERS]
        similar_key = find_nearest(name, [*members])
        advice = f"; did you mean `{similar_key}`?" if similar_key else ""
        raise MismatchError("", name=f".{name}", problem=f"is unknown{advice}")
    arguments: dict[str, object] = {}
    name = ""
    try:
        for name, reader in members.items():
            if name in content:
                arguments[name] = reader(content[name], seen)
            elif name in required:
                raise MismatchError("", problem="is missing")
    except MismatchError as error:
        error.path.append(f".{name}")
        raise
    return kind(**arguments)
