"""Adapt config.json to the keys that mlx-lm reads and writes.

For a vision-language model, mlx-lm omits the vision tower and ``vision_config`` but keeps the
``model_type``; sizes may be in ``text_config``. transformers has a separate model type for the text
model, which mlx-lm does not support. Such a family matches config.json under two conditions, one of
which requires that ``vision_config`` is absent.

mlx-lm reads the keys of transformers before version 5: ``rope_theta``, ``rope_scaling``,
``sliding_window_pattern`` and ``global_head_dim``. It uses its own defaults where transformers 5
wrote ``rope_parameters``, ``layer_types`` and ``per_layer_config``. Vision towers had the model's
``model_type``, and some text models were next to them instead of in ``text_config``.

Sources: ``save_config`` and ``_get_classes`` of mlx-lm's ``utils.py`` and the ``ModelArgs`` in
``mlx_lm/models`` (0.32.2); the ``config.py`` in ``mlx_vlm/models`` (0.7.10); transformers'
``modeling_rope_utils.py`` (``standardize_rope_params``).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.facts.fact_names import CANONICAL_KEYS
from ckptctl.planner.config_facts import (
    FULL_ATTENTION,
    LOCAL_ATTENTION,
    UNSCALED_ROPE_TYPES,
    Json,
    normalize_rope,
)
from ckptctl.planner.families.declarations import get_nested, split_aliases
from ckptctl.planner.layouts import MLX, Family

TYPE_KEY, TEXT_KEY, VISION_KEY = "model_type", "text_config", "vision_config"
NEW_SCALING = "proportional"
"""Value of ``rope_type`` new in version 5, which readers of ``rope_scaling`` misinterpret."""


def adapt_model_type(config: Json, family: Family | None, layout: str | None) -> Json:
    """Return *config* with the ``model_type`` that programs of *layout* use for *family*."""
    conditions = family.config_signs if family and MLX in family.layouts else ()
    text_type = next(
        (condition.get(TYPE_KEY) for condition in conditions if VISION_KEY not in condition), None
    )
    vision_type = next(
        (
            condition.get(TYPE_KEY)
            for condition in conditions
            if VISION_KEY in condition and condition[VISION_KEY] is None
        ),
        None,
    )
    if (
        not vision_type
        or config.get(VISION_KEY) is not None
        or config.get(TYPE_KEY) not in (text_type, vision_type)
    ):
        return config
    if layout == MLX:
        return {**config, TYPE_KEY: vision_type}
    if config[TYPE_KEY] != vision_type:
        return config
    # As a config of the text model, where keys of `text_config` override the outer ones.
    text_config = config.get(TEXT_KEY)
    outer_config = {name: value for name, value in config.items() if name != TEXT_KEY}
    merged_config = {
        **outer_config,
        **(text_config if isinstance(text_config, Mapping) else {}),
        TYPE_KEY: text_type,
    }
    return {**merged_config, "architectures": [family.architecture]} if family else merged_config


def add_legacy_keys(config: Json, family: Family | None) -> Json:
    """Add the keys of earlier transformers versions that correspond to version 5 keys.

    Legacy keys that *config* already contains are not changed.
    """
    config = _add_submodel_keys(config, family)
    sizes = _build_legacy_size_keys(config, family) if family else {}
    rotary = _build_legacy_rope_keys(config)
    renamed_keys = {
        name: rotary.get(CANONICAL_KEYS[name]) for name in (family.earlier if family else ())
    }
    legacy_keys = {
        **rotary,
        **_build_legacy_window_keys(config),
        **_build_legacy_head_keys(config),
        **sizes,
        **_drop_none(renamed_keys),
    }
    return {**config, **{name: value for name, value in legacy_keys.items() if name not in config}}


def _add_submodel_keys(config: Json, family: Family | None) -> Json:
    """Add the legacy keys of the text model and of the vision tower."""
    text, tower, model_type = (config.get(n) for n in (TEXT_KEY, "vision_config", "model_type"))
    if isinstance(text, Mapping):
        sizes = _build_legacy_size_keys(config, family, f"{TEXT_KEY}.") if family else {}
        text = {**sizes, **add_legacy_keys(text, None)}
        text_keys = text if family and tower and _has_outer_text_config(family) else {}
        config = {**text_keys, **config, TEXT_KEY: text}
    if isinstance(tower, Mapping) and tower.get("model_type") == f"{model_type}_vision":
        config = {**config, "vision_config": {**tower, "model_type": model_type}}
    return config


def _build_legacy_rope_keys(config: Json) -> dict[str, object]:
    if not isinstance(config.get("rope_parameters"), Mapping):
        return {}
    normalized_rope = normalize_rope({"rope_parameters": config["rope_parameters"]})
    scaling = normalized_rope.get("rope")
    scaling = {} if not isinstance(scaling, Mapping) else scaling
    scaling = {name: value for name, value in scaling.items() if name != "layers"}
    partial = scaling.get("partial_rotary_factor")
    names = ("rope_local_base_freq", "rope_theta")
    base_keys = _drop_none(
        {**{n: normalized_rope.get(n) for n in names}, "partial_rotary_factor": partial}
    )
    scaling_type = scaling.get("rope_type")
    if scaling_type == NEW_SCALING:
        return base_keys
    if scaling_type not in UNSCALED_ROPE_TYPES:
        return {**base_keys, "rope_scaling": scaling}
    scaling_fields = {
        n: v for n, v in scaling.items() if n not in ("partial_rotary_factor", "rope_type")
    }
    sections = {**scaling_fields, "type": "default"} if "mrope_section" in scaling_fields else None
    return {**base_keys, "rope_scaling": sections}


def _has_outer_text_config(family: Family) -> bool:
    """Return whether published config.json files have the text model's keys at the top level."""
    names = (split_aliases(spelling) for spelling, _ in family.sizes.values())
    return any(f"{TEXT_KEY}.{first_name}" in other_names for first_name, *other_names in names)


def _drop_none(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _build_legacy_window_keys(config: Json) -> dict[str, object]:
    """Return ``sliding_window_pattern`` if full-attention layers recur at a fixed period.

    Otherwise, the result is empty.
    """
    kinds = config.get("layer_types")
    if (
        not isinstance(kinds, list)
        or LOCAL_ATTENTION not in kinds
        or any(layer_type not in (LOCAL_ATTENTION, FULL_ATTENTION) for layer_type in kinds)
    ):
        return {}
    period = kinds.index(FULL_ATTENTION) + 1 if FULL_ATTENTION in kinds else len(kinds) + 1
    regular_kinds = [
        FULL_ATTENTION if n % period == 0 else LOCAL_ATTENTION for n in range(1, len(kinds) + 1)
    ]
    return {"sliding_window_pattern": period} if kinds == regular_kinds else {}


def _build_legacy_head_keys(config: Json) -> dict[str, object]:
    """Return the legacy keys for head sizes of full-attention layers.

    The result is empty if the layers in ``per_layer_config`` differ.
    """
    per_layer_config = config.get("per_layer_config")
    layers = list(per_layer_config.values()) if isinstance(per_layer_config, Mapping) else []
    first_layer = layers[0] if layers else None
    if not isinstance(first_layer, Mapping) or any(layer != first_layer for layer in layers):
        return {}
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return {names[name]: size for name, size in first_layer.items() if name in names}


def _build_legacy_size_keys(config: Json, family: Family, prefix: str = "") -> dict[str, object]:
    """Return sizes in the object *prefix* under their first alias, if another alias states them."""
    names = [split_aliases(spelling) for spelling, _ in family.sizes.values() if "|" in spelling]
    candidates = (
        (first_name, get_nested(config, other_name))
        for first_name, *other_names in names
        for other_name in other_names
    )
    values = {first_name: value for first_name, value in candidates if value is not None}
    unprefixed_values = {
        n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)
    }
    return {name: value for name, value in unprefixed_values.items() if "." not in name}
