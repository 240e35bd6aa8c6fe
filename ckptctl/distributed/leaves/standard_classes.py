"""Objects of standard-library classes, created with checked arguments.

Source: results of ``__reduce_ex__`` of these classes in Python 3.11 to 3.14 (``Lib/datetime.py``,
``Lib/fractions.py``, ``Lib/uuid.py``, ``Modules/_collectionsmodule.c``, ...).
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import types
import uuid
from collections import Counter, deque
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from ckptctl.distributed.leaves.records import (
    NestedBuilder,
    RecordBuilder,
    check_int,
    check_str,
    get_arguments,
    get_attributes,
    malformed_record_error,
)
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.units import pluralize

_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


def build_decimal(record: Inert, _: NestedBuilder) -> object:
    """Create a ``Decimal`` from its string."""
    (digits,) = get_arguments(record, 1)
    try:
        return Decimal(check_str(record, digits))
    except InvalidOperation:
        raise malformed_record_error(record, "its text is not a number") from None


def build_fraction(record: Inert, _: NestedBuilder) -> object:
    """Create a ``Fraction`` of bounded size."""
    numerator, denominator = (
        check_int(record, number, -_MAX_FRACTION, _MAX_FRACTION)
        for number in get_arguments(record, 2)
    )
    return Fraction(numerator, denominator)


_MAX_FRACTION = 1 << 14_000  # about as many digits as Python turns into text


def _unpack_arguments(record: Inert, nbytes: int) -> tuple[bytes, tuple[object, ...]]:
    """Return the packed bytes of a date or time, and a tuple of its time zone or of nothing."""
    content, *rest = get_arguments(record, 1, 2)
    if type(content) is not bytes or len(content) != nbytes:
        raise malformed_record_error(record, f"it is not packed into {pluralize(nbytes, 'byte')}")
    return content, tuple(rest)


def _parse_zone(
    record: Inert, rest: tuple[object, ...], make: NestedBuilder
) -> datetime.tzinfo | None:
    zone = make(rest[0]) if rest else None
    if zone is not None and type(zone) is not datetime.timezone:
        raise malformed_record_error(record, "its time zone is invalid")
    return zone


def build_date(record: Inert, _: NestedBuilder) -> object:
    """Create a ``date`` from its packed bytes."""
    packed, rest = _unpack_arguments(record, 4)
    if rest:
        raise malformed_record_error(record, "it has a time zone")
    return datetime.date(packed[0] << 8 | packed[1], packed[2], packed[3])


def build_datetime(record: Inert, make: NestedBuilder) -> object:
    """Create a ``datetime`` from its packed bytes and time zone."""
    packed, rest = _unpack_arguments(record, 10)
    high, low, month, day, hour, minute, second, *microsecond = packed
    return datetime.datetime(
        high << 8 | low,
        month & 0x7F,
        day,
        hour,
        minute,
        second,
        int.from_bytes(microsecond, "big"),
        _parse_zone(record, rest, make),
        fold=month >> 7,
    )


def build_time(record: Inert, make: NestedBuilder) -> object:
    """Create a ``time`` from its packed bytes and time zone."""
    packed, rest = _unpack_arguments(record, 6)
    hour, minute, second, *microsecond = packed
    return datetime.time(
        hour & 0x7F,
        minute,
        second,
        int.from_bytes(microsecond, "big"),
        _parse_zone(record, rest, make),
        fold=hour >> 7,
    )


def build_timedelta(record: Inert, _: NestedBuilder) -> object:
    """Create a ``timedelta`` from its days, seconds and microseconds."""
    days, seconds, microseconds = (check_int(record, number) for number in get_arguments(record, 3))
    return datetime.timedelta(days, seconds, microseconds)


def build_timezone(record: Inert, make: NestedBuilder) -> object:
    """Create a ``timezone`` from its offset and name."""
    offset, *name = get_arguments(record, 1, 2)
    delta = make(offset)
    if type(delta) is not datetime.timedelta:
        raise malformed_record_error(record, "its offset is invalid")
    return datetime.timezone(delta, *(check_str(record, part) for part in name))


def build_uuid(record: Inert, _: NestedBuilder) -> object:
    """Create a ``UUID`` from its attributes."""
    state = get_attributes(record)
    if not {"int"} <= state.keys() <= {"int", "is_safe"}:
        raise malformed_record_error(record, "its attributes are unexpected")
    safe = uuid.SafeUUID(state.get("is_safe", uuid.SafeUUID.unknown.value))
    return uuid.UUID(int=check_int(record, state["int"], 0, 1 << 128), is_safe=safe)


def build_range(record: Inert, _: NestedBuilder) -> object:
    """Create a ``range`` from its start, stop and step."""
    return range(*(check_int(record, number) for number in get_arguments(record, 3)))


def build_deque(record: Inert, make: NestedBuilder) -> object:
    """Create a ``deque`` with its elements and maximum length."""
    if record.state is not None or record.entries is not None:
        raise malformed_record_error(record, "it has a state")
    if len(record.args) > 2 or (record.args and record.args[0] != ()):
        raise malformed_record_error(record, "it is not created empty")
    max_length = record.args[1] if len(record.args) == 2 else None
    elements = [make(element) for element in record.appended or ()]
    return deque(elements, None if max_length is None else check_int(record, max_length, 0))


def build_counter(record: Inert, make: NestedBuilder) -> object:
    """Create a ``Counter`` from its counts, without calling ``Counter.update``."""
    (counts,) = get_arguments(record, 1)
    if type(counts) is not dict:
        raise malformed_record_error(record, "its argument is not a dict")
    counter: Counter[object] = Counter()
    dict.update(counter, make(counts))  # type: ignore[call-overload]
    return counter


def build_namespace(record: Inert, make: NestedBuilder) -> object:
    """Create an argparse or simple namespace from its attributes."""
    kind = argparse.Namespace if record.module == "argparse" else types.SimpleNamespace
    namespace = kind()
    vars(namespace).update((name, make(value)) for name, value in get_attributes(record).items())
    return namespace


def build_path(record: Inert, _: NestedBuilder) -> object:
    """Create a path of this operating system from its parts."""
    parts = [check_str(record, part) for part in get_arguments(record, 0, len(record.args))]
    try:
        path: object = getattr(pathlib, record.name)(*parts)
    except NotImplementedError as error:  # a path of another operating system
        raise malformed_record_error(record, str(error)) from None
    return path


STANDARD_BUILDERS: dict[Global, RecordBuilder] = {
    Global("decimal", "Decimal"): build_decimal,
    Global("fractions", "Fraction"): build_fraction,
    Global("datetime", "date"): build_date,
    Global("datetime", "datetime"): build_datetime,
    Global("datetime", "time"): build_time,
    Global("datetime", "timedelta"): build_timedelta,
    Global("datetime", "timezone"): build_timezone,
    Global("uuid", "UUID"): build_uuid,
    Global("builtins", "range"): build_range,
    Global("collections", "deque"): build_deque,
    Global("collections", "Counter"): build_counter,
    Global("argparse", "Namespace"): build_namespace,
    Global("types", "SimpleNamespace"): build_namespace,
    **{
        Global(module, name): build_path
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
    },
}
