"""Whether the fields of a model family hold what they are declared to hold.

Python does not ask; in a file that a user wrote nobody else may have done so either.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from ckptctl.planner.layouts import Family


def misfits(family: Family) -> Iterator[str]:
    """Yield which fields of *family* are of a wrong type, for people."""
    hints = get_type_hints(Family)
    for field in fields(family):
        value = getattr(family, field.name)
        if not _fits(value, hints[field.name]):
            yield f"`{field.name}` is {value!r}, which is no {field.type}"


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple and isinstance(value, tuple):
        each = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(each) == len(value) and all(map(_fits, value, each))
    if origin is Mapping and isinstance(value, Mapping):
        return all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True
