"""Validation of inert pickle records, before objects are created from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptctl.errors import UnsafePickleError, UnsupportedError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_reader import escape_name
from ckptctl.units import pluralize

MAX_INT = 1 << 63
NestedBuilder = Callable[[object], object]
"""Function that creates the value of a pickle record nested in another record."""
RecordBuilder = Callable[[Inert, NestedBuilder], object]
"""Function that creates an object of one class from its pickle record.

Raises:
    UnsupportedError: The object was pickled in a way that its class never uses.
"""
RecordBuilders = Mapping[Global, RecordBuilder]
POSITIONS = {"pos": "key", "buffer_pos": "buffer"}
"""Keys of RNG states that contain a position, with the key of the array that each indexes."""
POSITION_PARTS = frozenset({*POSITIONS, *POSITIONS.values()})


def malformed_record_error(record: Inert | Global | str, why: str) -> UnsupportedError:
    """Build the error for an object that was pickled in a way that its class never uses."""
    return UnsupportedError(f"malformed `{format_class(record)}` object", why=why)


def disallowed_class_error(record: Inert | Global | str) -> UnsafePickleError:
    """Build the error for a record of a class that is not known to be harmless."""
    return UnsafePickleError(f"it contains a `{format_class(record)}`")


def format_class(record: Inert | Global | str) -> str:
    """Format the class of a record for messages."""
    if isinstance(record, Inert):
        return f"{escape_name(record.module)}.{escape_name(record.name)}"
    return escape_name(str(record))


def get_arguments(record: Inert, minimum: int, maximum: int | None = None) -> tuple[object, ...]:
    """Return the constructor arguments of a record.

    Raise if their number is not from *minimum* to *maximum* (by default, exactly *minimum*), or if
    the record also has a state or elements.
    """
    if record.state is not None or record.appended is not None or record.entries is not None:
        raise malformed_record_error(record, "it has a state or elements")
    count = len(record.args)
    if not minimum <= count <= (minimum if maximum is None else maximum):
        raise malformed_record_error(record, f"it has {pluralize(count, 'argument')}")
    return record.args


def get_attributes(record: Inert) -> dict[str, object]:
    """Return the attributes of a record, or raise if it has arguments or elements."""
    state = {} if record.state is None else record.state
    if record.args or record.appended is not None or record.entries is not None:
        raise malformed_record_error(record, "it has arguments or elements")
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise malformed_record_error(record, "its state is not a dict of attributes")
    return state


def check_int(
    record: Inert | str, value: object, minimum: int = -MAX_INT, end: int = MAX_INT
) -> int:
    """Return *value*, or raise unless it is an integer with ``minimum <= value < end``."""
    if type(value) is not int or not minimum <= value < end:
        raise malformed_record_error(record, "a number in it is invalid or out of range")
    return value


def check_str(record: Inert, value: object) -> str:
    """Return *value*, or raise if it is not a string."""
    if type(value) is not str:
        raise malformed_record_error(record, "an argument is not a string")
    return value


def require_positions(state: Mapping[object, object]) -> None:
    """Raise if a random generator's position is out of range of its state array.

    numpy accepts any position (``numpy/random/_mt19937.pyx``, ``_philox.pyx``) and draws the next
    number from there, even outside of the array.
    """
    for name, numbers in POSITIONS.items():
        position, array = state.get(name), state.get(numbers)
        if hasattr(array, "dtype") and type(position) is int and not 0 <= position <= len(array):  # type: ignore[arg-type]
            raise UnsupportedError(
                "it is not a valid state of a random-number generator",
                why=f"position {position:,} of {pluralize(len(array), 'number')}",  # type: ignore[arg-type]
            )
