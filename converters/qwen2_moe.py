"""Qwen 1.5 MoE and Qwen 2 57B-A14B: Qwen 2 with routed experts and a shared expert.

config.json may make some layers dense (``decoder_sparse_step``, ``mlp_only_layers``).

Sources: transformers' ``modeling_qwen2_moe.py`` and its ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5); Megatron-Core's ``attention.py`` and ``moe/experts.py``,
mbridge's ``qwen2moe.py`` (``mcore``: names under Transformer Engine, which fuses norms with the
linear layer after them, except before a router; ``mcore-local``: without it).
"""

from ckptctl.planner.layouts import SIZES, Family, LayerKind, Tie

from . import _hf, _megatron, _proofs, llama2, qwen2

LAYER = """
logical     axes     hf: model.layers.{i}.
q           (h e) d  self_attn.q_proj.weight
k           (k e) d  self_attn.k_proj.weight
v           (k e) d  self_attn.v_proj.weight
o           d (h e)  self_attn.o_proj.weight
q_bias?qkv  (h e)    self_attn.q_proj.bias
k_bias?qkv  (k e)    self_attn.k_proj.bias
v_bias?qkv  (k e)    self_attn.v_proj.bias
"""

FEED_FORWARD = """
w1@dense       f d    mlp.gate_proj.weight
w3@dense       f d    mlp.up_proj.weight
w2@dense       d f    mlp.down_proj.weight
router@moe     x d    mlp.gate.weight
expert_w1@moe  x m d  mlp.experts.{x}.gate_proj.weight
expert_w3@moe  x m d  mlp.experts.{x}.up_proj.weight
expert_w2@moe  x d m  mlp.experts.{x}.down_proj.weight
"""

SHARED = """
shared_w1@moe    s d    mlp.shared_expert.gate_proj.weight
shared_w3@moe    s d    mlp.shared_expert.up_proj.weight
shared_w2@moe    d s    mlp.shared_expert.down_proj.weight
shared_gate@moe  one d  mlp.shared_expert_gate.weight
"""

NORMS = """
norm_1          d  input_layernorm.weight
norm_2@dense    d  post_attention_layernorm.weight
norm_2_moe@moe  d  post_attention_layernorm.weight
"""

PACKED = """
logical    hf-v5: model.layers.{i}.
expert_w1  mlp.experts.gate_up_proj#0.1
expert_w3  mlp.experts.gate_up_proj#1.1
expert_w2  mlp.experts.down_proj
"""

MLX = """
logical    mlx: model.layers.{i}.
expert_w1  mlp.switch_mlp.gate_proj.weight
expert_w3  mlp.switch_mlp.up_proj.weight
expert_w2  mlp.switch_mlp.down_proj.weight
"""

MCORE_ENDS = (llama2.MCORE_BEFORE, llama2.MCORE_AFTER)

MCORE_EXPERTS = """
norm_2_moe  pre_mlp_layernorm.weight
router      mlp.router.weight
expert_w1   mlp.experts.experts.linear_fc1.weight#0.1
expert_w3   mlp.experts.experts.linear_fc1.weight#1.1
expert_w2   mlp.experts.experts.linear_fc2.weight
"""

MCORE_FEED_FORWARD = qwen2.MCORE_FEED_FORWARD + MCORE_EXPERTS

MCORE_LOCAL = """
logical     mcore-local: decoder.layers.{i}.
norm_2_moe  mlp.linear_fc1.layer_norm_weight
"""

MCORE_SHARED = """
logical    mcore: decoder.layers.{i}.
shared_w1  mlp.shared_experts.linear_fc1.weight#0
shared_w3  mlp.shared_experts.linear_fc1.weight#1
shared_w2  mlp.shared_experts.linear_fc2.weight
"""

MCORE_SHARED_GATE = """
logical      mcore: decoder.layers.{i}.
shared_gate  mlp.shared_experts.gate_weight
"""

FAMILY = Family(
    name="qwen2_moe",
    title="Qwen 1.5 MoE, Qwen 2 57B-A14B",
    aliases=("qwen1_5_moe",),
    layouts=("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    tables=(
        _hf.BEFORE,
        LAYER + FEED_FORWARD + SHARED + NORMS,
        _hf.AFTER,
        PACKED,
        MLX,
        *MCORE_ENDS,
        qwen2.MCORE_ATTENTION,
        MCORE_FEED_FORWARD,
        MCORE_LOCAL,
        MCORE_SHARED,
        MCORE_SHARED_GATE,
    ),
    like={"hf-v5": "hf", "mcore-local": "mcore"},
    architecture="Qwen2MoeForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("dense", "moe"),),
    kinds=(LayerKind("moe", every="decoder_sparse_step", but="mlp_only_layers"),),
    constants={"one": 1},
    composite={"h": ("k", "q")},
    sizes={
        **{axis: SIZES[axis] for axis in "vdfhke"},
        "x": ("num_experts", ""),
        "m": ("moe_intermediate_size", ""),
        "s": ("shared_expert_intermediate_size", ""),
        "i": ("num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    config_signs=({"model_type": "qwen2_moe"},),
    megatron=_megatron.QWEN2_MOE,
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, x=4, m=10, s=14, i=2),
)
