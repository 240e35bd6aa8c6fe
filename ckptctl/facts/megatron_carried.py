"""Megatron records of a source, adapted to an output with the same tensors.

Plain values are copied; other objects are skipped and reported by name. Fields on model parallelism
and saved state are rewritten: one rank, and only weights.
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
"""Field with the padding multiple of the vocabulary, before the tensor-parallel ranks."""
TAG = "!"
"""Key with the name of a YAML object that was not constructed."""


class Carried(NamedTuple):
    """Copied values, and the names of the values that were skipped."""

    values: dict[str, object]
    left_out: list[str]


def arguments(record: Json, padded: int | None, dtype: str | None) -> Carried:
    """Adapt Megatron-LM's arguments in *record* to the output.

    Args:
        record: Content of ``common.pt``.
        padded: Rows of the embedding, or None if it is missing.
        dtype: The element type of the weights.
    """
    found = _plain(record)
    rows: dict[str, object] = {} if padded is None else {"padded_vocab_size": padded}
    step = vocabulary(found.values.get("vocab_size"), padded).get(DIVISOR)
    rows |= {} if step is None else {DIVISOR: step}
    values = {**found.values, **ONE_RANK, **UNSAVED, **precision(dtype), **rows}
    return Carried(values, found.left_out)


def run_config(record: Json, padded: int | None, dtype: str | None) -> Carried:
    """Adapt the ``run_config.yaml`` in *record* to the output, like :func:`arguments`."""
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
    """Return whether JSON can store *value*, and no part of it names a skipped object."""
    if isinstance(value, Mapping):
        keys = all(type(key) is str and key != TAG for key in value)
        return keys and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in (str, int, bool, type(None)) or (
        type(value) is float and math.isfinite(value)
    )
