"""InternVL 2.5 to 3.5 in transformers' format: InternViT with Qwen 2.5, Qwen 3 or another model.

The larger InternViT has no biases in its attention, and norms of queries and keys. Files that
InternVL's own code reads (``internvl_chat``) have other names.

Sources: as for ``llava``, and transformers' ``modeling_internvl.py``, mlx-vlm's
``models/internvl``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import CHOSEN, Demand, Family

from . import llava

VISION = """
logical            axes           hf: vision_tower.
vision_class       one single vd  embeddings.cls_token
vision_position    one vp vd      embeddings.position_embeddings
vision_patch       vd vc ph pw    embeddings.patch_embeddings.projection.weight
vision_patch_bias  vd             embeddings.patch_embeddings.projection.bias
"""

VISION_LAYER = """
logical                     axes   hf: vision_tower.encoder.layer.{j}.
vision_scale_1              vd     lambda_1
vision_scale_2              vd     lambda_2
vision_q                    va vd  attention.q_proj.weight
vision_q_bias?vision_qkv    va     attention.q_proj.bias
vision_k                    va vd  attention.k_proj.weight
vision_k_bias?vision_qkv    va     attention.k_proj.bias
vision_v                    va vd  attention.v_proj.weight
vision_v_bias?vision_qkv    va     attention.v_proj.bias
vision_q_norm?vision_qk     va     attention.q_norm.weight
vision_k_norm?vision_qk     va     attention.k_norm.weight
vision_o                    vd va  attention.projection_layer.weight
vision_o_bias               vd     attention.projection_layer.bias
vision_w1                   vf vd  mlp.fc1.weight
vision_w1_bias              vf     mlp.fc1.bias
vision_w2                   vd vf  mlp.fc2.weight
vision_w2_bias              vd     mlp.fc2.bias
vision_norm_1               vd     layernorm_before.weight
vision_norm_1_bias?centered  vd     layernorm_before.bias
vision_norm_2               vd     layernorm_after.weight
vision_norm_2_bias?centered  vd     layernorm_after.bias
"""

PROJECTOR = """
logical            axes  hf: multi_modal_projector.
merger_norm        u     layer_norm.weight
merger_norm_bias   u     layer_norm.bias
adapter_w1         a u   linear_1.weight
adapter_w1_bias    a     linear_1.bias
adapter_w2         d a   linear_2.weight
adapter_w2_bias    d     linear_2.bias
"""

MLX = """
logical       mlx: vision_tower.
vision_patch  embeddings.patch_embeddings.projection.weight vd ph pw vc
"""

FAMILY: Family = replace(
    llava.FAMILY,
    name="internvl",
    title="InternVL 2.5, 3, 3.5",
    aliases=("internvl2_5", "internvl3", "internvl3_5"),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(VISION, VISION_LAYER, PROJECTOR, llava.ENDS, llava.TEXT_LAYER, MLX),
    like={"hf-v5": "hf"},
    architecture="InternVLForConditionalGeneration",
    constants={"one": 1, "single": 1, "vc": 3},
    demands=(
        *llava.FAMILY.demands,
        Demand(("vision_qkv",), {"vision_config.attention_bias": CHOSEN}),
        Demand(("vision_qk",), {"vision_config.use_qk_norm": CHOSEN}),
        Demand(("centered",), {"vision_config.norm_type": "layer_norm"}),
    ),
    formulas=llava.FAMILY.formulas[1:],
    sizes={axis: names for axis, names in llava.FAMILY.sizes.items() if axis not in ("ph", "pw")},
    proofs={name: proof for name, proof in llava.FAMILY.proofs.items() if name != "hf-fresh"},
    config_signs=({"model_type": "internvl"},),
    tiny={**llava.FAMILY.tiny, "u": 40},
)
