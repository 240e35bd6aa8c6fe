"""Qwen 3 with experts: 30B-A3B, 235B-A22B, Coder.

config.json may make some layers dense (``decoder_sparse_step``, ``mlp_only_layers``).

Sources: transformers' ``modeling_qwen3_moe.py`` and ``conversion_mapping.py``, torchtitan's
``models/qwen3/state_dict_adapter.py`` and ``models/common/moe.py`` (0.3.0; 0.2.2:
``models/moe/moe.py``), Megatron-Bridge's ``qwen3_moe_bridge.py`` (``mcore``).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Drop, Family, Tie

from . import _hf, _megatron, llama2, qwen2, qwen2_moe, qwen3

ATTENTION = """
o_bias?  d  self_attn.o_proj.bias
q_norm   e  self_attn.q_norm.weight
k_norm   e  self_attn.k_norm.weight
"""

TITAN_EXPERTS = """
logical    torchtitan@0.3: layers.{i}.
router     moe.router.gate.weight
expert_w1  moe.routed_experts.inner_experts.w1_EFD
expert_w3  moe.routed_experts.inner_experts.w3_EFD
expert_w2  moe.routed_experts.inner_experts.w2_EDF
"""

TITAN_02_EXPERTS = """
logical    torchtitan@0.2: layers.{i}.
expert_w1  moe.experts.w1
expert_w3  moe.experts.w3
expert_w2  moe.experts.w2
"""

TITAN_NORM = """
logical     torchtitan@0.3: layers.{i}.
norm_2_moe  ffn_norm.weight
"""

GGUF_EXPERTS = """
logical     gguf: blk.{i}.
norm_2_moe  ffn_norm.weight
router      ffn_gate_inp.weight
expert_w1   ffn_gate_exps.weight
expert_w3   ffn_up_exps.weight
expert_w2   ffn_down_exps.weight
"""

MCORE_NORMS = """
logical  mcore: decoder.layers.{i}.
q_norm   self_attention.q_layernorm.weight
k_norm   self_attention.k_layernorm.weight
"""

BALANCE = "Qwen 3 routes without a bias for load balancing"

FAMILY: Family = replace(
    qwen2_moe.FAMILY,
    name="qwen3_moe",
    title="Qwen 3 MoE",
    aliases=("qwen3_coder",),
    layouts=(
        "hf",
        "hf-v5",
        "torchtitan@0.3",
        "torchtitan@0.2",
        "mlx",
        "gguf",
        "mcore",
        "mcore-local",
    ),
    tables=(
        _hf.BEFORE,
        qwen2_moe.LAYER + ATTENTION + qwen2_moe.FEED_FORWARD + qwen2_moe.NORMS,
        _hf.AFTER,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        *llama2.GGUF,
        llama2.GGUF_OUTPUT_BIAS,
        qwen3.GGUF_NORMS,
        GGUF_EXPERTS,
        *qwen3.TITAN,
        qwen3.TITAN_FEED_FORWARD,
        TITAN_NORM,
        TITAN_EXPERTS,
        TITAN_02_EXPERTS,
        *qwen2_moe.MCORE_ENDS,
        qwen2.MCORE_ATTENTION,
        MCORE_NORMS,
        qwen2_moe.MCORE_FEED_FORWARD,
        qwen2_moe.MCORE_LOCAL,
    ),
    like={**qwen2_moe.FAMILY.like, **qwen3.FAMILY.like},
    architecture="Qwen3MoeForCausalLM",
    drops=(
        Drop(
            "torchtitan@0.3",
            "layers.{i}.moe.expert_bias_E",
            BALANCE,
            zeros="x",
            next_to="router",
        ),
        Drop("torchtitan@0.2", "layers.{i}.moe.expert_bias", BALANCE, zeros="x", next_to="router"),
    ),
    ties=(Tie("output", of="embed", stored_in=("hf-v5", "torchtitan@0.3", "torchtitan@0.2")),),
    constants={},
    sizes={
        **{axis: names for axis, names in qwen2_moe.FAMILY.sizes.items() if axis != "s"},
        "x": ("num_experts|num_local_experts", ""),
    },
    proofs={**qwen2_moe.FAMILY.proofs, **qwen3.FAMILY.proofs},
    config_signs=({"model_type": "qwen3_moe"},),
    megatron=_megatron.QWEN3_MOE,
)
