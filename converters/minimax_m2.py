"""MiniMax M2 to M2.7: queries and keys normalized over all heads, experts with a correction bias.

Sources: transformers' ``modeling_minimax_m2.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5), vLLM's ``minimax_m2.py``, mlx-lm's ``minimax.py``,
Megatron-Bridge's ``minimax_m2_bridge.py`` (0.6, ``mcore``). The first part of each head rotates by
halves, so no axis is reordered.
"""

from ckptctl.planner.layouts import BLOCK_AXES, SIZES, Companion, Family, Tie

from . import _hf, _megatron, _proofs, qwen2_moe

LAYER = """
logical      axes     hf: model.layers.{i}.                     hf-v5: model.layers.{i}.
norm_1       d        input_layernorm.weight                    input_layernorm.weight
q            (h e) d  self_attn.q_proj.weight                   self_attn.q_proj.weight
q_norm       (h e)    self_attn.q_norm.weight                   self_attn.q_norm.weight
k            (k e) d  self_attn.k_proj.weight                   self_attn.k_proj.weight
k_norm       (k e)    self_attn.k_norm.weight                   self_attn.k_norm.weight
v            (k e) d  self_attn.v_proj.weight                   self_attn.v_proj.weight
o            d (h e)  self_attn.o_proj.weight                   self_attn.o_proj.weight
norm_2       d        post_attention_layernorm.weight           post_attention_layernorm.weight
router       x d      block_sparse_moe.gate.weight              mlp.gate.weight
router_bias  x        block_sparse_moe.e_score_correction_bias  mlp.e_score_correction_bias
expert_w1    x f d    block_sparse_moe.experts.{x}.w1.weight    mlp.experts.gate_up_proj#0.1
expert_w3    x f d    block_sparse_moe.experts.{x}.w3.weight    mlp.experts.gate_up_proj#1.1
expert_w2    x d f    block_sparse_moe.experts.{x}.w2.weight    mlp.experts.down_proj
"""

MLX = """
logical    mlx: model.layers.{i}.block_sparse_moe.
expert_w1  switch_mlp.gate_proj.weight
expert_w3  switch_mlp.up_proj.weight
expert_w2  switch_mlp.down_proj.weight
"""

MCORE = """
logical      mcore: decoder.layers.{i}.
norm_1       self_attention.linear_qkv.layer_norm_weight
q            self_attention.linear_qkv.weight#0/k
q_norm       self_attention.q_layernorm.weight
k            self_attention.linear_qkv.weight#1/k
k_norm       self_attention.k_layernorm.weight
v            self_attention.linear_qkv.weight#2/k
o            self_attention.linear_proj.weight
norm_2       pre_mlp_layernorm.weight
router       mlp.router.weight
router_bias  mlp.router.expert_bias
expert_w1    mlp.experts.experts.linear_fc1.weight#0.1
expert_w3    mlp.experts.experts.linear_fc1.weight#1.1
expert_w2    mlp.experts.experts.linear_fc2.weight
"""

FAMILY = Family(
    name="minimax_m2",
    title="MiniMax M2, M2.1, M2.5, M2.7",
    layouts=("hf", "hf-v5", "mlx", "mcore"),
    tables=(_hf.BEFORE_V5, LAYER, MLX, _hf.AFTER_V5, *qwen2_moe.MCORE_ENDS, MCORE),
    architecture="MiniMaxM2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    composite={"h": ("k", "q")},
    companions=(Companion({"hf": (".weight", ".weight_scale_inv")}),),
    free=BLOCK_AXES,
    pinned=("router_bias",),
    sizes={**SIZES, "x": ("num_local_experts", "")},
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "minimax_m2"},),
    megatron=_megatron.MINIMAX_M2,
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, x=4, i=2, down=4, across=8),
)
