"""config.json as mlx-lm reads and writes it.

For a vision-language model, mlx-lm omits the vision tower and ``vision_config`` but keeps the
``model_type``; sizes may be in ``text_config``. transformers has a separate model type for the text
model, which mlx-lm does not support. Such a family has two signs of config.json: its own, and one
with ``vision_config`` absent.

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

from ckptctl.facts.fact_names import RENAMED
from ckptctl.planner.config_facts import (
    FULL_ATTENTION,
    LOCAL_ATTENTION,
    UNSCALED_ROPE_TYPES,
    Json,
    normalize_rope,
)
from ckptctl.planner.families.declarations import get_nested, split_aliases
from ckptctl.planner.layouts import MLX, Family

TYPE, TEXT, TOWER = "model_type", "text_config", "vision_config"
UNKNOWN = "proportional"
"""A rotary scaling new in version 5: in ``rope_scaling`` it would be read as another kind."""


def for_layout(config: Json, family: Family | None, layout: str | None) -> Json:
    """Return *config* with the ``model_type`` by which programs of *layout* know *family*."""
    signs = family.config_signs if family and MLX in family.layouts else ()
    own = next((one.get(TYPE) for one in signs if TOWER not in one), None)
    other = next((one.get(TYPE) for one in signs if TOWER in one and one[TOWER] is None), None)
    if not other or config.get(TOWER) is not None or config.get(TYPE) not in (own, other):
        return config
    if layout == MLX:
        return {**config, TYPE: other}
    if config[TYPE] != other:
        return config
    # As a config of the text model, where keys of `text_config` override the outer ones.
    inner = config.get(TEXT)
    outer = {name: value for name, value in config.items() if name != TEXT}
    known = {**outer, **(inner if isinstance(inner, Mapping) else {}), TYPE: own}
    return {**known, "architectures": [family.architecture]} if family else known


def with_earlier_spelling(config: Json, family: Family | None) -> Json:
    """Add the keys of transformers before version 5 for those of version 5.

    Legacy keys that *config* has already are not changed.
    """
    config = _parts(config, family)
    sizes = _sizes(config, family) if family else {}
    rotary = _rotary(config)
    own = {name: rotary.get(RENAMED[name]) for name in (family.earlier if family else ())}
    more = {**rotary, **_windows(config), **_heads(config), **sizes, **_stated(own)}
    return {**config, **{name: value for name, value in more.items() if name not in config}}


def _parts(config: Json, family: Family | None) -> Json:
    """Add the legacy keys of the text model and of the vision tower."""
    text, tower, kind = (config.get(n) for n in (TEXT, "vision_config", "model_type"))
    if isinstance(text, Mapping):
        sizes = _sizes(config, family, f"{TEXT}.") if family else {}
        text = {**sizes, **with_earlier_spelling(text, None)}
        outer = text if family and tower and _beside(family) else {}
        config = {**outer, **config, TEXT: text}
    if isinstance(tower, Mapping) and tower.get("model_type") == f"{kind}_vision":
        config = {**config, "vision_config": {**tower, "model_type": kind}}
    return config


def _rotary(config: Json) -> dict[str, object]:
    if not isinstance(config.get("rope_parameters"), Mapping):
        return {}
    stated = normalize_rope({"rope_parameters": config["rope_parameters"]})
    scaling = stated.get("rope")
    scaling = {} if not isinstance(scaling, Mapping) else scaling
    scaling = {name: value for name, value in scaling.items() if name != "layers"}
    partial = scaling.get("partial_rotary_factor")
    names = ("rope_local_base_freq", "rope_theta")
    found = _stated({**{n: stated.get(n) for n in names}, "partial_rotary_factor": partial})
    kind = scaling.get("rope_type")
    if kind == UNKNOWN:
        return found
    if kind not in UNSCALED_ROPE_TYPES:
        return {**found, "rope_scaling": scaling}
    kept = {n: v for n, v in scaling.items() if n not in ("partial_rotary_factor", "rope_type")}
    sections = {**kept, "type": "default"} if "mrope_section" in kept else None
    return {**found, "rope_scaling": sections}


def _beside(family: Family) -> bool:
    """Return whether published files state the text model next to the vision tower."""
    names = (split_aliases(one) for one, _ in family.sizes.values())
    return any(f"{TEXT}.{first}" in others for first, *others in names)


def _stated(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _windows(config: Json) -> dict[str, object]:
    """Return the period of full-attention layers, if it is regular."""
    kinds = config.get("layer_types")
    if (
        not isinstance(kinds, list)
        or LOCAL_ATTENTION not in kinds
        or any(kind not in (LOCAL_ATTENTION, FULL_ATTENTION) for kind in kinds)
    ):
        return {}
    period = kinds.index(FULL_ATTENTION) + 1 if FULL_ATTENTION in kinds else len(kinds) + 1
    regular = [
        FULL_ATTENTION if n % period == 0 else LOCAL_ATTENTION for n in range(1, len(kinds) + 1)
    ]
    return {"sliding_window_pattern": period} if kinds == regular else {}


def _heads(config: Json) -> dict[str, object]:
    """Return the head sizes of full-attention layers, if all have the same."""
    stated = config.get("per_layer_config")
    layers = list(stated.values()) if isinstance(stated, Mapping) else []
    own = layers[0] if layers else None
    if not isinstance(own, Mapping) or any(one != own for one in layers):
        return {}
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return {names[name]: size for name, size in own.items() if name in names}


def _sizes(config: Json, family: Family, within: str = "") -> dict[str, object]:
    """Return sizes *within* an object under their first name, if another name states them."""
    names = [split_aliases(one) for one, _ in family.sizes.values() if "|" in one]
    stated = ((first, get_nested(config, other)) for first, *others in names for other in others)
    found = {first: value for first, value in stated if value is not None}
    inside = {n.removeprefix(within): v for n, v in found.items() if n.startswith(within)}
    return {name: value for name, value in inside.items() if "." not in name}
