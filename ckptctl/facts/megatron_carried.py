"""Adapt the Megatron records of a source to an output with the same tensors.

Values that JSON can represent are copied. Other objects are skipped and reported by name. Fields
about model parallelism and saved state are rewritten, since the output has one rank and only
weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ckptctl.facts.megatron_files import (
    NO_TRAINING_STATE,
    ONE_RANK,
    build_config_container,
    build_precision_flags,
    build_vocabulary_fields,
    to_dtype_reference,
)
from ckptctl.planner.config_facts import Json

DIVISOR_FIELD = "make_vocab_size_divisible_by"
"""Field whose value, times the tensor-parallel size, is the padding multiple of the vocabulary."""
YAML_TAG_KEY = "!"
"""Key that stores the tag of a YAML object that was parsed but not constructed."""


class CopiedRecord(NamedTuple):
    """Values copied from a record, and names of the values that were skipped."""

    values: dict[str, object]
    skipped: list[str]


def adapt_arguments(record: Json, padded_rows: int | None, dtype: str | None) -> CopiedRecord:
    """Adapt Megatron-LM's arguments in *record* to the output.

    Args:
        record: Content of ``common.pt``.
        padded_rows: Rows of the embedding, or None if it is missing.
        dtype: The element type of the weights.
    """
    copied = _select_json_values(record)
    vocabulary_fields: dict[str, object] = (
        {} if padded_rows is None else {"padded_vocab_size": padded_rows}
    )
    divisor = build_vocabulary_fields(copied.values.get("vocab_size"), padded_rows).get(
        DIVISOR_FIELD
    )
    vocabulary_fields |= {} if divisor is None else {DIVISOR_FIELD: divisor}
    values = {
        **copied.values,
        **ONE_RANK,
        **NO_TRAINING_STATE,
        **build_precision_flags(dtype),
        **vocabulary_fields,
    }
    return CopiedRecord(values, copied.skipped)


def adapt_run_config(record: Json, padded_rows: int | None, dtype: str | None) -> CopiedRecord:
    """Adapt the ``run_config.yaml`` in *record* to the output, like :func:`adapt_arguments`."""
    copied = _select_json_values(record)
    model_section = copied.values.get("model")
    model = dict(model_section) if isinstance(model_section, Mapping) else {}
    vocabulary_fields = (
        build_vocabulary_fields(model["vocab_size"], padded_rows)
        if padded_rows and model.get("vocab_size")
        else {}
    )
    model |= {
        **ONE_RANK,
        **build_precision_flags(dtype),
        "params_dtype": to_dtype_reference(dtype),
        **vocabulary_fields,
    }
    document = build_config_container(model)
    output_sections = {name: document[name] for name in ("model", "checkpoint")}
    return CopiedRecord({**document, **copied.values, **output_sections}, copied.skipped)


def _select_json_values(record: Json) -> CopiedRecord:
    plain_values = {name: value for name, value in record.items() if _is_json_value(value)}
    return CopiedRecord(plain_values, [name for name in record if name not in plain_values])


def _is_json_value(value: object) -> bool:
    """Return whether JSON can represent *value*, and no YAML object in it was skipped."""
    if isinstance(value, Mapping):
        keys = all(type(key) is str and key != YAML_TAG_KEY for key in value)
        return keys and all(map(_is_json_value, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_json_value, value))  # type: ignore[call-overload]
    return type(value) in (str, int, bool, type(None)) or (
        type(value) is float and math.isfinite(value)
    )
