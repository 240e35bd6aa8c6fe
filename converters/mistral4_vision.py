"""Mistral Small 4: the vision tower of Mistral Small 3.1 with Mistral 4's text model.

Sources: transformers' ``modeling_mistral3.py``, ``modeling_mistral4.py`` and
``convert_mistral4_weight_to_hf.py``, its ``conversion_mapping.py`` (``hf-v5``: in-memory names of
transformers 5).
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Family, ParamsStyle, Tie

from . import _llm_compressor, _proofs, mistral3, mistral4, pixtral

PLAIN = "hf: model.layers"

STYLE: ParamsStyle = replace(
    mistral4.STYLE, within="text_config", around=mistral3.STYLE.around, silent=pixtral.STYLE.silent
)

FAMILY: Family = replace(
    mistral4.FAMILY,
    name="mistral4_vision",
    title="Mistral Small 4",
    aliases=("mistral_small_4",),
    refines="mistral3",
    layouts=("hf", "hf-v5", "llm-compressor", "mistral"),
    tables=(
        pixtral.PATCHES,
        pixtral.VISION,
        pixtral.ADAPTER,
        mistral3.MERGER,
        pixtral.BEFORE,
        mistral4.LAYER.replace(PLAIN, "hf: language_model.model.layers"),
        mistral4.LAYER.replace(PLAIN, "hf-v5: model.language_model.layers"),
        _llm_compressor.build_table("language_model.model.layers.{i}.mlp.experts"),
        pixtral.AFTER,
    ),
    architecture="Mistral3ForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    constants={"p": 2},
    composite={"ve": ("vr", "p")},
    formulas=(
        *pixtral.FAMILY.formulas,
        ("qk", "text_config.qk_nope_head_dim + text_config.qk_rope_head_dim"),
        ("kr", "text_config.kv_lora_rank + text_config.qk_rope_head_dim"),
        ("s", "text_config.n_shared_experts * text_config.moe_intermediate_size"),
    ),
    kinds=tuple(kind.with_prefix("text_config") for kind in mistral4.FAMILY.kinds),
    sizes={
        **{axis: ("text_config." + n[0], n[1]) for axis, n in mistral4.SIZES.items()},
        **{axis: n for axis, n in pixtral.FAMILY.sizes.items() if axis not in (*"vdfhkei",)},
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "llm-compressor"),
    config_signs=({"model_type": "mistral3", "text_config.model_type": "mistral4"},),
    params_signs=({"kv_lora_rank": PRESENT, "vision_encoder": PRESENT},),
    params=STYLE,
    tiny=dict(mistral4.FAMILY.tiny, vd=20, vf=28, vh=2, ve=10, vc=3, ph=5, pw=5, j=3, a=18, u=80),
)
