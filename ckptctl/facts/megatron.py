"""Convert between Megatron's model records and config.json.

The record is a dictionary: the ``args`` of Megatron-LM (``common.pt``), the parsed
``run_config.yaml`` of Megatron-Bridge, ``model.yaml`` of NeMo 2, or a ``TransformerConfig`` (verl).
Objects that a record names are not imported or called; only numbers, strings, booleans and lists
are used. Fields that change logits are translated, required to have the value that all models of
the family have, or rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptctl.errors import MappingError, format_option, quote_names
from ckptctl.facts.contradictions import Statement, drop_unused_windows, read_config_statements
from ckptctl.facts.kinds import (
    FACT_KINDS,
    assets_hint,
    inexpressible_error,
    list_indexer_types,
    read_layer_letters,
    read_megatron_value,
    require_number,
    write_megatron_value,
)
from ckptctl.facts.megatron_words import (
    ACTIVATION_ARGUMENTS,
    FIELD_BY_ARGUMENT,
    FUNCTION_ALIASES,
    GATED_DELTA_NET,
    LENGTH_FIELDS,
    LINEAR_ATTENTION_FIELDS,
    NEGATED_ARGUMENTS,
)
from ckptctl.facts.rope import (
    ORIGINAL_LENGTH_KEY,
    YARN_FACTS,
    read_megatron_rope,
    write_megatron_rope,
)
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
from ckptctl.planner.families.facts import NEEDED, NEUTRAL, TRAINING_ARGUMENT_FACTS, Fact
from ckptctl.planner.layouts import Family

TARGET_KEY = "_target_"
"""Key under which Megatron-Bridge and NeMo state the class of an object."""
EXPERT_COUNT_FIELD, MTP_COUNT_FIELD = "num_moe_experts", "mtp_num_layers"
MTP_INDEX = "j"
PATTERN_FIELD, OLD_PATTERN_FIELD = "hybrid_layer_pattern", "hybrid_override_pattern"
"""Field with the letters of a hybrid model's layers, and its name until Megatron-Core 0.16."""
CONFIG_NAME = "Megatron-Core's configuration"
_PLAIN_TYPES = (bool, int, float, str, list, tuple)


def require_megatron_style(family: Family) -> MegatronStyle:
    """Return how Megatron-Core describes *family*, or raise if it does not support the family."""
    if family.megatron is None:
        raise MappingError(
            f"there is no known Megatron-Core configuration for `{family.name}`",
            hint=f"pass {format_option('--to dcp')}, which keeps the names of config.json",
        )
    return family.megatron


def get_class_name(record: Json) -> str:
    """Return the name of the class whose fields *record* contains, or "" if it states none."""
    target = get_model_section(record).get(TARGET_KEY)
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def merge_records(records: Iterable[Json]) -> dict[str, object]:
    """Merge the *records* of one model, where later records override earlier ones."""
    return {name: value for record in records for name, value in get_model_section(record).items()}


def extract_megatron_fields(record: Json) -> dict[str, object]:
    """Return the values in *record*, renamed to Megatron-Core's field names."""
    values = get_model_section(record)
    fields = {
        field_key: value
        for field_key, value in values.items()
        if value is None or type(value) in _PLAIN_TYPES
    }
    fields |= {
        field_name: fields.pop(argument)
        for argument, field_name in FIELD_BY_ARGUMENT.items()
        if argument in fields
    }
    for name, field in NEGATED_ARGUMENTS.items():
        negated = fields.pop(name, None)
        fields |= {field: not negated} if isinstance(negated, bool) else {}
    fields |= _select_activation_fields(values)
    is_ungrouped = fields.get("group_query_attention") is False
    is_latent = fields.get("multi_latent_attention") is True
    if (is_ungrouped or is_latent) and "num_attention_heads" in fields:
        fields["num_query_groups"] = fields["num_attention_heads"]
    if fields.get("use_rotary_position_embeddings") is True:
        fields.setdefault("position_embedding_type", "rope")
    if fields.get("experimental_attention_variant") != GATED_DELTA_NET:
        fields = {
            name: value for name, value in fields.items() if name not in LINEAR_ATTENTION_FIELDS
        }
    old_pattern = fields.pop(OLD_PATTERN_FIELD, None)
    if old_pattern is not None and fields.get(PATTERN_FIELD) is None:
        fields[PATTERN_FIELD] = old_pattern
    if "old_context_len" in fields and "scale_factor" in fields:
        fields |= {"rope_scaling": True, "rope_scaling_factor": fields["scale_factor"]}
    return _normalize_expert_fields(fields)


def get_model_section(record: Json) -> Json:
    """Return the section of *record* that describes the model, or *record* if it has none."""
    for holder in ("model", "config"):
        section = record.get(holder)
        if isinstance(section, Mapping) and {TARGET_KEY, "num_layers", "config"} & section.keys():
            return get_model_section(section)
    return record


def _select_activation_fields(values: Json) -> dict[str, object]:
    """Convert the activation settings in *values* to Megatron-Core's fields."""
    function = values.get("activation_func")
    function_name = function.get(TARGET_KEY) if isinstance(function, Mapping) else function
    if isinstance(function_name, str):
        name = function_name.rpartition(".")[2]
        return {"activation_func": FUNCTION_ALIASES.get(name, name)}
    arguments = {name: values.get(name) for name in ACTIVATION_ARGUMENTS if name in values}
    for name, value in arguments.items():
        if value is True:
            function, gated = ACTIVATION_ARGUMENTS[name]
            return {"activation_func": function, "gated_linear_unit": gated}
    return {"activation_func": "gelu", "gated_linear_unit": False} if "swiglu" in arguments else {}


def _normalize_expert_fields(fields: dict[str, object]) -> dict[str, object]:
    """Fill in missing expert sizes in *fields*, or remove expert fields for dense models."""
    if "num_moe_experts" not in fields:
        return fields
    if fields["num_moe_experts"] is None:
        return {name: value for name, value in fields.items() if not name.startswith("moe_")}
    if fields.get("moe_ffn_hidden_size") is None and "ffn_hidden_size" in fields:
        fields["moe_ffn_hidden_size"] = fields["ffn_hidden_size"]
    frequency = fields.get("moe_layer_freq")
    if (
        isinstance(frequency, (list, tuple))
        and frequency
        and all(is_moe == 1 for is_moe in frequency)
    ):
        fields["moe_layer_freq"] = 1
    return fields


# ------------------------------------------------------------------------------- read


def iterate_megatron_facts(style: MegatronStyle, fields: Json) -> Iterator[tuple[Fact, object]]:
    """Yield the facts that *fields* state, with values converted to config.json."""
    for fact in style.facts:
        if fact.megatron in fields and not isinstance(fields[fact.megatron], dict):
            value = read_megatron_value(fact, _select_global_base(style, fields))
            if value is not None or FACT_KINDS[fact.kind].allows_null:
                yield fact, value


def _select_global_base(style: MegatronStyle, fields: Json) -> Json:
    """Return *fields* with the single rotary base of layers without a sliding window."""
    bases = fields.get("rotary_base")
    if not style.has_local_rope or not isinstance(bases, (list, tuple)) or len(bases) != 2:
        return fields
    return {**fields, "rotary_base": bases[1]}


def read_megatron_statements(
    family: Family | None, record: Json, source: str
) -> Iterator[Statement]:
    """Yield the statements of *record* about a model of *family*, as facts of config.json.

    For an unknown model type, these are the facts that have the same meaning in all models.
    """
    fields = extract_megatron_fields(record)
    style = family.megatron if family else None
    if family is None or style is None:
        yield from _read_common_statements(fields, source)
        return
    argument_names = {
        field: name for name, field in (*FIELD_BY_ARGUMENT.items(), *NEGATED_ARGUMENTS.items())
    }
    for fact, value in iterate_megatron_facts(style, fields):
        if fact.megatron == MTP_COUNT_FIELD and not value:
            continue  # trained without MTP layers, on which no other layer depends
        field = fact.megatron
        local_key = (
            argument_names[field]
            if argument_names.get(field) in get_model_section(record)
            else field
        )
        stored = f"{fields[field]}" if fact.kind == "window" and value is not None else ""
        yield Statement(
            style.get_config_name(fact.config),
            value,
            source,
            local_key=local_key,
            stored_value=stored,
        )
    # Dense models state None.
    for fact in () if style.has_optional_experts else style.facts:
        if fact.megatron == EXPERT_COUNT_FIELD and fields.get(EXPERT_COUNT_FIELD, 0) is None:
            yield Statement(
                style.get_config_name(fact.config),
                0,
                source,
                local_key=argument_names[EXPERT_COUNT_FIELD],
            )
    rope = read_megatron_rope(style, fields) or {}
    yield from (
        Statement(f"{style.config_prefix}rope.{fact_name}", fact_value, source)
        for fact_name, fact_value in rope.items()
    )
    bases = fields.get("rotary_base")
    if style.has_local_rope and isinstance(bases, (list, tuple)) and len(bases) == 2:
        local = require_number(bases[0], "rotary_base")
        yield Statement(
            style.config_prefix + "rope_local_base_freq", local, source, local_key="rotary_base"
        )
    family_source = f"every model of `{family.name}`"
    for name, allowed in get_expected_fields(style, fields).items():
        if name in fields:
            value = fields[name]
            is_expected = is_allowed(allowed, value)
            yield Statement(name, allowed[0] if is_expected else value, source)
            yield Statement(name, allowed[0], family_source, is_explicit=False)


def _read_common_statements(fields: Json, source: str) -> Iterator[Statement]:
    """Yield the facts in *fields* that have the same meaning in all models."""
    is_rotary = fields.get("position_embedding_type") == "rope"
    for fact in TRAINING_ARGUMENT_FACTS:
        value = fields.get(fact.megatron)
        if isinstance(value, (int, float)) and (is_rotary or fact.megatron != "rotary_base"):
            yield Statement(fact.config, value, source)
    is_grouped, groups = fields.get("group_query_attention"), fields.get("num_query_groups")
    if is_grouped is not False and isinstance(groups, int):
        yield Statement("num_key_value_heads", groups, source)
    if isinstance(tied := fields.get("share_embeddings_and_output_weights"), bool):
        yield Statement("tie_word_embeddings", tied, source)


def build_partial_config(family: Family, record: Json) -> dict[str, object]:
    """Build a config.json with only the facts that *record* states."""
    style = family.megatron
    if style is None:
        return {}
    fields = extract_megatron_fields(record)
    config = {fact.config: value for fact, value in iterate_megatron_facts(style, fields)}
    rope = read_megatron_rope(style, fields)
    config |= {} if rope is None or rope["rope_type"] == "default" else {"rope_scaling": rope}
    if not style.config_prefix:
        return {"model_type": style.model_type, **config}
    outer = {name: config.pop(name) for name in style.outer_facts if name in config}
    text = {name.removeprefix(style.config_prefix): v for name, v in style.extra_config.items()}
    section = style.config_prefix.rstrip(".")
    return {"model_type": style.model_type, **outer, section: {**text, **config}}


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
    style, fields = require_megatron_style(family), extract_megatron_fields(record)
    if not style.translated:
        raise MappingError(
            f"cannot generate config.json of `{family.name}` from Megatron's configuration",
            hint=assets_hint(),
        )
    _require_expected_values(family, style, fields)
    config_values = {fact.config: value for fact, value in iterate_megatron_facts(style, fields)}
    if style.has_optional_experts and not fields.get(EXPERT_COUNT_FIELD):
        config_values = _get_expert_defaults(style) | config_values
    nulls = {name for name, value in config_values.items() if value is None} - {"vocab_size"}
    sizes_by_name = _name_sizes(family, sizes)
    config_values |= {
        fact_name: size
        for fact_name, size in sizes_by_name.items()
        if fact_name not in nulls
        and (fact_name != "vocab_size" or config_values.get(fact_name) is None)
    }
    config_values |= {} if tied is None else {"tie_word_embeddings": tied}
    rope = read_megatron_rope(style, fields)
    _require_logit_fields(style, config_values, rope)
    config: dict[str, object] = {"architectures": [family.architecture]}
    config["model_type"] = style.model_type
    for fact in style.facts:
        neutral = FACT_KINDS[fact.kind].neutral
        config[fact.config] = config_values.get(fact.config, None if neutral is NEEDED else neutral)
    for name, allowed in style.config.items():
        if name in config and not is_allowed(allowed, config[name]):
            raise MappingError(
                f"config.json cannot express `{name}` = {config[name]!r}",
                where="Megatron's configuration",
                hint=assets_hint(),
            )
        value = allowed[0]
        config.setdefault(name, list(value) if isinstance(value, tuple) else value)
    # The class's default may be outside the vocabulary; no logits depend on it.
    config |= {"pad_token_id": None, **style.extra_config, **read_max_length(record)}
    if style.has_local_rope:
        config["rope_local_base_freq"] = _require_two_bases(fields)[0]
    if rope is not None and rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config | ({"torch_dtype": dtype} if dtype else {})


def _get_expert_defaults(style: MegatronStyle) -> dict[str, object]:
    """Return the defaults of facts on experts, for models without experts."""
    return {
        fact.config: fact.default
        for fact in style.facts
        if fact.megatron == EXPERT_COUNT_FIELD or fact.megatron.startswith("moe_")
    }


def read_max_length(record: Json) -> dict[str, object]:
    """Return the maximum sequence length in *record* under its key in config.json."""
    fields = extract_megatron_fields(record)
    lengths = (parse_size(fields.get(name), name) for name in LENGTH_FIELDS)
    length = next((value for value in lengths if value), None)
    return {} if length is None else {"max_position_embeddings": length}


def _name_sizes(family: Family, sizes: Mapping[str, int]) -> dict[str, int]:
    """Map axis *sizes* of the text model from axis names to keys of its config."""
    names = {axis: name for axis, (name, _) in {**SIZES, **family.sizes}.items()}
    prefix = require_megatron_style(family).config_prefix
    sizes_by_path = {
        split_aliases(names[axis])[0]: size for axis, size in sizes.items() if names.get(axis)
    }
    # A tower may have sizes of the same names.
    own_paths = (path for path in sizes_by_path if path.startswith(prefix))
    return {path.rpartition(".")[2]: sizes_by_path[path] for path in own_paths}


def _require_logit_fields(style: MegatronStyle, config_values: Json, rope: Json | None) -> None:
    """Raise if *config_values* are missing a fact that affects logits."""
    missing = {
        fact.config: fact.megatron
        for fact in style.facts
        if config_values.get(fact.config) is None
        and FACT_KINDS[fact.kind].neutral is NEEDED
        and not FACT_KINDS[fact.kind].allows_null
    }
    if rope is None:
        missing["rope_scaling"] = "rope_scaling"
    elif rope["rope_type"] == "yarn":
        needed = (name for name in ("factor", ORIGINAL_LENGTH_KEY) if name not in rope)
        missing |= {f"rope_scaling.{name}": f"yarn_{YARN_FACTS[name].megatron}" for name in needed}
    if missing:
        raise MappingError(
            f"config.json requires {quote_names(list(missing))}",
            why=f"Megatron's configuration does not set {quote_names(list(missing.values()))}",
            hint=assets_hint(),
        )


def _require_expected_values(family: Family, style: MegatronStyle, fields: Json) -> None:
    """Raise if a field differs from the value that all models of the family have."""
    for name, allowed in get_expected_fields(style, fields).items():
        if name in fields and not is_allowed(allowed, fields[name]):
            raise MappingError(
                f"`{name}` is {fields[name]!r}",
                where="Megatron's configuration",
                why=f"it is {allowed[0]!r} in every model of `{family.name}`",
                hint=f"pass the right model type with {format_option('--model-type')}",
            )


def _require_two_bases(fields: Json) -> tuple[float, float]:
    """Return the rotary bases of layers with and without a sliding window, in this order."""
    bases = fields.get("rotary_base")
    if isinstance(bases, (list, tuple)) and len(bases) == 2:
        return require_number(bases[0], "rotary_base"), require_number(bases[1], "rotary_base")
    raise MappingError(
        "`rotary_base` is not a pair of bases", why=f"it is {bases!r}", hint=assets_hint()
    )


# ------------------------------------------------------------------------------- write


def config_to_megatron_fields(
    family: Family, config: Json, sizes: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Build Megatron-Core's fields from a config.json.

    *sizes*, solved from the tensors, override *config*.
    """
    style = require_megatron_style(family)
    values: Json = normalize_rope(drop_unused_windows(config))
    text_config = (
        get_nested(values, style.config_prefix.rstrip(".")) if style.config_prefix else None
    )
    if isinstance(text_config, Mapping):
        outer = {name: values[name] for name in style.outer_facts if name in values}
        values = {**text_config, **outer}
    values = _fill_layer_types(style, _fill_indexer_types(values))
    _require_expressible(family, style, values)
    sizes_by_name = _name_sizes(family, read_sizes(family, config) | dict(sizes or {}))
    facts = {fact.config: _get_fact_value(fact, values, sizes_by_name) for fact in style.facts}
    if sizes is not None:
        facts |= _count_mtp_layers(family, sizes)
    fields = {fact.megatron: write_megatron_value(fact, facts) for fact in style.facts}
    fields |= {copy: fields[field] for copy, field in style.copies.items()}
    rope = values.get("rope")
    scaling = rope if isinstance(rope, Mapping) else {}
    rope_fields = write_megatron_rope(style, scaling)
    if rope_fields is None:
        why = f"not supported by Megatron's `{family.name}`"
        raise inexpressible_error(CONFIG_NAME, "rope_scaling", dict(scaling), why)
    fields |= rope_fields
    for name, allowed in get_expected_fields(style, fields).items():
        fields.setdefault(name, allowed[0])
    types = get_nested(values, "layers_block_type")
    if style.has_optional_experts and isinstance(types, list) and "moe" not in types:
        fields = {name: value for name, value in fields.items() if not name.startswith("moe_")}
        fields[EXPERT_COUNT_FIELD] = None
    if style.has_local_rope:
        base = require_number(
            get_nested(values, "rope_local_base_freq") or 10000.0, "rope_local_base_freq"
        )
        fields["rotary_base"] = [base, fields["rotary_base"]]
    length = parse_size(get_nested(values, "max_position_embeddings"), "max_position_embeddings")
    return fields | ({} if length is None else dict.fromkeys(LENGTH_FIELDS, length))


def _count_mtp_layers(family: Family, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of MTP layers that the tensors show, or nothing if they have no index."""
    style = require_megatron_style(family)
    names = [fact.config for fact in style.facts if fact.megatron == MTP_COUNT_FIELD]
    indexed = any(MTP_INDEX in tensor.indices for tensor in family.tensors.values())
    if not indexed and any(name.startswith("mtp_") for name in family.tensors):
        return {}
    # In other families, the index numbers the layers of a tower.
    counted = split_aliases(family.sizes.get(MTP_INDEX, ("", ""))[0])[0]
    is_own = counted in ("", *map(style.get_config_name, names))
    return dict.fromkeys(names, sizes.get(MTP_INDEX, 0) if is_own else 0)


def _fill_indexer_types(values: Json) -> Json:
    """Add ``indexer_types`` to *values* if they state its period or pattern, as transformers does.

    Source: transformers' ``configuration_glm_moe_dsa.py``.
    """
    pattern, period = (get_nested(values, f"index_topk_{name}") for name in ("pattern", "freq"))
    layers = parse_size(get_nested(values, "num_hidden_layers"), "num_hidden_layers")
    if get_nested(values, "indexer_types") is not None or not layers:
        return values
    if isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif pattern is not None:
        types = list(pattern) if isinstance(pattern, list) else []
    elif period is not None:
        start = get_nested(values, "index_skip_topk_offset")
        start = 2 if start is None else parse_size(start, "index_skip_topk_offset") or 0
        period = parse_size(period, "index_topk_freq") or 1
        types = list_indexer_types(layers, period, start)
    else:
        return values
    return {**values, "indexer_types": types}


def _fill_layer_types(style: MegatronStyle, values: Json) -> Json:
    """Add ``layers_block_type`` and its length to *values* if they state letters, as published.

    Source: transformers' ``configuration_nemotron_h.py``.
    """
    if all(fact.megatron != PATTERN_FIELD for fact in style.facts):
        return values
    letters = {
        f"{kind}hybrid_override_pattern": f"{kind}layers_block_type" for kind in ("", "mtp_")
    }
    added = {
        name: read_layer_letters(get_nested(values, pattern), pattern, values)
        for pattern, name in letters.items()
        if get_nested(values, name) is None and get_nested(values, pattern) is not None
    }
    types = get_nested({**values, **added}, "layers_block_type")
    count = {"num_hidden_layers": len(types)} if isinstance(types, list) else {}
    return {**count, **values, **added}


def _get_fact_value(fact: Fact, values: Json, sizes_by_name: Mapping[str, int]) -> object:
    """Return the value of *fact* in config.json, or its default if it is not set."""
    fact_kind, value = FACT_KINDS[fact.kind], get_nested(values, fact.config)
    is_null = has_field(values, fact.config) or fact.default is None
    if value is None and fact_kind.allows_null and is_null:
        return None  # also if tensors have a dimension for it, of another size
    if fact.config in sizes_by_name:
        return sizes_by_name[fact.config]
    if value is None and fact.config == "partial_rotary_factor":
        value = get_nested(values, "rope.partial_rotary_factor")
    value = fact.default if value is None else value
    if value is NEEDED and fact_kind.neutral is NEEDED:
        raise MappingError(
            f"{CONFIG_NAME} requires `{fact.config}`", where="config.json", why="it is not set"
        )
    return fact_kind.neutral if value is NEEDED else value


def _require_expressible(family: Family, style: MegatronStyle, values: Json) -> None:
    """Raise if Megatron-Core's configuration cannot express *values* for the family."""
    megatron_family = f"Megatron's `{family.name}`"
    for name, allowed in style.config.items():
        value = get_nested(values, name)
        if value is not None and not is_allowed(allowed, value):
            usual = "not set" if allowed[0] is None else f"always {allowed[0]!r}"
            why = f"it is {usual} in {megatron_family}"
            raise inexpressible_error(CONFIG_NAME, name, value, why)
    kinds = get_nested(values, "layer_types")
    other_kind, period = style.layer_pattern
    if isinstance(kinds, list) and kinds != [
        FULL_ATTENTION if period and layer_number % period == 0 else other_kind
        for layer_number in range(1, len(kinds) + 1)
    ]:
        mixed = f"{other_kind}, with {FULL_ATTENTION} in the last of every {period} layers"
        only_kind = f"only {other_kind or FULL_ATTENTION}"
        why = f"{megatron_family} uses {mixed if other_kind and period else only_kind}"
        raise inexpressible_error(CONFIG_NAME, "layer_types", kinds, why)


# ------------------------------------------------------------------------------- contradict


def iterate_default_statements(family: Family, config: Json, source: str) -> Iterator[Statement]:
    """Yield config.json defaults for facts that Megatron records but config.json does not set."""
    style = family.megatron
    if style is None:
        return
    config = _fill_layer_types(style, config)
    explicit_facts = {
        statement.fact
        for statement in read_config_statements(family, config, source)
        if statement.is_explicit
    }
    for fact in style.facts:
        name = style.get_config_name(fact.config)
        if fact.default is not NEEDED and name not in explicit_facts:
            yield Statement(name, fact.default, source, is_explicit=False)


def find_family_mismatches(family: Family, config: Json, source: str) -> Iterator[Statement]:
    """Yield the values in config.json that no Megatron-Core model of *family* has."""
    style = family.megatron
    allowed_values = (
        {}
        if style is None
        else {
            style.config_prefix + config_name: values
            for config_name, values in style.config.items()
        }
    )
    for fact, allowed in allowed_values.items():
        value = get_nested(config, fact)
        if value is not None and not is_allowed(allowed, value):
            yield Statement(fact, value, source)
            yield Statement(fact, allowed[0], f"Megatron-Core's models of `{family.name}`")


def is_allowed(allowed: Iterable[object], value: object) -> bool:
    """Return whether *value* is in *allowed*.

    True does not equal 1, but a list equals a tuple with the same elements.
    """
    value = tuple(value) if isinstance(value, list) else value
    return any(
        value == allowed_value and isinstance(value, bool) == isinstance(allowed_value, bool)
        for allowed_value in allowed
    )


def get_expected_fields(style: MegatronStyle, fields: Json) -> dict[str, tuple[object, ...]]:
    """Return the allowed values, by name, of fields that are fixed in all models of a family."""
    fact_fields = {fact.megatron for fact in style.facts}
    has_experts = EXPERT_COUNT_FIELD in fact_fields or fields.get(EXPERT_COUNT_FIELD) is not None
    neutral = {
        field: values
        for field, values in NEUTRAL.items()
        if has_experts or not field.startswith("moe_")
    }
    return {
        field: allowed
        for field, allowed in {**neutral, **style.fields}.items()
        if field not in fact_fields
    }
