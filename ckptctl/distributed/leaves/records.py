"""Checks of inert pickle records before objects are created from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptctl.errors import UnsafePickleError, UnsupportedError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_reader import escape_name
from ckptctl.units import pluralize

MAX_INT = 1 << 63
Make = Callable[[object], object]
"""Creates the value of a nested record."""
Maker = Callable[[Inert, Make], object]
"""Creates the value of a record of one class.

Raises:
    UnsupportedError: The class does not write such a record.
"""
Makers = Mapping[Global, Maker]
POSITIONS = {"pos": "key", "buffer_pos": "buffer"}
"""Keys of generator states that contain a position, and of the arrays that they index."""
PARTS = frozenset({*POSITIONS, *POSITIONS.values()})


def wrong(record: Inert | Global | str, why: str) -> UnsupportedError:
    """Build the error for a record that its class does not write."""
    return UnsupportedError(f"malformed `{class_of(record)}` object", why=why)


def unknown(record: Inert | Global | str) -> UnsafePickleError:
    """Build the error for a record of a class that is not known to be harmless."""
    return UnsafePickleError(f"it contains a `{class_of(record)}`")


def class_of(record: Inert | Global | str) -> str:
    """Format the class of a record for messages."""
    if isinstance(record, Inert):
        return f"{escape_name(record.module)}.{escape_name(record.name)}"
    return escape_name(str(record))


def arguments(record: Inert, least: int, most: int | None = None) -> tuple[object, ...]:
    """Return the arguments of a record, or raise on a wrong number, a state or elements."""
    if record.state is not None or record.appended is not None or record.entries is not None:
        raise wrong(record, "it has a state or elements")
    count = len(record.args)
    if not least <= count <= (least if most is None else most):
        raise wrong(record, f"it has {pluralize(count, 'argument')}")
    return record.args


def attributes(record: Inert) -> dict[str, object]:
    """Return the attributes of a record, or raise if it has arguments or elements."""
    state = {} if record.state is None else record.state
    if record.args or record.appended is not None or record.entries is not None:
        raise wrong(record, "it has arguments or elements")
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise wrong(record, "its state is not a dict of attributes")
    return state


def integer(record: Inert | str, value: object, least: int = -MAX_INT, end: int = MAX_INT) -> int:
    """Return *value*, or raise if it is not an integer from *least* to below *end*."""
    if type(value) is not int or not least <= value < end:
        raise wrong(record, "a number in it is invalid or out of range")
    return value


def text(record: Inert, value: object) -> str:
    """Return *value*, or raise if it is not a string."""
    if type(value) is not str:
        raise wrong(record, "an argument is not a string")
    return value


def require_positions(state: Mapping[object, object]) -> None:
    """Raise if a random generator's position is out of range of its state array.

    numpy accepts any position (``numpy/random/_mt19937.pyx``, ``_philox.pyx``) and draws the next
    number from there, even outside of the array.
    """
    for name, numbers in POSITIONS.items():
        at, found = state.get(name), state.get(numbers)
        if hasattr(found, "dtype") and type(at) is int and not 0 <= at <= len(found):  # type: ignore[arg-type]
            raise UnsupportedError(
                "it is not a valid state of a random-number generator",
                why=f"position {at:,} of {pluralize(len(found), 'number')}",  # type: ignore[arg-type]
            )
