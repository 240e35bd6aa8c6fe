"""params.json as facts of config.json: read, write and compare.

Sources: Meta's ``ModelArgs`` in ``llama/model.py`` and ``llama_models/llama3``,
mistral-inference's ``args.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

from ckptctl.errors import MappingError, spell_option
from ckptctl.facts.contradictions import Statement, leaves, respell
from ckptctl.facts.fact_names import NOTED, is_module, walked
from ckptctl.facts.kinds import inexpressible_error, number, value_of
from ckptctl.planner.config_facts import (
    SUBMODEL_KEYS,
    Json,
    get_model_params,
    name_axis_size,
    normalize_rope,
    parse_size,
    read_rope,
    read_sizes,
    with_rope_type,
)
from ckptctl.planner.families.declarations import (
    ParamsStyle,
    get_nested,
    has_field,
    matches_signs,
    split_aliases,
)
from ckptctl.planner.families.facts import NEEDED, Fact
from ckptctl.planner.layouts import Family

SCALED = "use_scaled_rope"
FORMULA = ("multiple_of", "ffn_dim_multiplier")
"""Keys that determine the feed-forward size in Meta's files."""
_FFN = ((256, 1.0), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2))
"""Usual values of ``multiple_of`` and ``ffn_dim_multiplier``, tried first."""


def preset(family: Family, params: Json) -> dict[str, object]:
    """Return the config.json values that the family's tables give for *params*."""
    values: dict[str, object] = {}
    for signs, added in family.presets:
        if matches_signs(signs, params):
            merge(values, added)
    return values


def merge(values: dict[str, object], added: Json) -> None:
    """Merge *added* into *values*, including the objects that both have."""
    for key, value in added.items():
        inner = values.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping) and key in SUBMODEL_KEYS:
            merge(inner, value)
        else:
            values[key] = deepcopy(value)


def named_in(family: Family) -> set[str]:
    """Return the keys of params.json that are facts, or that do not affect the model."""
    style = family.params
    known = {*style.silent, "tied_embeddings", *(fact.params for _, fact in style.facts)}
    known |= {one for names in family.sizes.values() for one in split_aliases(names[1])}
    return known | ({*FORMULA, SCALED} if style.derived else set())


def ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Return the feed-forward size by Meta's formula."""
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


def ffn_of(params: Json, dim: int) -> int:
    """Return the feed-forward size by Meta's formula for a params.json."""
    factor = params.get("ffn_dim_multiplier")
    multiple = parse_size(params.get("multiple_of"), "multiple_of") or 256
    return ffn_size(dim, multiple, None if factor is None else number(factor, "ffn_dim_multiplier"))


def of_params(family: Family, params: Json, source: str) -> Iterator[Statement]:
    """Yield the statements of a params.json, as facts of config.json."""
    style, values = family.params, with_rope_type(params)
    sizes = read_sizes(family, None, params)
    named = read_sizes(family, None, params, include_defaults=False)
    if style.derived and "f" not in sizes and "d" in sizes and "multiple_of" in values:
        sizes["f"] = ffn_of(values, sizes["d"])
    for axis, size in sizes.items():
        yield Statement(
            name_axis_size(family, axis), size, source, axis in named, family.sizes[axis][1]
        )
    told = _said(family, params, source)
    by_name = {one.fact for one in told}
    implied = _implied(family, values, source)
    yield from (one for one in implied if one.fact not in by_name)
    yield from told


def _said(family: Family, params: Json, source: str) -> list[Statement]:
    """Return the statements of a params.json other than sizes."""
    style, values, known = family.params, get_model_params(params), named_in(family)
    found: list[Statement] = []
    for name, fact in style.facts:
        value = value_of(fact, get_nested(values, fact.params), fact.params)
        if value is not None and name.rpartition(".")[2] not in NOTED:
            found.append(Statement(name, value, source, said=fact.params))
    if isinstance(tied := values.get("tied_embeddings"), bool):
        name = f"{style.prefix}tie_word_embeddings"
        found.append(Statement(name, tied, source, said="tied_embeddings"))
    for name, value in leaves(values):
        if name not in known and name.partition(".")[0] not in known:
            found.append(Statement(name, value, source))
    always = f"every params.json of `{family.name}`"
    found += (
        Statement(name, value, always, stated=False) for name, value in style.constant.items()
    )
    return found


def _implied(family: Family, values: Json, source: str) -> Iterator[Statement]:
    """Yield the statements that a params.json implies."""
    style = family.params
    scaling = f"{style.prefix}rope."
    told: dict[str, object] = {f"{scaling}rope_type": "default"}
    told |= leaves(normalize_rope(preset(family, values)))
    told |= {name: respell(rule.allowed[0]) for name, rule in style.fixed_rules}
    told |= {name: fact.absent for name, fact in style.facts if fact.absent is not None}
    for name, value in told.items():
        if name.rpartition(".")[2] not in NOTED:
            by_word = SCALED in values and name.startswith(scaling)
            yield Statement(name, value, source, by_word, SCALED if by_word else "")


def params_to_config(
    family: Family,
    params: Json,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build the config.json of a checkpoint that has only params.json.

    *sizes*, solved from the tensors, override formulas: vocabulary size (-1 in Llama 2),
    feed-forward size, key/value heads without repetition, number of layers.
    """
    style, values = family.params, with_rope_type(params)
    _require_translated(family, "config.json", "params.json")
    _understood(family, get_model_params(params))
    config: dict[str, object] = {"architectures": [family.architecture]}
    known = read_sizes(family, None, params) | dict(sizes)
    if style.derived and "f" not in known and "d" in known:
        known["f"] = ffn_of(values, known["d"])
    stated = {axis: names[0] for axis, names in family.sizes.items() if names[0]}
    if lacking := [family.describe_size(axis) for axis in stated if axis not in known]:
        raise MappingError(
            f"config.json requires {' and '.join(lacking)}", why="not set in params.json"
        )
    for axis, names in stated.items():
        _put(config, split_aliases(names)[0], known[axis])
    extra = preset(family, values)
    merge(config, extra)
    for name, fact in style.facts:
        said = get_nested(values, fact.params)
        value = value_of(fact, fact.absent if said is None else said, fact.params)
        if value is not None or said is not None:
            _stated_once(config, name, value, fact, extra)
    for name, rule in style.fixed_rules:
        if rule.written:
            _put(config, name, rule.allowed[0])
    if values.get(SCALED) and "rope_scaling" not in extra:
        raise MappingError(
            f"`{family.name}` does not support scaled rotary frequencies",
            where="params.json",
            why=f"`{SCALED}` is true",
            hint=f"pass {spell_option('--model-type llama3')} or "
            f"{spell_option('--model-type llama3_2')}",
        )
    told = values.get("tied_embeddings", family.tied) if tied is None else tied
    for place in {"", style.prefix}:
        _put(config, f"{place}tie_word_embeddings", bool(told))
    # Use transformers 5 keys if the rotary frequencies have more than a base.
    text = get_nested(config, style.within) if style.within else config
    if isinstance(text, dict) and isinstance(text.get("rope"), dict):
        text["rope_parameters"] = {**text.pop("rope"), "rope_theta": text.pop("rope_theta", None)}
    return config | ({"torch_dtype": dtype} if dtype else {})


def _require_translated(family: Family, wanted: str, given: str) -> None:
    """Raise if the family has no conversion between params.json and config.json."""
    if not family.params.translated:
        raise MappingError(
            f"cannot generate {wanted} of `{family.name}` from {given}",
            hint=f"pass {spell_option('--assets DIR')} with {wanted}",
        )


def _put(values: dict[str, object], name: str, value: object) -> None:
    """Set a dotted *name* in nested objects."""
    *outer, last = name.split(".")
    for part in outer:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise MappingError(f"`{part}` is not a JSON object", where=name)
        values = inner
    values[last] = value


def assumed(family: Family, params: Json) -> dict[str, object]:
    """Return facts of config.json that params.json does not state, by name.

    These differ between models of one family: token IDs, lengths, rotary periods.
    """
    values, style = with_rope_type(params), family.params
    known = {n for n, fact in style.facts if get_nested(values, fact.params) is not None}
    known |= {"model_type", *(name for name, _ in style.fixed_rules)}
    return {
        name: value
        for name, value in walked(preset(family, values), is_module)
        if name not in known and value is not None and not isinstance(value, Mapping)
    }


def _understood(family: Family, params: Json) -> None:
    """Raise if params.json has keys that config.json of this family cannot express."""
    style, known = family.params, named_in(family)
    names = known | style.constant.keys()
    for name, value in walked(params, lambda n: any(other.startswith(f"{n}.") for other in names)):
        if name in style.constant:
            if value != style.constant[name]:
                raise _strange(name, value, f"it must be {style.constant[name]!r}")
        elif name not in known and value is not None:
            raise _strange(name, value)


def _strange(name: str, value: object, why: str = "") -> MappingError:
    return MappingError(
        f"params.json sets `{name}`, which config.json of this model cannot express",
        where="params.json",
        why=f"its value is {value!r}" + (f"; {why}" if why else ""),
        hint=f"pass {spell_option('--assets DIR')} with the right config.json",
    )


def _stated_once(
    config: dict[str, object], name: str, value: object, fact: Fact, extra: Json
) -> None:
    """Set a fact in *config*, or raise if params.json states it twice with different values."""
    before = get_nested(config, name)
    if before not in (None, value) and get_nested(extra, name) != before:
        raise MappingError(
            "params.json contradicts itself",
            where="params.json",
            why=f"`{fact.params}` is {value!r}, but another key implies {before!r}",
        )
    _put(config, name, value)


def config_to_params(
    family: Family, config: Json, sizes: Mapping[str, int], *, ranks: int = 1
) -> dict[str, object]:
    """Build the params.json for a config.json, with only its publisher's keys.

    If there are more model-parallel *ranks* than key/value heads, the repeated number of heads is
    written.
    """
    style, values = family.params, normalize_rope(config)
    _require_translated(family, "params.json", "config.json")
    known = read_sizes(family, config) | dict(sizes)
    stated = {axis: names[1] for axis, names in family.sizes.items() if names[1]}
    lacking = [family.describe_size(axis) for axis in stated if axis not in known]
    if lacking:
        raise MappingError(f"params.json requires {' and '.join(lacking)}", where="config.json")
    _expressible(style, values)
    params: dict[str, object] = {}
    for axis, name in stated.items():
        if not (style.derived and axis in "fe"):
            _put(params, name, known[axis])
    if style.derived:
        params |= _derived(family, known, values, ranks)
    for name, fact in style.facts:
        if fact.back:
            _state(params, fact, name, values)
    for name, value in style.constant.items():
        _put(params, name, value)
    tied = config.get("tie_word_embeddings") is True and not style.derived
    return params | ({"tied_embeddings": True} if tied else {})


def _state(params: dict[str, object], fact: Fact, name: str, values: Json) -> None:
    """Write a fact of config.json to *params*, omitting a null window."""
    found, default = get_nested(values, name), fact.default
    if fact.kind == "window" and has_field(values, name):
        default = None
    if found is None and default is NEEDED:
        raise MappingError(
            f"params.json requires `{fact.params}`", where="config.json", why=f"`{name}` is not set"
        )
    value = value_of(fact, default if found is None else found, name)
    if value is not None:
        _put(params, fact.params, value)


def _derived(
    family: Family, known: Mapping[str, int], values: Json, ranks: int
) -> dict[str, object]:
    """Return the fields that only Meta's params.json has."""
    if known["h"] * known.get("e", 0) != known["d"]:
        raise _unsaid("head_dim", known.get("e"), "in Meta's layout it is always dim / n_heads")
    multiple, factor = ffn_params(known["d"], known["f"])
    found: dict[str, object] = {"multiple_of": multiple}
    found |= {} if factor is None else {"ffn_dim_multiplier": factor}
    found |= {"n_kv_heads": max(known["k"], ranks)} if "k" in family.repeated else {}
    scaling = read_rope(values)[1]
    if scaling is None:
        return found
    known_scaling = preset(family, {SCALED: True}).get("rope_scaling")
    if scaling != known_scaling:  # Meta knows one way to scale the rotary frequencies
        means = f"`{SCALED}` means {known_scaling}"
        means = means if known_scaling else "the frequencies are not scaled"
        raise _unsaid("rope_scaling", dict(scaling), f"in `{family.name}` {means}")
    return {**found, SCALED: True}


def ffn_params(dim: int, size: int) -> tuple[int, float | None]:
    """Return ``multiple_of`` and ``ffn_dim_multiplier`` that give exactly *size*."""
    for multiple, factor in _FFN:
        if ffn_size(dim, multiple, factor) == size:
            return multiple, None if factor == 1.0 else factor
    factor = (size + 0.5) / max(int(8 * dim / 3), 1)
    if ffn_size(dim, 1, factor) != size:
        raise MappingError(
            f"params.json cannot express feed-forward size {size} with model dimension {dim}"
        )
    return 1, factor


def _expressible(style: ParamsStyle, values: Json) -> None:
    """Raise if params.json of this style cannot express *values*."""
    for name, rule in style.fixed_rules:
        value = get_nested(values, name)
        if value is not None and value not in rule.allowed:
            raise _unsaid(name, value, rule.why)
    if style.derived:
        return
    known = {name for name, _ in (*style.facts, *style.fixed_rules)}
    place = f"{style.prefix}rope"
    found = get_nested(values, place)
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if f"{place}.{key}" not in known:
            raise _unsaid(f"{place}.{key}", value, f"{style.owner} params.json has no field for it")


def _unsaid(name: str, value: object, why: str) -> MappingError:
    hint = f"keep the hf layout ({spell_option('--to')} dcp, torch or hf), which loses nothing"
    return inexpressible_error("params.json", name, value, why, hint)
