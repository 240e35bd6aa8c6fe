"""What Megatron's programs record of a model: read as facts, in the words of config.json.

The record is a plain dictionary: the ``args`` of Megatron-LM (``common.pt``), the parsed
``run_config.yaml`` of Megatron-Bridge, ``model.yaml`` of NeMo 2, or a ``TransformerConfig`` (verl).
Nothing in it is imported or called; objects that are no plain values say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.configs.facts import Json, count, number
from ckptctl.planner.configs.megatron_words import (
    ACTIVATIONS,
    ARGUMENTS,
    DELTA,
    LINEAR,
    LLAMA3,
    LLAMA3_NEMO,
    SAME_FUNCTION,
    TRUNCATE,
    TURNED,
    YARN,
)
from ckptctl.planner.families.megatron import MegatronStyle, Word
from ckptctl.units import counted

TARGET = "_target_"
"""The key under which Bridge and NeMo name the class of an object."""
GREEDY, LIMITED = "greedy", "group_limited_greedy"
"""DeepSeek-V2's ``topk_method``."""
_SIMPLE = (bool, int, float, str, list, tuple)


def class_of(record: Json) -> str:
    """Return the name of the class whose fields *record* states; empty: it names none."""
    named = model_of(record).get(TARGET)
    return named.rpartition(".")[2] if isinstance(named, str) else ""


def merged(records: Iterable[Json]) -> dict[str, object]:
    """Return what several *records* of one model state; the later ones' values win."""
    return {name: value for record in records for name, value in model_of(record).items()}


def fields_of(record: Json) -> dict[str, object]:
    """Return what *record* states in the words of Megatron-Core's configuration."""
    values = model_of(record)
    fields = {name: value for name, value in values.items() if _is_plain(value)}
    fields |= {new: fields.pop(old) for old, new in ARGUMENTS.items() if old in fields}
    for name, field in TURNED.items():
        turned = fields.pop(name, None)
        fields |= {field: not turned} if isinstance(turned, bool) else {}
    fields |= _activation(values)
    alone = fields.get("group_query_attention") is False
    latent = fields.get("multi_latent_attention") is True
    if (alone or latent) and "num_attention_heads" in fields:
        fields["num_query_groups"] = fields["num_attention_heads"]
    if fields.get("use_rotary_position_embeddings") is True:
        fields.setdefault("position_embedding_type", "rope")
    if fields.get("experimental_attention_variant") != DELTA:
        fields = {name: value for name, value in fields.items() if name not in LINEAR}
    if "old_context_len" in fields and "scale_factor" in fields:
        fields |= {"rope_scaling": True, "rope_scaling_factor": fields["scale_factor"]}
    return _experts(fields)


def model_of(record: Json) -> Json:
    """Return the part of *record* that describes the model."""
    for holder in ("model", "config"):
        inner = record.get(holder)
        if isinstance(inner, Mapping) and {TARGET, "num_layers", "config"} & inner.keys():
            return model_of(inner)
    return record


def _is_plain(value: object) -> bool:
    return value is None or type(value) in _SIMPLE


def _activation(values: Json) -> dict[str, object]:
    """Return the activation that *values* choose."""
    function = values.get("activation_func")
    named = function.get(TARGET) if isinstance(function, Mapping) else function
    if isinstance(named, str):
        name = named.rpartition(".")[2]
        return {"activation_func": SAME_FUNCTION.get(name, name)}
    said = {name: values.get(name) for name in ACTIVATIONS if name in values}
    for name, value in said.items():
        if value is True:
            function, gated = ACTIVATIONS[name]
            return {"activation_func": function, "gated_linear_unit": gated}
    return {"activation_func": "gelu", "gated_linear_unit": False} if "swiglu" in said else {}


def _experts(fields: dict[str, object]) -> dict[str, object]:
    """Return *fields* without those on experts where there are none, else with their sizes."""
    if "num_moe_experts" not in fields:
        return fields
    if fields["num_moe_experts"] is None:
        return {name: value for name, value in fields.items() if not name.startswith("moe_")}
    if fields.get("moe_ffn_hidden_size") is None and "ffn_hidden_size" in fields:
        fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
    frequency = fields.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)) and frequency and all(one == 1 for one in frequency):
        fields["moe_layer_freq"] = 1
    return fields


# ------------------------------------------------------------------------------- words


def value_of(word: Word, fields: Json) -> object:
    """Return what *fields*, which state it, say of a fact, as config.json would."""
    return _READ[word.kind](fields[word.field], word, fields)


def flag(value: object, name: str) -> bool:
    """Return what is stated under *name*, which is true or false."""
    if isinstance(value, bool):
        return value
    raise MappingError(f"`{name}` must be true or false", where=name, why=f"it is {value!r}")


def _tally(value: object, word: Word, _: Json) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else count(value, word.field) or 0


def _window(value: object, word: Word, _: Json) -> int | None:
    """Count the keys that a token attends to, itself included, of ``(left, right)``.

    Megatron-Core counts the keys before the token, transformers' ``sliding_window`` all of them.
    Below 0 there is no bound; to the right, the causal mask sets one.
    """
    if value is None:
        return None
    match value:
        case [int(left), 0 | -1] if not isinstance(left, bool) and left >= -1:
            return None if left < 0 else left + 1
    raise MappingError(
        f"`{word.field}` is not a causal window",
        where=word.field,
        why=f"it is {value!r}; expected (left, 0)"[:200],
    )


def assets_hint() -> str:
    """Return the advice to pass the configuration of the trained model."""
    return f"pass {spell_option('--assets DIR')} with the trained model's config.json"


def _dense(value: object, word: Word, fields: Json) -> int:
    """Return how many layers precede those with experts: ``[0, 0, 1, 1, ...]``."""
    if value == 1 and not isinstance(value, bool):
        return 0
    if isinstance(value, (list, tuple)):
        first = next((place for place, one in enumerate(value) if one != 0), len(value))
        if all(one == 1 for one in value[first:]) and fields.get("num_layers") == len(value):
            return first
    raise MappingError(
        f"`{word.field}` does not put all layers without experts before those with experts",
        where=word.field,
        why=f"it is {value!r}"[:200],
        hint=assets_hint(),
    )


def _method(value: object, word: Word, fields: Json) -> str:
    """Return how experts are chosen: of all, or of the groups that weigh most.

    Megatron-Core weighs a group by several of its experts, transformers by the best one.
    """
    if (count(value, word.field) or 1) == 1:
        return GREEDY
    chosen = count(fields.get("moe_router_topk"), "moe_router_topk") or 0
    groups = count(fields.get("moe_router_group_topk"), "moe_router_group_topk") or 1
    weighing = chosen // groups
    return (
        LIMITED if weighing == 1 else f"groups ranked by their best {counted(weighing, 'expert')}"
    )


def _shared(value: object, word: Word, fields: Json) -> int:
    """Return how many experts the shared one is as large as."""
    if value in (None, 0):
        return 0
    size = count(value, word.field)
    one = count(fields.get("moe_ffn_hidden_size"), "moe_ffn_hidden_size")
    if size is None or one is None or size % one:
        raise MappingError(
            f"`{word.field}` is not a multiple of `moe_ffn_hidden_size`",
            where=word.field,
            why=f"{value!r} and {one!r}",
        )
    return size // one


def _root(value: object, word: Word, _: Json) -> float | None:
    """Return the number whose inverse root *value* is, whole where it may be."""
    if value is None:
        return None
    exact = number(value, word.field) ** -2
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-6) else exact


_READ: Mapping[str, Callable[[Any, Word, Json], object]] = {
    "count": lambda value, word, _: count(value, word.field),
    "optional": lambda value, word, _: count(value, word.field),
    "tally": _tally,
    "number": lambda value, word, _: None if value is None else number(value, word.field),
    "factor": lambda value, word, _: 1.0 if value is None else number(value, word.field),
    "flag": lambda value, word, _: None if value is None else flag(value, word.field),
    "not": lambda value, word, _: None if value is None else not flag(value, word.field),
    "window": _window,
    "groups": lambda value, word, _: count(value, word.field) or 1,
    "method": _method,
    "dense": _dense,
    "shared": _shared,
    "root": _root,
}
NULL = ("optional", "window")
"""Kinds of facts of which none is a value."""


def words_of(style: MegatronStyle, fields: Json) -> Iterator[tuple[Word, object]]:
    """Yield the facts that *fields* state, and their values in config.json."""
    for word in style.words:
        if word.field in fields and not isinstance(fields[word.field], dict):
            value = value_of(word, _local(style, fields))
            if value is not None or word.kind in NULL:
                yield word, value


def _local(style: MegatronStyle, fields: Json) -> Json:
    """Return *fields* with one base of rotary frequencies, that of the layers without a window."""
    bases = fields.get("rotary_base")
    if not style.local or not isinstance(bases, (list, tuple)) or len(bases) != 2:
        return fields
    return {**fields, "rotary_base": bases[1]}


def rope_of(style: MegatronStyle, fields: Json) -> dict[str, object] | None:
    """Return how the rotary frequencies are scaled, as config.json says it.

    Returns:
        The kind as ``rope_type``, and its numbers; None: *fields* do not say.
    """
    if fields.get("multi_latent_attention") is True:
        return _latent(fields)
    if fields.get("position_embedding_type") == "yarn":
        told = _yarn(fields, "yarn_")
        rounded = fields.get(TRUNCATE)
        return told | ({} if rounded is None else {"truncate": flag(rounded, TRUNCATE)})
    factor = fields.get("rope_scaling_factor")
    if style.local:
        scaled = factor is not None and number(factor, "rope_scaling_factor") != 1.0
        return {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    if fields.get("rope_scaling") is True:
        numbers = {name: fields.get(said, LLAMA3[name]) for said, name in LLAMA3_NEMO.items()}
        factor = number(8.0 if factor is None else factor, "rope_scaling_factor")
        return {"rope_type": "llama3", "factor": factor, **numbers}
    known = {"rope_scaling", "position_embedding_type"} & fields.keys()
    return {"rope_type": "default"} if known else None


def _latent(fields: Json) -> dict[str, object] | None:
    factor = fields.get("rotary_scaling_factor")
    if factor is None:
        return None
    plain = fields.get("rope_type", "yarn") == "rope"
    if number(factor, "rotary_scaling_factor") == 1.0:
        return {"rope_type": "default"}
    if plain and fields.get("mscale_all_dim") in (0, None):
        return {"rope_type": "default"}
    if plain:
        raise MappingError(
            "attention uses YaRN scaling, but the rotary frequencies do not",
            where="rope_type",
            why=f"`rope_type` is 'rope', and `rotary_scaling_factor` is {factor!r}",
            hint=assets_hint(),
        )
    return _yarn(fields, "")


def _yarn(fields: Json, prefix: str) -> dict[str, object]:
    told = {name: fields.get(prefix + field) for name, field in YARN.items()}
    known = {name: _positive(name, value) for name, value in told.items() if value is not None}
    return {"rope_type": "yarn", **known}


def _positive(name: str, value: object) -> float | int:
    if name == "original_max_position_embeddings":
        return count(value, name) or 0
    return 0.0 if value in (0, 0.0) and not isinstance(value, bool) else number(value, name)
