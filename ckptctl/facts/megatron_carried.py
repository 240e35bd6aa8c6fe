"""What a checkpoint of Megatron's programs records, for another one of the same tensors.

Plain values travel; an object that none can be made of is left out by name. How ranks divided the
model, and what else they saved, is said anew: one rank, and weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ckptctl.facts.megatron_files import (
    ONE_RANK,
    UNSAVED,
    container,
    dtype_of,
    precision,
    vocabulary,
)
from ckptctl.planner.config_facts import Json

DIVISOR = "make_vocab_size_divisible_by"
"""What the rows of a vocabulary are padded to a multiple of, times the tensor-parallel ranks."""
TAG = "!"
"""The key under which a value of YAML that was not made is named."""


class Carried(NamedTuple):
    """What travels, and the names of what does not."""

    values: dict[str, object]
    left_out: list[str]


def arguments(record: Json, padded: int | None, dtype: str | None) -> Carried:
    """Return Megatron-LM's arguments of a *record* of them.

    Args:
        record: What ``common.pt`` holds.
        padded: The rows of the embedding; None: it is not there.
        dtype: The element type of the weights.
    """
    found = _plain(record)
    rows: dict[str, object] = {} if padded is None else {"padded_vocab_size": padded}
    step = vocabulary(found.values.get("vocab_size"), padded).get(DIVISOR)
    rows |= {} if step is None else {DIVISOR: step}
    values = {**found.values, **ONE_RANK, **UNSAVED, **precision(dtype), **rows}
    return Carried(values, found.left_out)


def run_config(record: Json, padded: int | None, dtype: str | None) -> Carried:
    """Return ``run_config.yaml`` of a *record* of it; see :func:`arguments`."""
    found = _plain(record)
    stated = found.values.get("model")
    model = dict(stated) if isinstance(stated, Mapping) else {}
    rows = vocabulary(model["vocab_size"], padded) if padded and model.get("vocab_size") else {}
    model |= {**ONE_RANK, **precision(dtype), "params_dtype": dtype_of(dtype), **rows}
    new = container(model)
    saved = {name: new[name] for name in ("model", "checkpoint")}
    return Carried({**new, **found.values, **saved}, found.left_out)


def _plain(record: Json) -> Carried:
    kept = {name: value for name, value in record.items() if _is_plain(value)}
    return Carried(kept, [name for name in record if name not in kept])


def _is_plain(value: object) -> bool:
    """Whether JSON, too, can state *value*, and no part of it is a note of an object's name."""
    if isinstance(value, Mapping):
        keys = all(type(key) is str and key != TAG for key in value)
        return keys and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in (str, int, bool, type(None)) or (
        type(value) is float and math.isfinite(value)
    )
