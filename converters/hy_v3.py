"""Hunyuan 3: GLM-4.5's tensors under other names, MTP layers.

MTP layers are numbered after all others. The input of ``eh_proj`` is the embedding, then the hidden
state.

Sources: transformers' ``modeling_hy_v3.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5, without MTP layers), vLLM's ``hy_v3_mtp.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, LayerKind

from . import _hf, _proofs, deepseek_v3, glm4_moe, qwen2_moe

O_BIAS = """
o_bias?  d  self_attn.o_proj.bias
"""

NAMES = """
logical      hf: model.layers.{i}.mlp.
router       router.gate.weight
router_bias  expert_bias
shared_w1    shared_mlp.gate_proj.weight
shared_w3    shared_mlp.up_proj.weight
shared_w2    shared_mlp.down_proj.weight
"""

V5 = """
logical      hf-v5: model.layers.{i}.
router_bias  mlp.e_score_correction_bias
"""

LAYER = glm4_moe.LAYER.replace("?qk ", "    ") + O_BIAS

FAMILY: Family = replace(
    glm4_moe.FAMILY,
    name="hy_v3",
    title="Hunyuan 3",
    aliases=("hunyuan_v3",),
    layouts=("hf", "hf-v5"),
    tables=(
        _hf.BEFORE_V5,
        LAYER,
        NAMES,
        V5,
        qwen2_moe.PACKED,
        deepseek_v3.MTP.replace("shared_head.norm.weight", "final_layernorm.weight"),
        LAYER.replace("hf, hf-v5:", "hf:").replace("{i}", "{j}"),
        NAMES.replace("{i}", "{j}"),
        _hf.AFTER_V5,
    ),
    architecture="HYV3ForCausalLM",
    drops=(),
    formulas=(("s", "num_shared_experts * moe_intermediate_size"), ("dd", "2 * hidden_size")),
    kinds=(
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("dense", first="first_k_dense_replace"),
    ),
    sizes=dict(glm4_moe.FAMILY.sizes) | {"x": ("num_experts", "")},
    proofs=_proofs.get_proofs("hf", "hf-v5"),
    shown_by=("router",),
    config_signs=({"model_type": "hy_v3"},),
    megatron=None,
)
