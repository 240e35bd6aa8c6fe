"""Ministral 3 3B, 8B and 14B: the vision tower of Mistral Small 3.1 with Ministral 3's text model.

Sources: transformers' ``modeling_mistral3.py``, ``modeling_ministral3.py`` and
``convert_ministral3_weights_to_hf.py``; Megatron-Bridge's ``ministral3_bridge.py`` and
``modeling_ministral3.py`` (0.6, ``mcore``), whose vision tower and projector are transformers' own.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Family, ParamsStyle

from . import _megatron, _proofs, llama2, ministral3, mistral3, pixtral

ADAPTER = "hf: multi_modal_projector.", "hf, mcore: multi_modal_projector."
TOWER = "hf: vision_tower.", "hf, mcore: vision_tower."

MCORE_ATTENTION = """
logical  mcore: decoder.layers.{i}.
q        self_attention.linear_qkv.weight#0/k (h p r) d
k        self_attention.linear_qkv.weight#1/k (k p r) d
v        self_attention.linear_qkv.weight#2/k
o        self_attention.linear_proj.weight
norm_1   self_attention.linear_qkv.layer_norm_weight
"""

MCORE = _megatron.put_under(
    "language_model.",
    llama2.MCORE_BEFORE,
    MCORE_ATTENTION,
    llama2.MCORE_FEED_FORWARD,
    llama2.MCORE_AFTER,
)

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
    layouts=(*mistral3.FAMILY.layouts, "mcore"),
    tables=(
        *(table.replace(*TOWER).replace(*ADAPTER) for table in mistral3.FAMILY.tables),
        *MCORE,
    ),
    composite={**pixtral.FAMILY.composite, "h": ("k", "q")},
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "mistral3", "text_config.model_type": "ministral3"},),
    params_signs=({"vision_encoder": PRESENT, "yarn": PRESENT},),
    megatron=_megatron.MINISTRAL3_VISION,
    params=STYLE,
    presets=(({}, {"text_config": ministral3.BEYOND_PARAMS}),),
)
