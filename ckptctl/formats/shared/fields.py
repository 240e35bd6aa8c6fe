"""Fields of foreign metadata, and one error for all that is not where it is expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptctl.errors import UnsupportedError
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.torch_tensors import MAX_INT, MAX_RANK

Integers = tuple[int, ...]


def attributes(record: object) -> Mapping[str, object]:
    """Return the attributes of an inert record, from its dict or its slots."""
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, tuple) and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        raise TypeError(f"a {type(record).__name__} without attributes")
    return state


def integers(value: object) -> Integers:
    """Return a short sequence of numbers from 0 on."""
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK:
        raise TypeError("a size is not a short sequence")
    if any(type(item) is not int or not 0 <= item < MAX_INT for item in value):
        raise TypeError("a size is not made of numbers from 0 on")
    return tuple(value)


@contextmanager
def malformed(what: str, where: str, hint: str | None = None) -> Iterator[None]:
    """Turn what goes wrong while fields are taken out of foreign data into one error.

    Args:
        what: What is wrong then, as in ``this is not a manifest``.
        where: The file.
        hint: What to do about it; None: nothing.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError(what, where=where, why=why, hint=hint) from error
