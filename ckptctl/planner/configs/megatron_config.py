"""config.json made of what Megatron's programs record, and Megatron-Core's fields of config.json.

What changes logits is stated, or the same in all models of the family, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.planner.configs.contradictions import used
from ckptctl.planner.configs.fact_names import FULL, canonical
from ckptctl.planner.configs.facts import Json, count, number, read_sizes
from ckptctl.planner.configs.megatron import (
    GREEDY,
    NULL,
    assets_hint,
    fields_of,
    flag,
    rope_of,
    words_of,
)
from ckptctl.planner.configs.megatron_statements import allows, expected
from ckptctl.planner.configs.megatron_words import LENGTHS, LLAMA3, TRUNCATE, YARN, YARN_DEFAULTS
from ckptctl.planner.families.declarations import NEEDED, SIZES, looked_up, spellings, states
from ckptctl.planner.families.megatron import Allowed, MegatronStyle, Word
from ckptctl.planner.layouts import Family

_NEUTRAL: Mapping[str, object] = {
    "tally": 0,
    "factor": 1.0,
    "groups": 1,
    "shared": 0,
    "dense": 0,
    "window": None,
}
"""What facts are that a version of Megatron-Core without a word for them cannot vary."""


def style_of(family: Family) -> MegatronStyle:
    """Return how Megatron-Core describes *family*; refuse a family that it does not know."""
    if family.megatron is None:
        raise MappingError(
            f"there is no known Megatron-Core configuration for `{family.name}`",
            hint=f"pass {spell_option('--to dcp')}, which keeps the names of config.json",
        )
    return family.megatron


# ------------------------------------------------------------------------------- config.json


def megatron_to_config(
    family: Family,
    record: Json,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Return the config.json of a checkpoint that has only Megatron's *record*.

    *sizes*, solved from the tensors, win over *record*, but for the vocabulary, which is padded
    there.
    """
    style, fields = style_of(family), fields_of(record)
    if not style.translated:
        raise MappingError(
            f"cannot generate config.json of `{family.name}` from Megatron's configuration",
            hint=assets_hint(),
        )
    _require_expected(family, style, fields)
    told = {word.config: value for word, value in words_of(style, fields)}
    known = _named(family, sizes)
    told |= {n: size for n, size in known.items() if n != "vocab_size" or told.get(n) is None}
    told |= {} if tied is None else {"tie_word_embeddings": tied}
    rope = rope_of(style, fields)
    _require_stated(style, told, rope)
    config: dict[str, object] = {"architectures": [family.architecture]}
    config["model_type"] = style.model_type
    for word in style.words:
        config[word.config] = told.get(word.config, _NEUTRAL.get(word.kind))
    for name, allowed in style.config.items():
        if name in config and not allows(allowed, config[name]):
            raise MappingError(
                f"config.json cannot express `{name}` = {config[name]!r}",
                where="Megatron's configuration",
                hint=assets_hint(),
            )
        config.setdefault(name, _json(allowed[0]))
    # The class's own may lie beyond the vocabulary; no logits depend on it.
    config |= {"pad_token_id": None, **style.written, **longest(record)}
    if style.local:
        config["rope_local_base_freq"] = _bases(fields)[0]
    if rope is not None and rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config | ({"torch_dtype": dtype} if dtype else {})


def longest(record: Json) -> dict[str, object]:
    """Return what config.json takes from *record* that changes no logits: the longest text."""
    fields = fields_of(record)
    lengths = (count(fields.get(name), name) for name in LENGTHS)
    length = next((one for one in lengths if one), None)
    return {} if length is None else {"max_position_embeddings": length}


def _named(family: Family, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return axis *sizes* by their names in config.json."""
    names = {axis: name for axis, (name, _) in {**SIZES, **family.sizes}.items()}
    found = {spellings(names[axis])[0]: size for axis, size in sizes.items() if names.get(axis)}
    return {name.rpartition(".")[2]: size for name, size in found.items()}


def _require_stated(style: MegatronStyle, told: Json, rope: Json | None) -> None:
    """Refuse where something is not stated that changes logits."""
    unstated = [
        word
        for word in style.words
        if told.get(word.config) is None and word.kind not in {*NULL, *_NEUTRAL}
    ]
    lacking = {word.config: word.field for word in unstated}
    if rope is None:
        lacking["rope_scaling"] = "rope_scaling"
    elif rope["rope_type"] == "yarn":
        needed = ("factor", "original_max_position_embeddings")
        lacking |= {
            f"rope_scaling.{name}": f"yarn_{YARN[name]}" for name in needed if name not in rope
        }
    if lacking:
        raise MappingError(
            f"config.json requires {listed(list(lacking))}",
            why=f"Megatron's configuration does not set {listed(list(lacking.values()))}",
            hint=assets_hint(),
        )


def _require_expected(family: Family, style: MegatronStyle, fields: Json) -> None:
    for name, allowed in expected(style, fields).items():
        if name in fields and not allows(allowed, fields[name]):
            raise MappingError(
                f"`{name}` is {fields[name]!r}",
                where="Megatron's configuration",
                why=f"it is {allowed[0]!r} in every model of `{family.name}`",
                hint=f"pass the right model type with {spell_option('--model-type')}",
            )


def _bases(fields: Json) -> tuple[float, float]:
    """Return the bases of the rotary frequencies of layers with a window and without."""
    bases = fields.get("rotary_base")
    if isinstance(bases, (list, tuple)) and len(bases) == 2:
        return number(bases[0], "rotary_base"), number(bases[1], "rotary_base")
    raise MappingError(
        "`rotary_base` is not a pair of bases", why=f"it is {bases!r}", hint=assets_hint()
    )


def _json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------- fields


def config_to_fields(
    family: Family, config: Json, sizes: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the fields of Megatron-Core that mean what config.json says.

    *sizes*, solved from the tensors, win.
    """
    style = style_of(family)
    values = _text(style, canonical(used(config)))
    _expressible(family, style, values)
    known = _named(family, read_sizes(family, config) | dict(sizes or {}))
    facts = {word.config: _stated(word, values, known) for word in style.words}
    facts |= {} if sizes is None else dict.fromkeys(_further(style), sizes.get("j", 0))
    fields = {word.field: _written(word, facts) for word in style.words}
    fields |= {copy: fields[field] for copy, field in style.copies.items()}
    rope = looked_up(values, "rope")
    fields |= dict(_rope(style, rope if isinstance(rope, Mapping) else {}, family))
    for name, allowed in expected(style, fields).items():
        fields.setdefault(name, allowed[0])
    if style.local:
        base = number(looked_up(values, "rope_local_base_freq") or 10000.0, "rope_local_base_freq")
        fields["rotary_base"] = [base, fields["rotary_base"]]
    length = count(looked_up(values, "max_position_embeddings"), "max_position_embeddings")
    return fields | ({} if length is None else dict.fromkeys(LENGTHS, length))


def _further(style: MegatronStyle) -> list[str]:
    """Return what config.json calls the number of layers that predict further tokens."""
    return [word.config for word in style.words if word.kind == "tally"]


def _text(style: MegatronStyle, config: Json) -> Json:
    inner = looked_up(config, style.prefix.rstrip(".")) if style.prefix else config
    return inner if isinstance(inner, Mapping) else config


def _stated(word: Word, values: Json, known: Mapping[str, int]) -> Any:
    """Return what config.json says of a fact, or means by its silence."""
    if word.config in known:
        return known[word.config]
    value = looked_up(values, word.config)
    if value is None and word.config == "partial_rotary_factor":
        value = looked_up(values, "rope.partial_rotary_factor")
    if value is None and word.kind in NULL and states(values, word.config):
        return None
    value = word.default if value is None else value
    if value is NEEDED and word.kind in _NEUTRAL:
        return _NEUTRAL[word.kind]
    if value is NEEDED:
        raise MappingError(
            f"Megatron-Core's configuration requires `{word.config}`",
            where="config.json",
            why="it is not set",
        )
    return value


def _dense(value: Any, facts: Json) -> object:
    """Return for each layer whether it has experts."""
    layers = count(facts["num_hidden_layers"], "num_hidden_layers") or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= layers:
        raise MappingError(
            "`first_k_dense_replace` is not a number of layers", why=f"it is {value!r}"
        )
    return [0] * value + [1] * (layers - value)


def _groups(value: Any, facts: Json) -> object:
    """Return of how many groups experts are chosen, if Megatron-Core chooses the same ones."""
    names = ("n_group", "num_experts_per_tok", "topk_group")
    groups, chosen, limit = (count(facts[name], name) or 1 for name in names)
    if groups > 1 and (value == GREEDY or chosen // limit != 1):
        raise _unsaid("topk_method", value, "Megatron-Core selects experts from groups differently")
    return None if groups == 1 else groups


def _shared(value: Any, facts: Json) -> object:
    one = count(facts["moe_intermediate_size"], "moe_intermediate_size") or 0
    experts = _counted(value, "n_shared_experts")
    return None if experts is None else experts * one


def _window(value: Any, name: str) -> object:
    size = count(value, name)
    return None if size is None else [size - 1, 0]


def _counted(value: Any, name: str) -> int | None:
    return None if value == 0 and not isinstance(value, bool) else count(value, name)


def _number(value: Any, name: str) -> float | None:
    return None if value is None else number(value, name)


_WRITE: Mapping[str, Callable[[Any, str], object]] = {
    "count": count,
    "optional": _counted,
    "tally": _counted,
    "number": _number,
    "factor": lambda value, name: None if value == 1.0 else _number(value, name),
    "flag": flag,
    "not": lambda value, name: not flag(value, name),
    "window": _window,
    "groups": lambda value, name: None if value == 1 else count(value, name),
    "root": lambda value, name: 1 / math.sqrt(number(value, name)),
}
_FROM_OTHERS: Mapping[str, Callable[[Any, Json], object]] = {
    "method": _groups,
    "dense": _dense,
    "shared": _shared,
}
"""Fields that follow from several facts."""


def _written(word: Word, facts: Json) -> object:
    value = facts[word.config]
    if word.kind in _FROM_OTHERS:
        return _FROM_OTHERS[word.kind](value, facts)
    return _WRITE[word.kind](value, word.config)


def _expressible(family: Family, style: MegatronStyle, values: Json) -> None:
    """Refuse what Megatron-Core's configuration cannot say of the family."""
    told: Allowed = style.config
    for name, allowed in told.items():
        value = looked_up(values, name)
        if value is not None and not allows(allowed, value):
            raise _unsaid(name, value, f"it is always {allowed[0]!r} in Megatron's `{family.name}`")
    kinds = looked_up(values, "layer_types")
    other, every = style.pattern
    if isinstance(kinds, list) and kinds != [
        other if place % every else FULL for place in range(1, len(kinds) + 1)
    ]:
        why = (
            f"{other}, with {FULL} in the last of every {every} layers" if other else f"only {FULL}"
        )
        raise _unsaid("layer_types", kinds, f"Megatron's `{family.name}` uses {why}")


def _rope(style: MegatronStyle, rope: Json, family: Family) -> Iterator[tuple[str, object]]:
    """Yield the fields that say how the rotary frequencies are scaled."""
    kind = rope.get("rope_type") or "default"
    latent = True in style.fields.get("multi_latent_attention", ())
    silent = YARN_DEFAULTS if latent else {**YARN_DEFAULTS, "mscale": None, "mscale_all_dim": None}
    told = {**silent, **{name: rope[name] for name in YARN if rope.get(name) is not None}}
    if kind == "default" and latent:
        yield from {"rope_type": "rope", "rotary_scaling_factor": 1.0}.items()
        yield from {"mscale": 1.0, "mscale_all_dim": 1.0}.items()
    elif kind == "default":
        yield from (
            {"rope_scaling_factor": 1.0}.items() if style.local else {"rope_scaling": False}.items()
        )
    elif kind == "linear" and style.local:
        yield "rope_scaling_factor", number(rope.get("factor"), "rope_scaling.factor")
    elif kind == "yarn" and {"factor", "original_max_position_embeddings"} <= rope.keys():
        yield ("rope_type", "yarn") if latent else ("position_embedding_type", "yarn")
        prefix = "" if latent else "yarn_"
        yield from ((f"{prefix}{YARN[name]}", value) for name, value in told.items())
        if not latent:
            yield TRUNCATE, rope.get("truncate") is not False
    elif kind == "llama3" and not latent and all(rope.get(n) == v for n, v in LLAMA3.items()):
        yield "rope_scaling", True
        yield "rope_scaling_factor", number(rope.get("factor"), "rope_scaling.factor")
    else:
        raise _unsaid("rope_scaling", dict(rope), f"not supported by Megatron's `{family.name}`")


def _unsaid(name: str, value: object, why: str) -> MappingError:
    return MappingError(
        f"Megatron-Core's configuration cannot express `{name}`: {value!r}",
        where="config.json",
        why=why,
    )
