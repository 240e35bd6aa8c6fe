"""Convert params.json from and to config.json, and compare both.

Sources: Meta's ``ModelArgs`` in ``llama/model.py`` and ``llama_models/llama3``,
mistral-inference's ``args.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

from ckptctl.errors import MappingError, format_option
from ckptctl.facts.contradictions import Statement, iterate_facts, to_canonical_value
from ckptctl.facts.fact_names import LOGIT_NEUTRAL_KEYS, is_module, walk_values
from ckptctl.facts.kinds import check_value, inexpressible_error, require_number
from ckptctl.planner.config_facts import (
    SUBMODEL_KEYS,
    Json,
    add_rope_fields,
    get_model_params,
    get_size_field,
    normalize_rope,
    parse_size,
    read_rope,
    read_sizes,
)
from ckptctl.planner.families.declarations import (
    ParamsStyle,
    get_nested,
    has_field,
    matches_conditions,
    split_aliases,
)
from ckptctl.planner.families.facts import NEEDED, Fact
from ckptctl.planner.layouts import Family

SCALED_ROPE_KEY = "use_scaled_rope"
FFN_FORMULA_KEYS = ("multiple_of", "ffn_dim_multiplier")
"""Keys of Meta's params.json from which the feed-forward size is computed."""
_USUAL_FFN_FACTORS = ((256, 1.0), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2))
"""Common pairs of ``multiple_of`` and ``ffn_dim_multiplier``, which are tried first."""


def get_preset_values(family: Family, params: Json) -> dict[str, object]:
    """Return the config.json values that the family's tables give for *params*."""
    values: dict[str, object] = {}
    for signs, added in family.presets:
        if matches_conditions(signs, params):
            merge_nested(values, added)
    return values


def merge_nested(values: dict[str, object], added: Json) -> None:
    """Merge *added* into *values* in place, recursively for submodels that both contain."""
    for key, value in added.items():
        inner = values.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping) and key in SUBMODEL_KEYS:
            merge_nested(inner, value)
        else:
            values[key] = deepcopy(value)


def list_known_keys(family: Family) -> set[str]:
    """Return the keys of params.json that are facts, or that do not affect the model."""
    style = family.params
    keys = {*style.silent, "tied_embeddings", *(fact.params for _, fact in style.facts)}
    keys |= {spelling for names in family.sizes.values() for spelling in split_aliases(names[1])}
    return keys | ({*FFN_FORMULA_KEYS, SCALED_ROPE_KEY} if style.derived else set())


def compute_ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Compute the feed-forward size from *dim* by Meta's formula."""
    try:
        hidden = int(2 * (4 * dim) / 3)
        if multiplier is not None:
            hidden = int(multiplier * hidden)
    except OverflowError as error:
        raise MappingError(
            "the feed-forward size exceeds the range of a float",
            why=f"`ffn_dim_multiplier` is {multiplier!r}",
        ) from error
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def compute_params_ffn_size(params: Json, dim: int) -> int:
    """Compute the feed-forward size by Meta's formula from the values in params.json."""
    factor = params.get("ffn_dim_multiplier")
    multiple = parse_size(params.get("multiple_of"), "multiple_of") or 256
    return compute_ffn_size(
        dim, multiple, None if factor is None else require_number(factor, "ffn_dim_multiplier")
    )


def read_params_statements(family: Family, params: Json, source: str) -> Iterator[Statement]:
    """Yield the facts of a params.json, expressed as config.json fields."""
    style, values = family.params, add_rope_fields(params)
    sizes = read_sizes(family, None, params)
    explicit_axes = read_sizes(family, None, params, include_defaults=False)
    if style.derived and "f" not in sizes and "d" in sizes and "multiple_of" in values:
        sizes["f"] = compute_params_ffn_size(values, sizes["d"])
    for axis, size in sizes.items():
        yield Statement(
            get_size_field(family, axis), size, source, axis in explicit_axes, family.sizes[axis][1]
        )
    explicit_statements = _read_explicit_statements(family, params, source)
    explicit_facts = {statement.fact for statement in explicit_statements}
    implied = _read_implied_statements(family, values, source)
    yield from (statement for statement in implied if statement.fact not in explicit_facts)
    yield from explicit_statements


def _read_explicit_statements(family: Family, params: Json, source: str) -> list[Statement]:
    """Return the statements that a params.json makes explicitly, except sizes."""
    style, values, known_keys = family.params, get_model_params(params), list_known_keys(family)
    statements: list[Statement] = []
    for name, fact in style.facts:
        value = check_value(fact, get_nested(values, fact.params), fact.params)
        if value is not None and name.rpartition(".")[2] not in LOGIT_NEUTRAL_KEYS:
            statements.append(Statement(name, value, source, local_key=fact.params))
    if isinstance(tied := values.get("tied_embeddings"), bool):
        name = f"{style.prefix}tie_word_embeddings"
        statements.append(Statement(name, tied, source, local_key="tied_embeddings"))
    for name, value in iterate_facts(values):
        if name not in known_keys and name.partition(".")[0] not in known_keys:
            statements.append(Statement(name, value, source))
    family_source = f"every params.json of `{family.name}`"
    statements += (
        Statement(name, value, family_source, is_explicit=False)
        for name, value in style.constant.items()
    )
    return statements


def _read_implied_statements(family: Family, values: Json, source: str) -> Iterator[Statement]:
    """Yield the statements that a params.json implies."""
    style = family.params
    scaling = f"{style.prefix}rope."
    implied_values: dict[str, object] = {f"{scaling}rope_type": "default"}
    implied_values |= iterate_facts(normalize_rope(get_preset_values(family, values)))
    implied_values |= {
        name: to_canonical_value(rule.allowed[0]) for name, rule in style.fixed_rules
    }
    implied_values |= {name: fact.absent for name, fact in style.facts if fact.absent is not None}
    for name, value in implied_values.items():
        if name.rpartition(".")[2] not in LOGIT_NEUTRAL_KEYS:
            is_explicit = SCALED_ROPE_KEY in values and name.startswith(scaling)
            yield Statement(
                name, value, source, is_explicit, SCALED_ROPE_KEY if is_explicit else ""
            )


def params_to_config(
    family: Family,
    params: Json,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build the config.json of a checkpoint that has only params.json.

    *sizes*, solved from the tensors, override params.json for the vocabulary size (-1 in Llama 2),
    the feed-forward size, the number of key/value heads without repetition, and the number of
    layers.
    """
    style, values = family.params, add_rope_fields(params)
    _require_translated(family, "config.json", "params.json")
    _require_known_keys(family, get_model_params(params))
    config: dict[str, object] = {"architectures": [family.architecture]}
    axis_sizes = read_sizes(family, None, params) | dict(sizes)
    if style.derived and "f" not in axis_sizes and "d" in axis_sizes:
        axis_sizes["f"] = compute_params_ffn_size(values, axis_sizes["d"])
    config_names = {axis: names[0] for axis, names in family.sizes.items() if names[0]}
    if missing := [family.describe_size(axis) for axis in config_names if axis not in axis_sizes]:
        raise MappingError(
            f"config.json requires {' and '.join(missing)}", why="not set in params.json"
        )
    for axis, names in config_names.items():
        _set_nested(config, split_aliases(names)[0], axis_sizes[axis])
    preset_values = get_preset_values(family, values)
    merge_nested(config, preset_values)
    for name, fact in style.facts:
        raw_value = get_nested(values, fact.params)
        value = check_value(fact, fact.absent if raw_value is None else raw_value, fact.params)
        if value is not None or raw_value is not None:
            _set_consistent_fact(config, name, value, fact, preset_values)
    for name, rule in style.fixed_rules:
        if rule.written:
            _set_nested(config, name, rule.allowed[0])
    if values.get(SCALED_ROPE_KEY) and "rope_scaling" not in preset_values:
        raise MappingError(
            f"`{family.name}` does not support scaled rotary frequencies",
            where="params.json",
            why=f"`{SCALED_ROPE_KEY}` is true",
            hint=f"pass {format_option('--model-type llama3')} or "
            f"{format_option('--model-type llama3_2')}",
        )
    is_tied = values.get("tied_embeddings", family.tied) if tied is None else tied
    for prefix in {"", style.prefix}:
        _set_nested(config, f"{prefix}tie_word_embeddings", bool(is_tied))
    # Use transformers 5 keys if the rotary frequencies have more than a base.
    text_config = get_nested(config, style.within) if style.within else config
    if isinstance(text_config, dict) and isinstance(text_config.get("rope"), dict):
        text_config["rope_parameters"] = {
            **text_config.pop("rope"),
            "rope_theta": text_config.pop("rope_theta", None),
        }
    return config | ({"torch_dtype": dtype} if dtype else {})


def _require_translated(family: Family, target_file: str, source_file: str) -> None:
    """Raise if the family has no conversion between params.json and config.json."""
    if not family.params.translated:
        raise MappingError(
            f"cannot generate {target_file} of `{family.name}` from {source_file}",
            hint=f"pass {format_option('--assets DIR')} with {target_file}",
        )


def _set_nested(values: dict[str, object], name: str, value: object) -> None:
    """Set the value under a dotted *name*, creating nested objects if needed."""
    *outer, last_part = name.split(".")
    for part in outer:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise MappingError(f"`{part}` is not a JSON object", where=name)
        values = inner
    values[last_part] = value


def get_preset_facts(family: Family, params: Json) -> dict[str, object]:
    """Return the facts, by name, that config.json needs and params.json does not state.

    They are token IDs, lengths and rotary periods, which differ between models of one family.
    """
    values, style = add_rope_fields(params), family.params
    stated_facts = {n for n, fact in style.facts if get_nested(values, fact.params) is not None}
    stated_facts |= {"model_type", *(name for name, _ in style.fixed_rules)}
    return {
        name: value
        for name, value in walk_values(get_preset_values(family, values), is_module)
        if name not in stated_facts and value is not None and not isinstance(value, Mapping)
    }


def _require_known_keys(family: Family, params: Json) -> None:
    """Raise if params.json has keys that config.json of this family cannot express."""
    style, known_keys = family.params, list_known_keys(family)
    names = known_keys | style.constant.keys()
    for name, value in walk_values(
        params, lambda n: any(known_name.startswith(f"{n}.") for known_name in names)
    ):
        if name in style.constant:
            if value != style.constant[name]:
                raise _unknown_key_error(name, value, f"it must be {style.constant[name]!r}")
        elif name not in known_keys and value is not None:
            raise _unknown_key_error(name, value)


def _unknown_key_error(name: str, value: object, why: str = "") -> MappingError:
    return MappingError(
        f"params.json sets `{name}`, which config.json of this model cannot express",
        where="params.json",
        why=f"its value is {value!r}" + (f"; {why}" if why else ""),
        hint=f"pass {format_option('--assets DIR')} with the right config.json",
    )


def _set_consistent_fact(
    config: dict[str, object], name: str, value: object, fact: Fact, preset_values: Json
) -> None:
    """Set a fact in *config*, or raise if params.json states it twice with different values."""
    previous = get_nested(config, name)
    if previous not in (None, value) and get_nested(preset_values, name) != previous:
        raise MappingError(
            "params.json contradicts itself",
            where="params.json",
            why=f"`{fact.params}` is {value!r}, but another key implies {previous!r}",
        )
    _set_nested(config, name, value)


def config_to_params(
    family: Family, config: Json, sizes: Mapping[str, int], *, ranks: int = 1
) -> dict[str, object]:
    """Build params.json from a config.json, with only the keys that the publisher uses.

    If the number of model-parallel *ranks* exceeds the number of key/value heads, the heads are
    repeated for each rank, and the repeated number of heads is written.
    """
    style, values = family.params, normalize_rope(config)
    _require_translated(family, "params.json", "config.json")
    axis_sizes = read_sizes(family, config) | dict(sizes)
    params_names = {axis: names[1] for axis, names in family.sizes.items() if names[1]}
    required_axes = dict.fromkeys((*params_names, *("hdf" if style.derived else "")))
    missing = [family.describe_size(axis) for axis in required_axes if axis not in axis_sizes]
    if missing:
        raise MappingError(f"params.json requires {' and '.join(missing)}", where="config.json")
    _require_expressible(style, values)
    params: dict[str, object] = {}
    for axis, name in params_names.items():
        if not (style.derived and axis in "fe"):
            _set_nested(params, name, axis_sizes[axis])
    if style.derived:
        params |= _build_meta_fields(family, axis_sizes, values, ranks)
    for name, fact in style.facts:
        if fact.back:
            _write_fact(params, fact, name, values)
    for name, value in style.constant.items():
        _set_nested(params, name, value)
    tied = config.get("tie_word_embeddings") is True and not style.derived
    return params | ({"tied_embeddings": True} if tied else {})


def _write_fact(params: dict[str, object], fact: Fact, name: str, values: Json) -> None:
    """Write the value of *fact* to *params*, or raise if it is required but not set."""
    raw_value, default = get_nested(values, name), fact.default
    if fact.kind == "window" and has_field(values, name):
        default = None
    if raw_value is None and default is NEEDED:
        raise MappingError(
            f"params.json requires `{fact.params}`", where="config.json", why=f"`{name}` is not set"
        )
    value = check_value(fact, default if raw_value is None else raw_value, name)
    if value is not None:
        _set_nested(params, fact.params, value)


def _build_meta_fields(
    family: Family, axis_sizes: Mapping[str, int], values: Json, ranks: int
) -> dict[str, object]:
    """Build the fields that only Meta's params.json contains."""
    if axis_sizes["h"] * axis_sizes.get("e", 0) != axis_sizes["d"]:
        raise _inexpressible_error(
            "head_dim", axis_sizes.get("e"), "in Meta's layout it is always dim / n_heads"
        )
    multiple, factor = solve_ffn_factors(axis_sizes["d"], axis_sizes["f"])
    fields: dict[str, object] = {"multiple_of": multiple}
    fields |= {} if factor is None else {"ffn_dim_multiplier": factor}
    fields |= {"n_kv_heads": max(axis_sizes["k"], ranks)} if "k" in family.repeated else {}
    scaling = read_rope(values)[1]
    if scaling is None:
        return fields
    known_scaling = get_preset_values(family, {SCALED_ROPE_KEY: True}).get("rope_scaling")
    if scaling != known_scaling:  # Meta has only one kind of rotary scaling
        meaning = f"`{SCALED_ROPE_KEY}` means {known_scaling}"
        meaning = meaning if known_scaling else "the frequencies are not scaled"
        raise _inexpressible_error("rope_scaling", dict(scaling), f"in `{family.name}` {meaning}")
    return {**fields, SCALED_ROPE_KEY: True}


def solve_ffn_factors(dim: int, size: int) -> tuple[int, float | None]:
    """Return ``multiple_of`` and ``ffn_dim_multiplier`` that give exactly *size*."""
    for multiple, factor in _USUAL_FFN_FACTORS:
        if compute_ffn_size(dim, multiple, factor) == size:
            return multiple, None if factor == 1.0 else factor
    factor = (size + 0.5) / max(int(8 * dim / 3), 1)
    if compute_ffn_size(dim, 1, factor) != size:
        raise MappingError(
            f"params.json cannot express feed-forward size {size} with model dimension {dim}"
        )
    return 1, factor


def _require_expressible(style: ParamsStyle, values: Json) -> None:
    """Raise if a params.json of this publisher's style cannot express *values*."""
    for name, rule in style.fixed_rules:
        value = get_nested(values, name)
        if value is not None and value not in rule.allowed:
            raise _inexpressible_error(name, value, rule.why)
    if style.derived:
        return
    known_facts = {name for name, _ in (*style.facts, *style.fixed_rules)}
    rope_prefix = f"{style.prefix}rope"
    rope_values = get_nested(values, rope_prefix)
    for key, value in rope_values.items() if isinstance(rope_values, Mapping) else ():
        if f"{rope_prefix}.{key}" not in known_facts:
            raise _inexpressible_error(
                f"{rope_prefix}.{key}", value, f"{style.owner} params.json has no field for it"
            )


def _inexpressible_error(name: str, value: object, why: str) -> MappingError:
    hint = f"keep the hf layout ({format_option('--to')} dcp, torch or hf), which loses nothing"
    return inexpressible_error("params.json", name, value, why, hint)
