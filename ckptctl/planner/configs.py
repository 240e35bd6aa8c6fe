"""config.json and params.json: axis sizes, and the translation between the two.

Sources: transformers' ``LlamaConfig`` (4.x: ``rope_theta``, ``rope_scaling``, ``torch_dtype``; 5.x:
``rope_parameters``, ``dtype``; what is written here is the old spelling, which both read), Meta's
``ModelArgs`` and ``FeedForward`` in ``llama/model.py`` and ``llama_models/llama3``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import TypeAlias

from ckptctl.errors import MappingError, UsageError, nearest
from ckptctl.planner.layouts import Family, holds

Json: TypeAlias = Mapping[str, object]

PARAMS_KEYS = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "multiple_of",
    "ffn_dim_multiplier",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
)
_RUNTIME_KEYS = ("max_seq_len", "max_batch_size")
_FFN = ((256, 1.0), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2))
_HUGE = 1 << 48


def plain(file: Json) -> Json:
    """Return the part of params.json that describes the model; some nest it under ``model``."""
    inner = file.get("model")
    return inner if isinstance(inner, Mapping) else file


def rope(config: Json) -> tuple[object, Json | None]:
    """Return ``rope_theta`` and the scaling of a config.json, in either spelling.

    Returns:
        The base, None where it is not stated; and the scaling with its kind as ``rope_type``,
        None where the frequencies are not scaled.
    """
    theta = config.get("rope_theta")
    scaling: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if isinstance(value, Mapping):
            scaling = dict(value)
            theta = scaling.pop("rope_theta", theta)
    kind = scaling.pop("type", "default")
    kind = scaling.setdefault("rope_type", kind)
    return theta, None if kind in ("default", None) else scaling


def facts(file: Json) -> Json:
    """Return a configuration with ``rope_theta`` and ``rope_type`` wherever it states them."""
    values = dict(plain(file))
    theta, scaling = rope(values)
    return values | {"rope_theta": theta, "rope_type": scaling and scaling["rope_type"]}


def is_tied(family: Family, config: Json | None) -> bool:
    """Return whether tied tensors are one: as config.json says, else as the family does."""
    said = None if config is None else config.get("tie_word_embeddings")
    return said if isinstance(said, bool) else family.tied


def _count(value: object, name: str) -> int | None:
    """Return a size; None where it is absent or -1.

    Raises:
        MappingError: It is no size.
    """
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _HUGE:
        raise MappingError(f"`{name}` is not a size", where=name, why=f"it is {value!r}")
    return value


def _number(value: object, name: str) -> float:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not 0 < float(str(value)) < math.inf:
        raise MappingError(f"`{name}` is not a positive number", where=name, why=f"it is {value!r}")
    return float(str(value))


def read_sizes(
    family: Family,
    config: Json | None = None,
    params: Json | None = None,
    given: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the axis sizes that a configuration states or implies.

    The number of key/value heads defaults to that of the query heads, the head dimension to the
    hidden size divided by the query heads. Where both files are given, config.json wins: compare
    them with :func:`contradictions`.

    Args:
        family: The model type.
        config: config.json.
        params: params.json.
        given: Sizes that the user states, by any name that :func:`axis_called` understands.

    Raises:
        MappingError: A size is not a positive integer, or the hidden size is not divisible.
        UsageError: A given size contradicts the configuration or another one.
    """
    sizes: dict[str, int] = {}
    for column, file in ((1, params), (0, config)):
        if file is None:
            continue
        values = plain(file)
        named = {
            axis: _count(looked_up(values, n[column]), n[column])
            for axis, n in family.sizes.items()
        }
        sizes |= {axis: size for axis, size in named.items() if size is not None}
    return _implied(family, _agreed(family, sizes, given or {}))


def _agreed(family: Family, stated: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
    """Return *stated* sizes together with those *given*; no two may disagree."""
    sizes = dict(stated)
    source = dict.fromkeys(stated, "the configuration")
    for name, size in given.items():
        axis = axis_called(family, name)
        if sizes.setdefault(axis, size) != size:
            raise UsageError(
                f"`--set {name}={size}` contradicts {source[axis]}",
                why=f"there, {family.called(axis)} is {sizes[axis]}",
            )
        source.setdefault(axis, f"`--set {name}={size}`")
    return sizes


def axis_called(family: Family, name: str) -> str:
    """Return the axis, or counted index, whose size is called *name*.

    Args:
        family: The model type.
        name: The axis itself, or its name in config.json or params.json; of a nested one its last
            part is enough where no other axis has it.

    Raises:
        UsageError: There is none; constants cannot be given either.
    """
    called: dict[str, set[str]] = {}
    for axis, names in family.sizes.items():
        for whole in filter(None, (axis, *names)):
            for spelling in {whole, whole.rpartition(".")[2]}:
                called.setdefault(spelling, set()).add(axis)
    axes = {a for t in family.tensors.values() for leaf in t.leaves.values() for a in leaf.axes}
    bare = axes - family.sizes.keys() - family.constants.keys()
    found = called.get(name) or ({name} & bare)
    if name in family.sizes:
        found = {name}
    if len(found) == 1:
        return next(iter(found))
    known = [*(" or ".join(_spellings(a, family)) for a in family.sizes), *sorted(bare)]
    close = nearest(name, [*called, *bare])
    raise UsageError(
        f"`{family.name}` has no size called `{name}`"
        if not found
        else f"`{name}` may be several sizes of `{family.name}`",
        where="--set",
        why=f"known: {', '.join(known)}",
        hint=f"did you mean `{close}`?" if close and not found else None,
    )


def _spellings(axis: str, family: Family) -> list[str]:
    return list(dict.fromkeys(f"`{name}`" for name in (axis, *family.sizes[axis]) if name))


def read_lists(family: Family, config: Json | None) -> dict[str, list[int]]:
    """Return the lists of layer numbers that the family's shifts look up in config.json.

    Raises:
        MappingError: One of them is not a list of different numbers.
    """
    found: dict[str, list[int]] = {}
    for name in {shift.place for shift in family.shifts} - {"after"}:
        value = looked_up(config or {}, name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise MappingError(f"`{name}` is not a list of layers", why=f"it is {value!r}")
        found[name] = sorted({int(n) for n in value})
    return found


def looked_up(values: Json, name: str) -> object:
    """Return what a configuration says under *name*, in which dots lead into nested objects."""
    if name in values:
        return values[name]
    head, _, tail = name.partition(".")
    inner = values.get(head)
    return looked_up(inner, tail) if tail and isinstance(inner, Mapping) else None


def _implied(family: Family, sizes: dict[str, int]) -> dict[str, int]:
    if "h" in sizes and "k" in family.sizes:
        sizes.setdefault("k", sizes["h"])
    if {"d", "h"} <= sizes.keys() and "e" in family.sizes and "e" not in sizes:
        size, rest = divmod(sizes["d"], sizes["h"])
        if rest:
            raise MappingError(
                f"{family.called('d')} = {sizes['d']} is not divisible by "
                f"{family.called('h')} = {sizes['h']}",
                hint=f"state {family.called('e')}",
            )
        sizes["e"] = size
    return sizes


def contradictions(family: Family, config: Json, params: Json, *, ranks: int = 1) -> list[str]:
    """Return where config.json and params.json of one checkpoint disagree, for people.

    Args:
        family: The model type.
        config: config.json.
        params: params.json.
        ranks: Number of model-parallel shards: params.json may state as many key/value heads.

    Raises:
        MappingError: One of them holds a value of the wrong kind.
    """
    ours, theirs = read_sizes(family, config), read_sizes(family, None, params)
    heads = theirs.get("k")
    if heads == ranks and heads % ours.get("k", heads) == 0:
        theirs.pop("k", None)
    found = [
        f"{family.called(axis)}: {ours[axis]} and {theirs[axis]}"
        for axis in ours
        if theirs.get(axis, ours[axis]) != ours[axis]
    ]
    inner, theta = plain(params), rope(config)[0]
    for name, one, other in (
        ("norm_eps", config.get("rms_norm_eps"), inner.get("norm_eps")),
        ("rope_theta", theta, inner.get("rope_theta")),
    ):
        if one is not None and other is not None and one != other:
            found.append(f"`{name}`: {one} and {other}")
    return found


def ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Return the feed-forward size that Meta's formula gives."""
    hidden = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def ffn_params(dim: int, size: int) -> tuple[int, float | None]:
    """Return ``multiple_of`` and ``ffn_dim_multiplier`` that give exactly *size*.

    Raises:
        MappingError: None do.
    """
    for multiple, factor in _FFN:
        if ffn_size(dim, multiple, factor) == size:
            return multiple, None if factor == 1.0 else factor
    factor = (size + 0.5) / max(int(8 * dim / 3), 1)
    if ffn_size(dim, 1, factor) != size:
        raise MappingError(f"params.json cannot express a feed-forward size of {size} for {dim}")
    return 1, factor


def preset(family: Family, params: Json) -> dict[str, object]:
    """Return what config.json says beyond *params*, by the family's tables."""
    values: dict[str, object] = {}
    for signs, added in family.presets:
        if holds(signs, params):
            values |= deepcopy(dict(added))
    return values


def params_to_config(
    family: Family,
    params: Json,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Return the config.json of a checkpoint that has only params.json.

    Args:
        family: The model type.
        params: params.json.
        sizes: Axis sizes solved from the tensors, which win over formulas: vocabulary (-1 in
            Llama 2), feed-forward size, key/value heads without repetitions, number of layers.
        tied: Whether the embeddings are tied; None: as the family does.
        dtype: torch's name of the tensors' dtype.

    Raises:
        MappingError: params.json holds something that is not understood, or a size is missing.
    """
    values = facts(params)
    _understood(family, plain(params))
    known = read_sizes(family, None, params) | dict(sizes)
    if "f" not in known and "d" in known:
        known["f"] = _ffn_of(values, known["d"])
    lacking = [family.called(axis) for axis in family.sizes if axis not in known]
    if lacking:
        raise MappingError(
            f"config.json needs {' and '.join(lacking)}", why="params.json does not say"
        )
    extra = preset(family, values)
    config: dict[str, object] = {"architectures": [family.architecture]}
    config |= {names[0]: known[axis] for axis, names in family.sizes.items()}
    config["rms_norm_eps"] = _number(values.get("norm_eps", 1e-5), "norm_eps")
    config |= extra
    if values.get("rope_theta") is not None:
        config["rope_theta"] = _number(values["rope_theta"], "rope_theta")
    if values.get("use_scaled_rope") and "rope_scaling" not in extra:
        raise MappingError(
            f"`{family.name}` has no scaled rotary frequencies",
            where="params.json",
            why="`use_scaled_rope` is true",
            hint="--model-type llama3 or llama3_2",
        )
    length = _count(values.get("max_seq_len"), "max_seq_len")
    config |= {"max_position_embeddings": length} if length else {}
    config["tie_word_embeddings"] = family.tied if tied is None else tied
    config |= {"attention_bias": False, "mlp_bias": False}
    return config | ({"torch_dtype": dtype} if dtype else {})


def _understood(family: Family, params: Json) -> None:
    known = {*PARAMS_KEYS, *_RUNTIME_KEYS, *(names[1] for names in family.sizes.values())}
    strange = [key for key, value in params.items() if key not in known and value is not None]
    if strange:
        raise MappingError(
            f"params.json says `{strange[0]}`, which config.json of this model cannot say",
            where="params.json",
            why=f"its value is {params[strange[0]]!r}",
            hint="--assets DIR names a directory that holds the right config.json",
        )


def _ffn_of(values: Json, dim: int) -> int:
    factor = values.get("ffn_dim_multiplier")
    multiple = _count(values.get("multiple_of"), "multiple_of") or 256
    number = None if factor is None else _number(factor, "ffn_dim_multiplier")
    return ffn_size(dim, multiple, number)


def config_to_params(
    family: Family, config: Json, sizes: Mapping[str, int], *, ranks: int = 1
) -> dict[str, object]:
    """Return the params.json that means what config.json says, with Meta's keys only.

    Args:
        family: The model type.
        config: config.json.
        sizes: Axis sizes solved from the tensors.
        ranks: Number of model-parallel shards: with more of them than key/value heads these are
            repeated, and the repeated number is stated.

    Raises:
        MappingError: A value of config.json has no expression in params.json.
    """
    known = read_sizes(family, config) | dict(sizes)
    lacking = [family.called(axis) for axis in "dihkvf" if axis not in known]
    if lacking:
        raise MappingError(f"params.json needs {' and '.join(lacking)}", where="config.json")
    if known["h"] * known.get("e", 0) != known["d"]:
        raise _unsaid("head_dim", known.get("e"), "Meta's is always dim / n_heads")
    scaled = _expressible(family, config)
    multiple, factor = ffn_params(known["d"], known["f"])
    theta, usual = rope(config)[0] or 10000.0, preset(family, {}).get("rope_theta")
    params: dict[str, object] = {
        "dim": known["d"],
        "n_layers": known["i"],
        "n_heads": known["h"],
        "n_kv_heads": max(known["k"], ranks) if "k" in family.repeated else known["k"],
        "vocab_size": known["v"],
        "multiple_of": multiple,
    }
    if factor is not None:
        params["ffn_dim_multiplier"] = factor
    params["norm_eps"] = _number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps")
    if theta != 10000.0 or usual != 10000.0:
        params["rope_theta"] = _number(theta, "rope_theta")
    return params | ({"use_scaled_rope": True} if scaled else {})


def _expressible(family: Family, config: Json) -> bool:
    """Refuse what params.json cannot say; return whether the rotary frequencies are scaled."""
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise _unsaid(name, config[name], "Meta's model has no biases")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _unsaid("hidden_act", config["hidden_act"], "Meta's is always silu")
    scaling = rope(config)[1]
    if scaling is None:
        return False
    known = preset(family, {"use_scaled_rope": True}).get("rope_scaling")
    if scaling != known:
        means = f"`use_scaled_rope` means {known}" if known else "there is no scaling in it"
        raise _unsaid("rope_scaling", dict(scaling), f"for `{family.name}` {means}")
    return True


def _unsaid(name: str, value: object, why: str) -> MappingError:
    return MappingError(
        f"params.json cannot express `{name}`: {value!r}",
        where="config.json",
        why=why,
        hint="keep the hf layout (--to dcp, torch or hf), where nothing is lost",
    )
