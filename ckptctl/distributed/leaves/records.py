"""Checks of the inert records that a pickle becomes, before anything is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptctl.errors import UnsafePickleError, UnsupportedError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_reader import shown
from ckptctl.units import counted

MAX_INT = 1 << 63
Make = Callable[[object], object]
"""Returns the value that a record inside of another one stands for."""
Maker = Callable[[Inert, Make], object]
"""Returns the value that a record of one class stands for.

Raises:
    UnsupportedError: The record is none that the class writes.
"""
Makers = Mapping[Global, Maker]
POSITIONS = {"pos": "key", "buffer_pos": "buffer"}
"""What each position counts in."""
PARTS = frozenset({*POSITIONS, *POSITIONS.values()})


def wrong(record: Inert | Global | str, why: str) -> UnsupportedError:
    """Return the error for a record that its class does not write."""
    return UnsupportedError(f"malformed `{class_of(record)}` object", why=why)


def unknown(record: Inert | Global | str) -> UnsafePickleError:
    """Return the error for a record of a class that is not known to be harmless."""
    return UnsafePickleError(f"it contains a `{class_of(record)}`")


def class_of(record: Inert | Global | str) -> str:
    """Return the class of a record as errors show it."""
    if isinstance(record, Inert):
        return f"{shown(record.module)}.{shown(record.name)}"
    return shown(str(record))


def arguments(record: Inert, least: int, most: int | None = None) -> tuple[object, ...]:
    """Return the arguments of a record that holds nothing else."""
    if record.state is not None or record.appended is not None or record.entries is not None:
        raise wrong(record, "it has a state or elements")
    count = len(record.args)
    if not least <= count <= (least if most is None else most):
        raise wrong(record, f"it has {counted(count, 'argument')}")
    return record.args


def attributes(record: Inert) -> dict[str, object]:
    """Return the attributes of a record that was made without arguments."""
    state = {} if record.state is None else record.state
    if record.args or record.appended is not None or record.entries is not None:
        raise wrong(record, "it has arguments or elements")
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise wrong(record, "its state is not a dict of attributes")
    return state


def integer(record: Inert | str, value: object, least: int = -MAX_INT, end: int = MAX_INT) -> int:
    """Return *value* if it is a whole number from *least* on and below *end*."""
    if type(value) is not int or not least <= value < end:
        raise wrong(record, "a number in it is invalid or out of range")
    return value


def text(record: Inert, value: object) -> str:
    """Return *value* if it is a string."""
    if type(value) is not str:
        raise wrong(record, "an argument is not a string")
    return value


def require_positions(state: Mapping[object, object]) -> None:
    """Refuse a generator's state whose position lies outside of its numbers.

    numpy takes any position (``numpy/random/_mt19937.pyx``, ``_philox.pyx``) and draws the next
    number from there, inside of the state or not.
    """
    for name, numbers in POSITIONS.items():
        at, found = state.get(name), state.get(numbers)
        if hasattr(found, "dtype") and type(at) is int and not 0 <= at <= len(found):  # type: ignore[arg-type]
            raise UnsupportedError(
                "it is not a valid state of a random-number generator",
                why=f"position {at:,} of {counted(len(found), 'number')}",  # type: ignore[arg-type]
            )
