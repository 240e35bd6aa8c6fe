"""Options as Python callers give them: checked, and in the form that operations take.

Raises:
    UsageError: By all of these: the value makes no sense; the error names the option.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from ckptctl import dtypes
from ckptctl.errors import UsageError
from ckptctl.storage.destinations import require_path
from ckptctl.storage.paths import named

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.storage.errors_between import Tolerance

Tied = Literal["drop", "copy"]
Word = TypeVar("Word", bound=str)


def path(value: str | Path | None) -> Path | None:
    """Return a path as one."""
    return None if value is None else Path(value)


def output(value: str | Path | None) -> Path | None:
    """Return where a file is written: on this machine, with `file://` before it or without."""
    if value is None:
        return None
    if not os.fspath(value):
        raise UsageError("the path of the output is empty", hint="name a file")
    require_path(value)
    return named(value)


def globs(value: Sequence[str]) -> tuple[str, ...]:
    """Return globs; one alone is text."""
    return (value,) if isinstance(value, str) else tuple(value)


def positive(name: str, value: int | None) -> int | None:
    """Return a whole number above 0."""
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{value} is not a positive number", where=name)
    return value


def factor(name: str, value: float | None) -> float | None:
    """Return a finite number above 0."""
    if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
        raise UsageError(f"{value} is not a positive number", where=name)
    return value


def sizes(value: Mapping[str, int]) -> dict[str, int]:
    """Return axis sizes."""
    for name, size in value.items():
        positive(f"sizes: {name}", size)
    return dict(value)


def floating(dtype: str | None, option: str = "dtype") -> str | None:
    """Return torch's name of a floating dtype, as ``bfloat16`` of ``bf16``."""
    if dtype is None:
        return None
    name = dtypes.parse(str(dtype))
    if name is None or not dtypes.BY_NAME[name].floating:
        known = ", ".join(found.name for found in dtypes.BY_NAME.values() if found.floating)
        raise UsageError(f"`{dtype}` is not a floating dtype", where=option, why=f"known: {known}")
    return name


def only(value: str) -> Literal["model", "all"]:
    """Return which part of a checkpoint is meant."""
    return _one_of(("model", "all"), value, "only")


def weights(value: str | None) -> Weights | None:
    """Return which of two sets of weights is meant."""
    known: tuple[Weights, Weights] = ("master", "module")
    return None if value is None else _one_of(known, value, "weights")


def tied(value: str | None) -> Tied | None:
    """Return what becomes of tensors that share memory."""
    known: tuple[Tied, Tied] = ("drop", "copy")
    return None if value is None else _one_of(known, value, "tied")


def tolerance(atol: float | None, rtol: float | None) -> Tolerance | None:
    """Return the tolerance that the two say; None: neither is given."""
    from ckptctl.storage.errors_between import Tolerance

    for name, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{value} is not a tolerance", where=name)
    return None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)


def _one_of(known: tuple[Word, Word], value: str, option: str) -> Word:
    for word in known:
        if word == value:
            return word
    one, other = known
    raise UsageError(f"`{value}` is neither `{one}` nor `{other}`", where=option)
