"""config.json of a text model that some programs call by the name of the model with pictures.

mlx-lm leaves out the vision tower of such a model and ``vision_config`` of its config.json, whose
``model_type`` stays; the sizes may stand in ``text_config``. transformers has a model type for the
text model alone, which mlx-lm does not know. A family says so by a sign of config.json with
``vision_config`` absent, beside its own.

Source: ``save_config`` and ``_get_classes`` of mlx-lm's ``utils.py`` (0.32.2).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.planner.configs.facts import Json
from ckptctl.planner.layouts import MLX, Family

TYPE, TEXT, TOWER = "model_type", "text_config", "vision_config"


def for_layout(config: Json, family: Family | None, layout: str | None) -> Json:
    """Return *config* under the model type by which the programs of *layout* know *family*."""
    own, other = _types(family)
    if not other or config.get(TOWER) is not None or config.get(TYPE) not in (own, other):
        return config
    if layout == MLX:
        return {**config, TYPE: other}
    return _as_text(config, family, own) if config[TYPE] == other else config


def _types(family: Family | None) -> tuple[object, object]:
    """Return the model type of *family* and that of the model with pictures; None: it has none."""
    signs = family.config_signs if family and MLX in family.layouts else ()
    own = next((one.get(TYPE) for one in signs if TOWER not in one), None)
    other = next((one.get(TYPE) for one in signs if TOWER in one and one[TOWER] is None), None)
    return own, other


def _as_text(config: Json, family: Family | None, own: object) -> Json:
    """Return *config* as that of the text model, what it says inside going before the outside."""
    inner = config.get(TEXT)
    outer = {name: value for name, value in config.items() if name != TEXT}
    known = {**outer, **(inner if isinstance(inner, Mapping) else {}), TYPE: own}
    return {**known, "architectures": [family.architecture]} if family else known
