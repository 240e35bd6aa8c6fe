"""Ministral 3 3B, 8B and 14B: the vision tower of Mistral Small 3.1 with Ministral 3's text model.

Sources: transformers' ``modeling_mistral3.py``, ``modeling_ministral3.py`` and
``convert_ministral3_weights_to_hf.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Family, ParamsStyle

from . import _proofs, ministral3, mistral3

STYLE: ParamsStyle = replace(
    mistral3.STYLE,
    text=ministral3.STYLE.text,
    rules=ministral3.STYLE.rules,
    constant={**mistral3.STYLE.constant, **ministral3.STYLE.constant},
)

FAMILY: Family = replace(
    mistral3.FAMILY,
    name="ministral3_vision",
    title="Ministral 3 3B, 8B, 14B",
    aliases=("ministral_3_vision",),
    refines="mistral3",
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "mistral3", "text_config.model_type": "ministral3"},),
    params_signs=({"vision_encoder": PRESENT, "yarn": PRESENT},),
    params=STYLE,
    presets=(({}, {"text_config": ministral3.BEYOND_PARAMS}),),
)
