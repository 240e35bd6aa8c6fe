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
    Make,
    Maker,
    arguments,
    attributes,
    integer,
    text,
    wrong,
)
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.units import pluralize

_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


def _decimal(record: Inert, _: Make) -> object:
    """Create a ``Decimal``."""
    (digits,) = arguments(record, 1)
    try:
        return Decimal(text(record, digits))
    except InvalidOperation:
        raise wrong(record, "its text is not a number") from None


def _fraction(record: Inert, _: Make) -> object:
    """Create a ``Fraction`` of bounded size."""
    numerator, denominator = (integer(record, one, -_LONG, _LONG) for one in arguments(record, 2))
    return Fraction(numerator, denominator)


_LONG = 1 << 14_000  # about as many digits as Python turns into text


def _packed(record: Inert, nbytes: int) -> tuple[bytes, tuple[object, ...]]:
    """Return the packed bytes of a date or time, and its time zone if it has one."""
    content, *rest = arguments(record, 1, 2)
    if type(content) is not bytes or len(content) != nbytes:
        raise wrong(record, f"it is not packed into {pluralize(nbytes, 'byte')}")
    return content, tuple(rest)


def _zone(record: Inert, rest: tuple[object, ...], make: Make) -> datetime.tzinfo | None:
    found = make(rest[0]) if rest else None
    if found is not None and type(found) is not datetime.timezone:
        raise wrong(record, "its time zone is invalid")
    return found


def _date(record: Inert, _: Make) -> object:
    """Create a ``date`` from its packed bytes."""
    packed, rest = _packed(record, 4)
    if rest:
        raise wrong(record, "it has a time zone")
    return datetime.date(packed[0] << 8 | packed[1], packed[2], packed[3])


def _datetime(record: Inert, make: Make) -> object:
    """Create a ``datetime`` from its packed bytes and time zone."""
    packed, rest = _packed(record, 10)
    high, low, month, day, hour, minute, second, *microsecond = packed
    return datetime.datetime(
        high << 8 | low,
        month & 0x7F,
        day,
        hour,
        minute,
        second,
        int.from_bytes(microsecond, "big"),
        _zone(record, rest, make),
        fold=month >> 7,
    )


def _time(record: Inert, make: Make) -> object:
    """Create a ``time`` from its packed bytes and time zone."""
    packed, rest = _packed(record, 6)
    hour, minute, second, *microsecond = packed
    return datetime.time(
        hour & 0x7F,
        minute,
        second,
        int.from_bytes(microsecond, "big"),
        _zone(record, rest, make),
        fold=hour >> 7,
    )


def _timedelta(record: Inert, _: Make) -> object:
    """Create a ``timedelta``."""
    days, seconds, microseconds = (integer(record, one) for one in arguments(record, 3))
    return datetime.timedelta(days, seconds, microseconds)


def _timezone(record: Inert, make: Make) -> object:
    """Create a ``timezone`` from its offset and name."""
    offset, *name = arguments(record, 1, 2)
    found = make(offset)
    if type(found) is not datetime.timedelta:
        raise wrong(record, "its offset is invalid")
    return datetime.timezone(found, *(text(record, one) for one in name))


def _uuid(record: Inert, _: Make) -> object:
    """Create a ``UUID`` from its attributes."""
    state = attributes(record)
    if not {"int"} <= state.keys() <= {"int", "is_safe"}:
        raise wrong(record, "its attributes are unexpected")
    safe = uuid.SafeUUID(state.get("is_safe", uuid.SafeUUID.unknown.value))
    return uuid.UUID(int=integer(record, state["int"], 0, 1 << 128), is_safe=safe)


def _range(record: Inert, _: Make) -> object:
    """Create a ``range``."""
    return range(*(integer(record, one) for one in arguments(record, 3)))


def _deque(record: Inert, make: Make) -> object:
    """Create a ``deque`` with its elements and maximum length."""
    if record.state is not None or record.entries is not None:
        raise wrong(record, "it has a state")
    if len(record.args) > 2 or (record.args and record.args[0] != ()):
        raise wrong(record, "it is not created empty")
    longest = record.args[1] if len(record.args) == 2 else None
    elements = [make(one) for one in record.appended or ()]
    return deque(elements, None if longest is None else integer(record, longest, 0))


def _counter(record: Inert, make: Make) -> object:
    """Create a ``Counter`` without running its ``update``."""
    (counts,) = arguments(record, 1)
    if type(counts) is not dict:
        raise wrong(record, "its argument is not a dict")
    found: Counter[object] = Counter()
    dict.update(found, make(counts))  # type: ignore[call-overload]
    return found


def _namespace(record: Inert, make: Make) -> object:
    """Create an argparse or simple namespace from its attributes."""
    kind = argparse.Namespace if record.module == "argparse" else types.SimpleNamespace
    found = kind()
    vars(found).update((name, make(one)) for name, one in attributes(record).items())
    return found


def _path(record: Inert, _: Make) -> object:
    """Create a path of this operating system from its parts."""
    parts = [text(record, one) for one in arguments(record, 0, len(record.args))]
    try:
        found: object = getattr(pathlib, record.name)(*parts)
    except NotImplementedError as error:  # a path of another operating system
        raise wrong(record, str(error)) from None
    return found


STANDARD: dict[Global, Maker] = {
    Global("decimal", "Decimal"): _decimal,
    Global("fractions", "Fraction"): _fraction,
    Global("datetime", "date"): _date,
    Global("datetime", "datetime"): _datetime,
    Global("datetime", "time"): _time,
    Global("datetime", "timedelta"): _timedelta,
    Global("datetime", "timezone"): _timezone,
    Global("uuid", "UUID"): _uuid,
    Global("builtins", "range"): _range,
    Global("collections", "deque"): _deque,
    Global("collections", "Counter"): _counter,
    Global("argparse", "Namespace"): _namespace,
    Global("types", "SimpleNamespace"): _namespace,
    **{Global(module, name): _path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
