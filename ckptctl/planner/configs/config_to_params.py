"""From config.json to params.json, in the words of its makers.

Sources: Meta's ``ModelArgs`` in ``llama/model.py`` and ``llama_models/llama3``, mistral-inference's
``args.py``, transformers' configuration classes for what a silent config.json means.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.errors import MappingError
from ckptctl.planner.configs.feed_forward import ffn_params
from ckptctl.planner.configs.params_facts import (
    SCALED,
    canonical,
    facts_of,
    preset,
    put,
    require_translated,
    rules_of,
    value_of,
)
from ckptctl.planner.configs.stated import Json, read_sizes, rope
from ckptctl.planner.families.statements import NEEDED, ParamsStyle, Same, looked_up, states
from ckptctl.planner.layouts import Family


def config_to_params(
    family: Family, config: Json, sizes: Mapping[str, int], *, ranks: int = 1
) -> dict[str, object]:
    """Return the params.json that means what config.json says, with its makers' keys only.

    Args:
        family: The model type.
        config: config.json.
        sizes: Axis sizes solved from the tensors.
        ranks: Number of model-parallel shards: with more of them than key/value heads these are
            repeated, and the repeated number is stated.

    Raises:
        MappingError: A value of config.json has no expression in params.json.
    """
    style, values = family.params, canonical(config)
    require_translated(family, "params.json", "config.json")
    known = read_sizes(family, config) | dict(sizes)
    stated = {axis: names[1] for axis, names in family.sizes.items() if names[1]}
    lacking = [family.called(axis) for axis in stated if axis not in known]
    if lacking:
        raise MappingError(f"params.json needs {' and '.join(lacking)}", where="config.json")
    _expressible(style, values)
    params: dict[str, object] = {}
    for axis, name in stated.items():
        if not (style.derived and axis in "fe"):
            put(params, name, known[axis])
    if style.derived:
        params |= _derived(family, known, values, ranks)
    for name, fact in facts_of(style):
        if fact.back:
            _state(params, fact, name, values)
    for name, value in style.constant.items():
        put(params, name, value)
    tied = config.get("tie_word_embeddings") is True and not style.derived
    return params | ({"tied_embeddings": True} if tied else {})


def _state(params: dict[str, object], fact: Same, name: str, values: Json) -> None:
    """Say in *params* what *values* of config.json say; a window of null is none at all."""
    found, default = looked_up(values, name), fact.default
    if fact.kind == "window" and states(values, name):
        default = None
    if found is None and default is NEEDED:
        raise MappingError(
            f"params.json needs `{fact.params}`", where="config.json", why=f"no `{name}` is stated"
        )
    value = value_of(fact, default if found is None else found, name)
    if value is not None:
        put(params, fact.params, value)


def _derived(
    family: Family, known: Mapping[str, int], values: Json, ranks: int
) -> dict[str, object]:
    """Return what only Meta's params.json says."""
    if known["h"] * known.get("e", 0) != known["d"]:
        raise _unsaid("head_dim", known.get("e"), "Meta's is always dim / n_heads")
    multiple, factor = ffn_params(known["d"], known["f"])
    found: dict[str, object] = {"multiple_of": multiple}
    found |= {} if factor is None else {"ffn_dim_multiplier": factor}
    found |= {"n_kv_heads": max(known["k"], ranks)} if "k" in family.repeated else {}
    return found | ({SCALED: True} if _is_scaled(family, values) else {})


def _is_scaled(family: Family, values: Json) -> bool:
    """Return whether the rotary frequencies are scaled in the one way that Meta knows."""
    scaling = rope(values)[1]
    if scaling is None:
        return False
    known = preset(family, {SCALED: True}).get("rope_scaling")
    if scaling != known:
        means = f"`{SCALED}` means {known}" if known else "there is no scaling in it"
        raise _unsaid("rope_scaling", dict(scaling), f"for `{family.name}` {means}")
    return True


def _expressible(style: ParamsStyle, values: Json) -> None:
    """Refuse what params.json of this style cannot say."""
    for name, rule in rules_of(style):
        value = looked_up(values, name)
        if value is not None and value not in rule.allowed:
            raise _unsaid(name, value, rule.why)
    if style.derived:
        return
    known = {name for name, _ in (*facts_of(style), *rules_of(style))}
    place = f"{style.prefix}rope"
    found = looked_up(values, place)
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if f"{place}.{key}" not in known:
            raise _unsaid(f"{place}.{key}", value, f"{style.whose} has no word for it")


def _unsaid(name: str, value: object, why: str) -> MappingError:
    return MappingError(
        f"params.json cannot express `{name}`: {value!r}",
        where="config.json",
        why=why,
        hint="keep the hf layout (--to dcp, torch or hf), where nothing is lost",
    )
