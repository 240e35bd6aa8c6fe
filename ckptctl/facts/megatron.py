"""Megatron's model records, read and written as the facts of config.json.

The record is a plain dictionary: the ``args`` of Megatron-LM (``common.pt``), the parsed
``run_config.yaml`` of Megatron-Bridge, ``model.yaml`` of NeMo 2, or a ``TransformerConfig`` (verl).
Nothing in it is imported or called, and only plain values are used. Fields that change logits are
translated, checked to be as in all models of the family, or rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptctl.errors import MappingError, quote_names, spell_option
from ckptctl.facts.contradictions import Statement, of_config, used
from ckptctl.facts.kinds import (
    KINDS,
    assets_hint,
    from_megatron,
    inexpressible_error,
    number,
    to_megatron,
)
from ckptctl.facts.megatron_words import (
    ACTIVATIONS,
    ARGUMENTS,
    DELTA,
    LENGTHS,
    LINEAR,
    SAME_FUNCTION,
    TURNED,
)
from ckptctl.facts.rope import ORIGINAL, YARN, rope_of_megatron, rope_to_megatron
from ckptctl.planner.config_facts import (
    FULL_ATTENTION,
    Json,
    normalize_rope,
    parse_size,
    read_sizes,
)
from ckptctl.planner.families.declarations import (
    SIZES,
    MegatronStyle,
    get_nested,
    has_field,
    split_aliases,
)
from ckptctl.planner.families.facts import NEEDED, NEUTRAL, Fact
from ckptctl.planner.layouts import Family

TARGET = "_target_"
"""Key under which Bridge and NeMo name the class of an object."""
EXPERTS, FURTHER = "num_moe_experts", "mtp_num_layers"
CONFIGURATION = "Megatron-Core's configuration"
_SIMPLE = (bool, int, float, str, list, tuple)


def style_of(family: Family) -> MegatronStyle:
    """Return how Megatron-Core describes *family*, or raise if it does not support the family."""
    if family.megatron is None:
        raise MappingError(
            f"there is no known Megatron-Core configuration for `{family.name}`",
            hint=f"pass {spell_option('--to dcp')}, which keeps the names of config.json",
        )
    return family.megatron


def class_of(record: Json) -> str:
    """Return the name of the class whose fields *record* has, or "" if it names none."""
    named = model_of(record).get(TARGET)
    return named.rpartition(".")[2] if isinstance(named, str) else ""


def merged(records: Iterable[Json]) -> dict[str, object]:
    """Merge the *records* of one model, where later values win."""
    return {name: value for record in records for name, value in model_of(record).items()}


def fields_of(record: Json) -> dict[str, object]:
    """Return the values of *record* under Megatron-Core's field names."""
    values = model_of(record)
    fields = {n: value for n, value in values.items() if value is None or type(value) in _SIMPLE}
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


def _activation(values: Json) -> dict[str, object]:
    """Return the activation fields that *values* select."""
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
    """Return *fields* with expert sizes filled in, or without expert fields for dense models."""
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


# ------------------------------------------------------------------------------- read


def read(style: MegatronStyle, fields: Json) -> Iterator[tuple[Fact, object]]:
    """Yield the facts in *fields* with their values in config.json."""
    for fact in style.facts:
        if fact.megatron in fields and not isinstance(fields[fact.megatron], dict):
            value = from_megatron(fact, _local(style, fields))
            if value is not None or KINDS[fact.kind].null:
                yield fact, value


def _local(style: MegatronStyle, fields: Json) -> Json:
    """Return *fields* with the rotary base of layers without a window as the only one."""
    bases = fields.get("rotary_base")
    if not style.has_local_rope or not isinstance(bases, (list, tuple)) or len(bases) != 2:
        return fields
    return {**fields, "rotary_base": bases[1]}


def of_megatron(family: Family, record: Json, source: str) -> Iterator[Statement]:
    """Yield the statements of *record* about a model of *family*, as facts of config.json."""
    style = family.megatron
    if style is None:
        return
    fields = fields_of(record)
    called = {field: name for name, field in (*ARGUMENTS.items(), *TURNED.items())}
    for fact, value in read(style, fields):
        if fact.megatron == FURTHER and not value:
            continue  # trained without MTP layers, on which no other layer depends
        field = fact.megatron
        said = called[field] if called.get(field) in model_of(record) else field
        stored = f"{fields[field]}" if fact.kind == "window" and value is not None else ""
        yield Statement(style.config_prefix + fact.config, value, source, said=said, stored=stored)
    for fact in style.facts:  # dense models state None
        if fact.megatron == EXPERTS and fields.get(EXPERTS, 0) is None:
            yield Statement(style.config_prefix + fact.config, 0, source, said=called[EXPERTS])
    rope = rope_of_megatron(style, fields) or {}
    yield from (Statement(f"{style.config_prefix}rope.{n}", v, source) for n, v in rope.items())
    bases = fields.get("rotary_base")
    if style.has_local_rope and isinstance(bases, (list, tuple)) and len(bases) == 2:
        local = number(bases[0], "rotary_base")
        yield Statement(
            style.config_prefix + "rope_local_base_freq", local, source, said="rotary_base"
        )
    always = f"every model of `{family.name}`"
    for name, allowed in expected(style, fields).items():
        if name in fields:
            value = fields[name]
            fits = allows(allowed, value)
            yield Statement(name, allowed[0] if fits else value, source)
            yield Statement(name, allowed[0], always, stated=False)


def stated(family: Family, record: Json) -> dict[str, object]:
    """Return the config.json keys that *record* states."""
    style = family.megatron
    if style is None:
        return {}
    fields = fields_of(record)
    told = {fact.config: value for fact, value in read(style, fields)}
    rope = rope_of_megatron(style, fields)
    told |= {} if rope is None or rope["rope_type"] == "default" else {"rope_scaling": rope}
    inner = {style.config_prefix.rstrip("."): told} if style.config_prefix else told
    return {"model_type": style.model_type, **inner}


def megatron_to_config(
    family: Family,
    record: Json,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build config.json from Megatron's *record* for a checkpoint that has none.

    *sizes*, solved from the tensors, override *record*, except for the vocabulary, which is padded
    in the tensors.
    """
    style, fields = style_of(family), fields_of(record)
    if not style.translated:
        raise MappingError(
            f"cannot generate config.json of `{family.name}` from Megatron's configuration",
            hint=assets_hint(),
        )
    _require_expected(family, style, fields)
    told = {fact.config: value for fact, value in read(style, fields)}
    known = _named(family, sizes)
    told |= {n: size for n, size in known.items() if n != "vocab_size" or told.get(n) is None}
    told |= {} if tied is None else {"tie_word_embeddings": tied}
    rope = rope_of_megatron(style, fields)
    _require_stated(style, told, rope)
    config: dict[str, object] = {"architectures": [family.architecture]}
    config["model_type"] = style.model_type
    for fact in style.facts:
        neutral = KINDS[fact.kind].neutral
        config[fact.config] = told.get(fact.config, None if neutral is NEEDED else neutral)
    for name, allowed in style.config.items():
        if name in config and not allows(allowed, config[name]):
            raise MappingError(
                f"config.json cannot express `{name}` = {config[name]!r}",
                where="Megatron's configuration",
                hint=assets_hint(),
            )
        value = allowed[0]
        config.setdefault(name, list(value) if isinstance(value, tuple) else value)
    # The class's default may be outside the vocabulary; no logits depend on it.
    config |= {"pad_token_id": None, **style.extra_config, **longest(record)}
    if style.has_local_rope:
        config["rope_local_base_freq"] = _bases(fields)[0]
    if rope is not None and rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config | ({"torch_dtype": dtype} if dtype else {})


def longest(record: Json) -> dict[str, object]:
    """Return the maximum sequence length for config.json, which changes no logits."""
    fields = fields_of(record)
    lengths = (parse_size(fields.get(name), name) for name in LENGTHS)
    length = next((one for one in lengths if one), None)
    return {} if length is None else {"max_position_embeddings": length}


def _named(family: Family, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return axis *sizes* by their names in config.json."""
    names = {axis: name for axis, (name, _) in {**SIZES, **family.sizes}.items()}
    found = {split_aliases(names[axis])[0]: size for axis, size in sizes.items() if names.get(axis)}
    return {name.rpartition(".")[2]: size for name, size in found.items()}


def _require_stated(style: MegatronStyle, told: Json, rope: Json | None) -> None:
    """Raise if a field that changes logits is missing."""
    lacking = {
        fact.config: fact.megatron
        for fact in style.facts
        if told.get(fact.config) is None
        and KINDS[fact.kind].neutral is NEEDED
        and not KINDS[fact.kind].null
    }
    if rope is None:
        lacking["rope_scaling"] = "rope_scaling"
    elif rope["rope_type"] == "yarn":
        needed = (name for name in ("factor", ORIGINAL) if name not in rope)
        lacking |= {f"rope_scaling.{name}": f"yarn_{YARN[name].megatron}" for name in needed}
    if lacking:
        raise MappingError(
            f"config.json requires {quote_names(list(lacking))}",
            why=f"Megatron's configuration does not set {quote_names(list(lacking.values()))}",
            hint=assets_hint(),
        )


def _require_expected(family: Family, style: MegatronStyle, fields: Json) -> None:
    """Raise if a field differs from its value in all models of the family."""
    for name, allowed in expected(style, fields).items():
        if name in fields and not allows(allowed, fields[name]):
            raise MappingError(
                f"`{name}` is {fields[name]!r}",
                where="Megatron's configuration",
                why=f"it is {allowed[0]!r} in every model of `{family.name}`",
                hint=f"pass the right model type with {spell_option('--model-type')}",
            )


def _bases(fields: Json) -> tuple[float, float]:
    """Return the rotary bases of layers with a window and without."""
    bases = fields.get("rotary_base")
    if isinstance(bases, (list, tuple)) and len(bases) == 2:
        return number(bases[0], "rotary_base"), number(bases[1], "rotary_base")
    raise MappingError(
        "`rotary_base` is not a pair of bases", why=f"it is {bases!r}", hint=assets_hint()
    )


# ------------------------------------------------------------------------------- write


def config_to_fields(
    family: Family, config: Json, sizes: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return Megatron-Core's fields for a config.json.

    *sizes*, solved from the tensors, override it.
    """
    style = style_of(family)
    values: Json = normalize_rope(used(config))
    inner = get_nested(values, style.config_prefix.rstrip(".")) if style.config_prefix else None
    values = inner if isinstance(inner, Mapping) else values
    _expressible(family, style, values)
    known = _named(family, read_sizes(family, config) | dict(sizes or {}))
    facts = {fact.config: _stated(fact, values, known) for fact in style.facts}
    if sizes is not None:
        further = (fact.config for fact in style.facts if fact.megatron == FURTHER)
        facts |= dict.fromkeys(further, sizes.get("j", 0))
    fields = {fact.megatron: to_megatron(fact, facts) for fact in style.facts}
    fields |= {copy: fields[field] for copy, field in style.copies.items()}
    rope = values.get("rope")
    scaling = rope if isinstance(rope, Mapping) else {}
    scaled = rope_to_megatron(style, scaling)
    if scaled is None:
        why = f"not supported by Megatron's `{family.name}`"
        raise inexpressible_error(CONFIGURATION, "rope_scaling", dict(scaling), why)
    fields |= scaled
    for name, allowed in expected(style, fields).items():
        fields.setdefault(name, allowed[0])
    if style.has_local_rope:
        base = number(get_nested(values, "rope_local_base_freq") or 10000.0, "rope_local_base_freq")
        fields["rotary_base"] = [base, fields["rotary_base"]]
    length = parse_size(get_nested(values, "max_position_embeddings"), "max_position_embeddings")
    return fields | ({} if length is None else dict.fromkeys(LENGTHS, length))


def _stated(fact: Fact, values: Json, known: Mapping[str, int]) -> object:
    """Return a fact of config.json, or its default if it is not set."""
    if fact.config in known:
        return known[fact.config]
    value = get_nested(values, fact.config)
    if value is None and fact.config == "partial_rotary_factor":
        value = get_nested(values, "rope.partial_rotary_factor")
    kind = KINDS[fact.kind]
    if value is None and kind.null and has_field(values, fact.config):
        return None
    value = fact.default if value is None else value
    if value is NEEDED and kind.neutral is NEEDED:
        raise MappingError(
            f"{CONFIGURATION} requires `{fact.config}`", where="config.json", why="it is not set"
        )
    return kind.neutral if value is NEEDED else value


def _expressible(family: Family, style: MegatronStyle, values: Json) -> None:
    """Raise if Megatron-Core's configuration cannot express *values* for the family."""
    whose = f"Megatron's `{family.name}`"
    for name, allowed in style.config.items():
        value = get_nested(values, name)
        if value is not None and not allows(allowed, value):
            why = f"it is always {allowed[0]!r} in {whose}"
            raise inexpressible_error(CONFIGURATION, name, value, why)
    kinds = get_nested(values, "layer_types")
    other, every = style.layer_pattern
    if isinstance(kinds, list) and kinds != [
        other if place % every else FULL_ATTENTION for place in range(1, len(kinds) + 1)
    ]:
        mixed = f"{other}, with {FULL_ATTENTION} in the last of every {every} layers"
        why = f"{whose} uses {mixed if other else f'only {FULL_ATTENTION}'}"
        raise inexpressible_error(CONFIGURATION, "layer_types", kinds, why)


# ------------------------------------------------------------------------------- contradict


def silent(family: Family, config: Json, source: str) -> Iterator[Statement]:
    """Yield the defaults of config.json for unset facts that Megatron-based programs record."""
    style = family.megatron
    if style is None:
        return
    named = {one.fact for one in of_config(family, config, source) if one.stated}
    for fact in style.facts:
        name = style.config_prefix + fact.config
        if fact.default is not NEEDED and name not in named:
            yield Statement(name, fact.default, source, stated=False)


def fixed(family: Family, config: Json, source: str) -> Iterator[Statement]:
    """Yield config.json values that no Megatron-Core model of *family* can have."""
    style = family.megatron
    known = {} if style is None else {style.config_prefix + n: v for n, v in style.config.items()}
    for fact, allowed in known.items():
        value = get_nested(config, fact)
        if value is not None and not allows(allowed, value):
            yield Statement(fact, value, source)
            yield Statement(fact, allowed[0], f"Megatron-Core's models of `{family.name}`")


def allows(allowed: Iterable[object], value: object) -> bool:
    """Return whether *value* is in *allowed*.

    True is not 1, but a list equals a tuple.
    """
    value = tuple(value) if isinstance(value, list) else value
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def expected(style: MegatronStyle, fields: Json) -> dict[str, tuple[object, ...]]:
    """Return the allowed values of fields that are the same in all models of a family."""
    own = {fact.megatron for fact in style.facts}
    routed = EXPERTS in own or fields.get(EXPERTS) is not None
    neutral = {n: v for n, v in NEUTRAL.items() if routed or not n.startswith("moe_")}
    return {n: allowed for n, allowed in {**neutral, **style.fields}.items() if n not in own}
