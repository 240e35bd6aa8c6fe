"""Laguna: gates on the output of attention, layers with different numbers of heads; experts.

Sources: transformers' ``modeling_laguna.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5), mlx-lm's ``laguna.py``.
"""

from ckptctl.planner.layouts import SIZES, Family, LayerKind, LayerSize, Tie

from . import _hf, _proofs, granitemoe, qwen2_moe

REST = """
q_norm           e    self_attn.q_norm.weight
k_norm           e    self_attn.k_norm.weight
gate             g d  self_attn.g_proj.weight
router_bias@moe  x    mlp.experts.e_score_correction_bias
shared_w1@moe    s d  mlp.shared_expert.gate_proj.weight
shared_w3@moe    s d  mlp.shared_expert.up_proj.weight
shared_w2@moe    d s  mlp.shared_expert.down_proj.weight
"""

V5 = """
logical      hf-v5: model.layers.{i}.mlp.
router_bias  gate.e_score_correction_bias
shared_w1    shared_experts.gate_proj.weight
shared_w3    shared_experts.up_proj.weight
shared_w2    shared_experts.down_proj.weight
"""

MLX = """
logical      mlx: model.layers.{i}.mlp.
router       gate.proj.weight
router_bias  gate.e_score_correction_bias
"""

FAMILY = Family(
    name="laguna",
    title="Laguna",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        _hf.BEFORE,
        qwen2_moe.LAYER + qwen2_moe.FEED_FORWARD + granitemoe.NORMS + REST,
        V5,
        qwen2_moe.PACKED,
        MLX,
        qwen2_moe.MLX,
        _hf.AFTER,
    ),
    like={"hf-v5": "hf"},
    architecture="LagunaForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("dense", "moe"),),
    pinned=("router_bias",),
    kinds=(LayerKind("dense", kinds=("mlp_layer_types", "dense")),),
    free=("h", "g"),
    layer_sizes=(LayerSize("h", "num_attention_heads", listed="num_attention_heads_per_layer"),),
    sizes={
        **{axis: SIZES[axis] for axis in "vdfkei"},
        "x": ("num_experts", ""),
        "m": ("moe_intermediate_size", ""),
        "s": ("shared_expert_intermediate_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    shown_by=("router",),
    config_signs=({"model_type": "laguna"},),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, g=7, x=3, m=10, s=14, i=2),
)
