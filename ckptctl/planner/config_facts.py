"""Axis sizes and other facts in config.json and params.json.

RoPE parameters, which config.json can contain in several formats, are normalized to one format.

Sources: transformers' configuration classes (4.x: ``rope_theta``, ``rope_scaling``; 5.x:
``rope_parameters``), Meta's ``ModelArgs`` in ``llama/model.py`` and ``llama_models/llama3``,
mistral-inference's ``args.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from ckptctl.errors import MappingError, UsageError, find_nearest
from ckptctl.planner.config_defaults import DEFAULTS
from ckptctl.planner.families.declarations import (
    choose_field_alias,
    get_nested,
    has_field,
    split_aliases,
)

if TYPE_CHECKING:
    from ckptctl.planner.families.demands import LayerSize, LayerWord
    from ckptctl.planner.layouts import Family

Json: TypeAlias = Mapping[str, object]

SUBMODEL_KEYS = (
    *("text_config", "vision_config", "thinker_config", "talker_config"),
    *("code_predictor_config", "code2wav_config"),
)
"""Fields of config.json that contain the configs of submodels, also inside each other."""
HEAD_CLASS_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Suffixes of transformers' classes with a language model head."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Fields of config.json with RoPE scaling parameters. Null means no scaling."""
FULL_ATTENTION, LOCAL_ATTENTION = "full_attention", "sliding_attention"
"""Layer types that may have separate RoPE parameters in config.json."""
UNSCALED_ROPE_TYPES = (None, "default")
"""Values of ``rope_type`` that do not scale RoPE frequencies."""
_SIZE_LIMIT = 1 << 48
_FORMULA_TOKEN = re.compile(r"len\([\w.]+\)|[\w.]+|[-*/+]")
"""Operands and operators of size formulas. ``len(name)`` is the length of a list."""


def parse_size(value: object, name: str) -> int | None:
    """Validate a size in a config, and return it, or None if it is absent or -1.

    Args:
        value: The value of the field.
        name: Name of the field, for errors.

    Raises:
        MappingError: The value is not a positive integer.
    """
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _SIZE_LIMIT:
        raise MappingError(f"`{name}` is not a valid size", where=name, why=f"it is {value!r}")
    return value


def get_model_params(file: Json) -> Json:
    """Return the model parameters of a params.json, which some files nest under ``model``."""
    model_params = file.get("model")
    return model_params if isinstance(model_params, Mapping) else file


def has_tied_embeddings(family: Family, config: Json | None, params: Json | None = None) -> bool:
    """Return whether the config, or else the default of *family*, ties the embeddings."""
    is_tied_in_config = read_tied_embeddings(config, params)
    return family.tied if is_tied_in_config is None else is_tied_in_config


def find_absent_heads(family: Family, config: Json | None, *, is_base: bool) -> frozenset[str]:
    """Return the head tensors that the model class in config.json does not have.

    A class without a language model head, such as ``LlamaModel``, has no output projection.
    Embedding models name a class with a head in config.json, but have no head. *is_base* states
    that the tensor names show this.
    """
    heads = frozenset(tie.tensor for tie in family.ties)
    class_names = (config or {}).get("architectures")
    if is_base:
        return heads
    if not isinstance(class_names, list) or not class_names:
        return frozenset()
    if any(
        name == family.architecture or str(name).endswith(HEAD_CLASS_SUFFIXES)
        for name in class_names
    ):
        return frozenset()
    return heads


def read_tied_embeddings(config: Json | None, params: Json | None = None) -> bool | None:
    """Read from the config whether embeddings are tied, or return None if no field states it.

    Raises:
        MappingError: The field is not a boolean.
    """
    for file_name, file, name in (
        ("config.json", config, "tie_word_embeddings"),
        ("params.json", params, "tied_embeddings"),
    ):
        value = None if file is None else get_model_params(file).get(name)
        if isinstance(value, bool):
            return value
        if value is not None:
            raise MappingError(
                f"`{name}` must be true or false", where=file_name, why=f"it is {value!r}"
            )
    return None


def read_sizes(
    family: Family,
    config: Json | None = None,
    params: Json | None = None,
    overrides: Mapping[str, int] | None = None,
    *,
    include_defaults: bool = True,
) -> dict[str, int]:
    """Read axis sizes from the configuration.

    *overrides* take precedence over config.json, and config.json takes precedence over params.json.
    Contradictions between these sources are found in :mod:`ckptctl.facts.contradictions`.

    Args:
        family: The model type.
        config: config.json, or None.
        params: params.json, or None.
        overrides: Sizes set by the user, by the name of an axis or of a field.
        include_defaults: Whether to add sizes that are not stated, such as defaults of transformers
            for the model type, as many key/value heads as query heads, and a head dimension of the
            hidden size divided by the query heads.

    Raises:
        MappingError: A size is invalid, or the hidden size is not a multiple of the heads.
        UsageError: A name in *overrides* is unknown or ambiguous.
    """
    sizes: dict[str, int] = {}
    for column, file in ((1, params), (0, config)):
        if file is None:
            continue
        values = get_model_params(file)
        names = {axis: choose_field_alias(values, n[column]) for axis, n in family.sizes.items()}
        stated_sizes = {
            axis: parse_size(_read_size_field(values, name), name) for axis, name in names.items()
        }
        sizes |= {axis: size for axis, size in stated_sizes.items() if size is not None}
    sizes |= {resolve_axis(family, name): size for name, size in (overrides or {}).items()}
    if include_defaults and config is not None:
        default_sizes = get_default_sizes(family, config)
        by_axis = {axis: default_sizes.get(get_size_field(family, axis)) for axis in family.sizes}
        sizes = {**{axis: size for axis, size in by_axis.items() if size}, **sizes}
    if include_defaults and "h" in sizes and "k" in family.sizes:
        sizes.setdefault("k", sizes["h"])
    if include_defaults and {"d", "h"} <= sizes.keys() and "e" in family.sizes and "e" not in sizes:
        size, rest = divmod(sizes["d"], sizes["h"])
        if rest:
            raise MappingError(
                f"{family.describe_size('d')} = {sizes['d']} is not divisible by "
                f"{family.describe_size('h')} = {sizes['h']}",
                hint=f"set {family.describe_size('e')}",
            )
        sizes["e"] = size
    return sizes


def _read_size_field(values: Json, name: str) -> object:
    """Return the value of a dotted *name*, or None if it is missing.

    Raises:
        MappingError: *name* is an entry of a list that has fewer entries.
    """
    outer, _, last = name.rpartition(".")
    entries = get_nested(values, outer) if last.isdecimal() else None
    if isinstance(entries, list) and int(last) >= len(entries):
        raise MappingError(
            f"`{outer}` has no entry {last}", where=outer, why=f"it has {len(entries)}"
        )
    return get_nested(values, name)


class TranslatedConfig(dict[str, object]):
    """A config.json that was converted from another format, without transformers' defaults."""


def get_default_sizes(family: Family, config: Json) -> dict[str, int]:
    """Return transformers' defaults for the sizes that *config* does not state, by field name."""
    if isinstance(config, TranslatedConfig):
        return {}
    size_names = (
        split_aliases(config_names) for config_names, _ in family.sizes.values() if config_names
    )
    operand_names = ((name,) for _, formula in family.formulas for name in list_operands(formula))
    sizes: dict[str, int] = {}
    for first, *aliases in (*size_names, *operand_names):
        if any(has_field(config, name) for name in (first, *aliases)):
            continue
        for spelling in (first, *aliases):
            if (size := find_default_size(config, spelling)) is not None:
                sizes.setdefault(first, size)
    return sizes


def find_default_size(config: Json, name: str) -> int | None:
    """Return transformers' default for a size field of config.json, or None if it has none."""
    module, _, field_name = name.rpartition(".")
    holder = get_nested(config, module) if module else config
    model_type = holder.get("model_type") if isinstance(holder, Mapping) else None
    return DEFAULTS.get(str(model_type), {}).get(field_name)


def get_size_field(family: Family, axis: str) -> str:
    """Return the config field with the size of *axis*, or *axis* itself if it has no field."""
    config, params = family.sizes.get(axis, ("", ""))
    return split_aliases(config)[0] or split_aliases(params)[0] or axis


def resolve_axis(family: Family, name: str) -> str:
    """Find the axis, or the index with a count, that a user refers to as *name*.

    *name* is the name of the axis or of its config field. For a nested field, the last component is
    sufficient if it is unambiguous.

    Raises:
        UsageError: The name is unknown or ambiguous.
    """
    axes_by_name: dict[str, set[str]] = {}
    for axis, names in family.sizes.items():
        for full_name in filter(
            None, (axis, *(alias for name in names for alias in split_aliases(name)))
        ):
            for spelling in {full_name, full_name.rpartition(".")[2]}:
                axes_by_name.setdefault(spelling, set()).add(axis)
    axes = {a for t in family.tensors.values() for leaf in t.leaves.values() for a in leaf.axes}
    unsized_axes = axes - family.sizes.keys() - family.constants.keys()
    matching_axes = axes_by_name.get(name) or ({name} & unsized_axes)
    if name in family.sizes:
        matching_axes = {name}
    if len(matching_axes) == 1:
        return next(iter(matching_axes))
    known_names = [
        *(" or ".join(_quote_axis_names(a, family)) for a in family.sizes),
        *sorted(unsized_axes),
    ]
    closest_name = find_nearest(name, [*axes_by_name, *unsized_axes])
    raise UsageError(
        f"`{family.name}` has no size named `{name}`"
        if not matching_axes
        else f"`{name}` is ambiguous: `{family.name}` has several such sizes",
        where="--set",
        why=f"known: {', '.join(known_names)}",
        hint=f"did you mean `{closest_name}`?" if closest_name and not matching_axes else None,
    )


def _quote_axis_names(axis: str, family: Family) -> list[str]:
    preferred_names = (split_aliases(name)[0] for name in family.sizes[axis])
    return list(dict.fromkeys(f"`{name}`" for name in (axis, *preferred_names) if name))


def list_operands(formula: str) -> tuple[str, ...]:
    """List the operands of *formula*, such as ``hidden_size`` and ``len(layer_types)``."""
    operands = (
        word
        for word in _FORMULA_TOKEN.findall(formula)
        if word not in "-+*/" and not word.isdecimal()
    )
    return tuple(dict.fromkeys(operands))


def list_formula_fields(formula: str) -> tuple[str, ...]:
    """List the fields of config.json that *formula* uses."""
    return tuple(name.removeprefix("len(").removesuffix(")") for name in list_operands(formula))


def evaluate_formula(formula: str, values: Mapping[str, int]) -> int | None:
    """Evaluate *formula*, or return None if an operand is missing or a quotient is not exact."""
    total = 0
    for term in formula.replace(" - ", " + -1 * ").split(" + "):
        product, operator = 1, "*"
        for word in _FORMULA_TOKEN.findall(term.removeprefix("-1 * ")):
            if word in "*/":
                operator = word
                continue
            factor = int(word) if word.isdecimal() else values.get(word)
            if factor is None or (operator == "/" and (not factor or product % factor)):
                return None
            product = product // factor if operator == "/" else product * factor
        total += -product if term.startswith("-1 * ") else product
    return total


def read_formula_sizes(family: Family, config: Json | None) -> dict[str, int]:
    """Compute the axis sizes whose formulas have all operands in *config*."""
    sizes: dict[str, int] = {}
    for axis, formula in family.formulas:
        operands = {name: get_nested(config or {}, name) for name in list_operands(formula)}
        numbers = {name: value for name, value in operands.items() if type(value) is int}
        size = evaluate_formula(formula, numbers)
        if size is not None and size > 0:
            sizes.setdefault(axis, size)
    return sizes


def read_layer_lists(family: Family, config: Json | None) -> dict[str, list[int]]:
    """Read the numbers of inserted layers from each config.json field in :attr:`Shift.list_field`.

    Also read the number of the word of each layer, by the name of the :class:`LayerWord`.

    Raises:
        MappingError: A field is not a list of layer numbers or of known layer types.
    """
    lists: dict[str, list[int]] = {}
    for name in {shift.list_field for shift in family.shifts} - {""}:
        value = get_nested(config or {}, name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise MappingError(f"`{name}` is not a list of layers", why=f"it is {value!r}")
        lists[name] = sorted({int(n) for n in value})
    for word in family.layer_words:
        layer_types = get_nested(config or {}, word.fact)
        if layer_types is not None:
            lists[word.name] = _read_word_numbers(word, layer_types)
    return lists


def _read_word_numbers(word: LayerWord, layer_types: object) -> list[int]:
    number_by_kind = {kind: number for number, kinds in enumerate(word.kinds) for kind in kinds}
    values = layer_types if isinstance(layer_types, list) else [layer_types]
    unknown = [kind for kind in values if str(kind) not in number_by_kind]
    if unknown or values is not layer_types:
        raise MappingError(
            f"`{word.fact}` is not a list of known layer types",
            why=f"known: {', '.join(number_by_kind)}; it contains {unknown[:1] or layer_types!r}",
        )
    return [number_by_kind[str(kind)] for kind in values]


def read_layer_sizes(family: Family, config: Json, layer: int, total: int) -> dict[str, int]:
    """Read the sizes of axes in one layer that config.json states per layer, by axis.

    *total* is the number of layers.
    """
    by_axis = {
        size.axis: _get_layer_size(size, config, layer, total) for size in family.layer_sizes
    }
    return {axis: size for axis, size in by_axis.items() if size is not None}


def _get_layer_size(size: LayerSize, config: Json, layer: int, total: int) -> int | None:
    """Return the *size* of one layer, or None if the config does not state it.

    *total* is the number of layers.
    """
    value = get_value_or_default(config, size.fact)
    kinds = get_nested(config, size.kinds[0]) if size.kinds else None
    if isinstance(kinds, list) and layer < len(kinds) and kinds[layer] in size.kinds[1:]:
        override = get_nested(config, choose_field_alias(config, size.other))
        value = value if override is None else override
    listed = get_nested(config, size.listed) if size.listed else None
    if isinstance(listed, list) and layer < len(listed):
        value = listed[layer]
    if size.by_layer:
        layer_value = get_nested(config, f"{size.by_layer}.{layer}.{size.fact.rpartition('.')[2]}")
        value = value if layer_value is None else layer_value
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    last_count = get_nested(config, size.last) if size.last else None
    is_last = isinstance(last_count, int) and layer >= total - last_count
    return 2 * value if is_last and get_nested(config, size.doubled) is True else value


def get_value_or_default(config: Json, name: str) -> object:
    """Return the value of *name* in config.json, or transformers' default if it is not set."""
    return get_nested(config, name) if has_field(config, name) else find_default_size(config, name)


def normalize_rope(config: Json) -> dict[str, object]:
    """Normalize all RoPE notations in *config* to ``rope_theta`` and ``rope``.

    ``rope`` contains the scaling parameters, with the scaling type as ``rope_type`` and separate
    parameters for layers without full attention as ``layers``. The configs of submodels are
    normalized too.
    """
    values = dict(config)
    for name in SUBMODEL_KEYS:
        if isinstance(inner := values.get(name), Mapping):
            values[name] = normalize_rope(inner)
    rope_values: dict[str, object] = {}
    for name in ROPE_KEYS:
        if isinstance(value := config.get(name), Mapping):
            full = value.get(FULL_ATTENTION)
            other_layers = {
                key: layer_rope for key, layer_rope in value.items() if key != FULL_ATTENTION
            }
            rope_values |= {**full, "layers": other_layers} if isinstance(full, Mapping) else value
    local_theta = get_nested(rope_values, f"layers.{LOCAL_ATTENTION}.rope_theta")
    theta = rope_values.pop("rope_theta", config.get("rope_theta"))
    rope_type = rope_values.pop("type", None)
    if rope_type is not None:
        rope_values.setdefault("rope_type", rope_type)
    normalized_values = {
        "rope_local_base_freq": local_theta,
        "rope_theta": theta,
        "rope": rope_values or None,
    }
    return values | {name: value for name, value in normalized_values.items() if value is not None}


def read_rope(config: Json) -> tuple[object, Json | None]:
    """Read ``rope_theta`` and the RoPE scaling parameters of a config.json in any format.

    Returns:
        ``rope_theta``, or None if it is missing. Then the scaling parameters, including
        ``rope_type``, or None if frequencies are not scaled.
    """
    values = normalize_rope({name: config.get(name) for name in ("rope_theta", *ROPE_KEYS)})
    scaling = values.get("rope")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") in UNSCALED_ROPE_TYPES:
        scaling = None
    return values["rope_theta"], scaling


def add_rope_fields(file: Json) -> Json:
    """Return a copy of a config with normalized ``rope_theta`` and ``rope_type`` at top level."""
    values = dict(get_model_params(file))
    theta, scaling = read_rope(values)
    return values | {"rope_theta": theta, "rope_type": scaling and scaling["rope_type"]}
