"""Comparing leaves that are no tensors: numbers, text, and what an optimizer says of itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptctl.catalog import Catalog
from ckptctl.ops.comparison.pairing import LeafPair
from ckptctl.ops.comparison.result import LeafDifference
from ckptctl.storage.pickles.inert import DictRecord, Inert

SHOWN = 60
FIELDS = ("module", "name", "args", "state", "newobj", "appended", "entries")


def compare_leaves(a: Catalog, b: Catalog, pairs: Sequence[LeafPair]) -> tuple[LeafDifference, ...]:
    """Return which of the leaves differ.

    Args:
        a: A checkpoint whose leaves were read.
        b: Another one.
        pairs: The leaves.
    """
    found = []
    for name, other in pairs:
        x, y = a.blobs[name].value, b.blobs[other].value
        if not same_value(x, y):
            found.append(LeafDifference(name, _short(x), _short(y)))
    return tuple(found)


def same_value(a: object, b: object) -> bool:
    """Return whether two values are of one type and equal; NaN is equal to the same NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict) and isinstance(b, dict):
        return (
            _record(a) == _record(b)
            and a.keys() == b.keys()
            and all(same_value(value, b[key]) for key, value in a.items())
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, Inert) and isinstance(b, Inert):
        return all(same_value(getattr(a, field), getattr(b, field)) for field in FIELDS)
    return a == b


def _record(value: object) -> object:
    return value.origin if isinstance(value, DictRecord) else None


def _short(value: object) -> str:
    text = f"{value!r}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
