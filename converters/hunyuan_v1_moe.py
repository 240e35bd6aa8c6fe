"""Hunyuan A13B: attention as in dense Hunyuan, experts and a shared network in every layer.

Source: transformers' ``modeling_hunyuan_v1_moe.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _hf, _proofs, granitemoe, qwen2_moe

EXPERTS = """
q_norm     e      self_attn.query_layernorm.weight
k_norm     e      self_attn.key_layernorm.weight
router     x d    mlp.gate.wg.weight
expert_w1  x m d  mlp.experts.{x}.gate_proj.weight
expert_w3  x m d  mlp.experts.{x}.up_proj.weight
expert_w2  x d m  mlp.experts.{x}.down_proj.weight
shared_w1  m d    mlp.shared_mlp.gate_proj.weight
shared_w3  m d    mlp.shared_mlp.up_proj.weight
shared_w2  d m    mlp.shared_mlp.down_proj.weight
"""

FAMILY: Family = replace(
    granitemoe.FAMILY,
    name="hunyuan_v1_moe",
    title="Hunyuan A13B",
    aliases=("hunyuan_a13b",),
    layouts=("hf", "hf-v5"),
    tables=(
        _hf.BEFORE,
        qwen2_moe.LAYER + granitemoe.NORMS + EXPERTS,
        qwen2_moe.PACKED,
        _hf.AFTER,
    ),
    architecture="HunYuanMoEV1ForCausalLM",
    sizes=dict(granitemoe.FAMILY.sizes) | {"x": ("num_experts", "")},
    stack_schemes=(),
    proofs=_proofs.get_proofs("hf", "hf-v5"),
    config_signs=({"model_type": "hunyuan_v1_moe"},),
)
