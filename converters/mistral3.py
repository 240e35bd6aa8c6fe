"""Mistral Small 3.1 and 3.2: Pixtral's vision tower with a merger of patches.

Sources: transformers' ``modeling_mistral3.py`` and ``convert_mistral3_weights_to_hf.py``, its
``conversion_mapping.py`` (``hf-v5``: in-memory names of transformers 5), mistral-inference's
``transformer.py``, mlx-vlm's ``models/mistral3`` (``mlx``). Ministral 3 has the same tensors and
another text model.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Fact, Family, ParamsStyle, Rule, Tie

from . import _proofs, mistral, pixtral

MERGER = """
logical      axes  hf: multi_modal_projector.         hf-v5: model.multi_modal_projector.  mistral
merger_norm  vd    norm.weight                        norm.weight                          pre_mm_projector_norm.weight
merger       vd u  patch_merger.merging_layer.weight  patch_merger.merging_layer.weight    patch_merger.merging_layer.weight
"""  # noqa: E501

MLX = """
logical       mlx: vision_tower.vision_model.
vision_patch  patch_conv.weight vd ph pw vc
vision_pre    ln_pre.weight
"""

MLX_LAYER = """
logical        mlx: vision_tower.vision_model.transformer.layers.{j}.
vision_q       attention.q_proj.weight (vh p vr) vd
vision_k       attention.k_proj.weight (vh p vr) vd
vision_v       attention.v_proj.weight
vision_o       attention.o_proj.weight
vision_w1      feed_forward.gate_proj.weight
vision_w3      feed_forward.up_proj.weight
vision_w2      feed_forward.down_proj.weight
vision_norm_1  attention_norm.weight
vision_norm_2  ffn_norm.weight
"""

STYLE: ParamsStyle = replace(
    pixtral.STYLE,
    around=(
        *pixtral.VISION_FACTS,
        replace(pixtral.BIASED, default=False, absent=False),
        Fact("spatial_merge_size", "vision_encoder.spatial_merge_size", "count", default=2),
    ),
    around_rules=(Rule("model_type", ("mistral3",), "it is Mistral 3"), *pixtral.VISION_RULES[1:]),
    constant={
        "vision_encoder.mm_projector_id": "patch_merge",
        "vision_encoder.add_pre_mm_projector_layer_norm": True,
    },
)

FAMILY: Family = replace(
    pixtral.FAMILY,
    name="mistral3",
    title="Mistral Small 3.1, 3.2",
    aliases=("mistral_small_3_1", "mistral_small_3_2"),
    layouts=(*pixtral.FAMILY.layouts, "mlx"),
    tables=(*pixtral.FAMILY.tables, MERGER, MLX, MLX_LAYER),
    architecture="Mistral3ForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mistral", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "mistral3"},),
    params_signs=({"vision_encoder": PRESENT, "yarn": None},),
    params=STYLE,
    presets=(({}, {"text_config": mistral.BEYOND_PARAMS | {"max_position_embeddings": 131072}}),),
    tiny=dict(pixtral.FAMILY.tiny, u=80),
)
