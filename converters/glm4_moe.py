"""GLM-4.5, 4.5-Air, 4.6: experts and MTP layers.

Sources: transformers' ``modeling_glm4_moe.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5, without MTP layers), Megatron-Bridge's ``glm45_bridge.py`` (``mcore``). In
``hf``, MTP layers repeat the embedding and the head. All programs rotate halves.
"""

from ckptctl.planner.layouts import SIZES, Family, LayerKind, Tie

from . import _hf, _megatron, _proofs, deepseek_v3, qwen2, qwen2_moe, qwen3_moe

LAYER = """
logical          axes     hf, hf-v5: model.layers.{i}.
norm_1           d        input_layernorm.weight
q                (h e) d  self_attn.q_proj.weight
q_bias?qkv       (h e)    self_attn.q_proj.bias
k                (k e) d  self_attn.k_proj.weight
k_bias?qkv       (k e)    self_attn.k_proj.bias
v                (k e) d  self_attn.v_proj.weight
v_bias?qkv       (k e)    self_attn.v_proj.bias
q_norm?qk        e        self_attn.q_norm.weight
k_norm?qk        e        self_attn.k_norm.weight
o                d (h e)  self_attn.o_proj.weight
norm_2@dense     d        post_attention_layernorm.weight
norm_2_moe@moe   d        post_attention_layernorm.weight
w1@dense         f d      mlp.gate_proj.weight
w3@dense         f d      mlp.up_proj.weight
w2@dense         d f      mlp.down_proj.weight
router@moe       x d      mlp.gate.weight
router_bias@moe  x        mlp.gate.e_score_correction_bias
expert_w1@moe    x m d    mlp.experts.{x}.gate_proj.weight
expert_w3@moe    x m d    mlp.experts.{x}.up_proj.weight
expert_w2@moe    x d m    mlp.experts.{x}.down_proj.weight
shared_w1@moe    s d      mlp.shared_experts.gate_proj.weight
shared_w3@moe    s d      mlp.shared_experts.up_proj.weight
shared_w2@moe    d s      mlp.shared_experts.down_proj.weight
"""

MTP_LAYER = LAYER.replace("hf, hf-v5:", "hf:").replace("{i}", "{j}")

MCORE_LAYER = (
    qwen2.MCORE_ATTENTION,
    qwen3_moe.MCORE_NORMS,
    qwen2_moe.MCORE_FEED_FORWARD,
    qwen2_moe.MCORE_LOCAL,
    qwen2_moe.MCORE_SHARED,
    deepseek_v3.MCORE_CORRECTION,
)

FAMILY = Family(
    name="glm4_moe",
    title="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    layouts=("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    tables=(
        _hf.BEFORE_V5,
        LAYER,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        deepseek_v3.MTP,
        MTP_LAYER,
        _hf.AFTER_V5,
        *qwen2_moe.MCORE_ENDS,
        *MCORE_LAYER,
        deepseek_v3.MCORE_MTP,
        *(table.replace(*deepseek_v3.IN_MTP) for table in MCORE_LAYER),
    ),
    like={"mcore-local": "mcore", "mlx": "hf-v5"},
    architecture="Glm4MoeForCausalLM",
    drops=deepseek_v3.REPEATED,
    ties=(Tie("output", of="embed"),),
    pinned=("router_bias",),
    unquantized=("eh_proj",),
    variants=(("dense", "moe"),),
    composite={"h": ("k", "q")},
    shifts=deepseek_v3.FAMILY.shifts,
    formulas=(
        ("s", "n_shared_experts * moe_intermediate_size"),
        ("dd", "2 * hidden_size"),
    ),
    kinds=(LayerKind("dense", first="first_k_dense_replace"),),
    sizes={**SIZES, "m": ("moe_intermediate_size", ""), "x": ("n_routed_experts", "")},
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    config_signs=({"model_type": "glm4_moe"},),
    megatron=_megatron.GLM4_MOE,
    tiny=dict(v=24, d=16, f=12, m=6, s=10, h=8, k=4, e=4, x=4, dd=32, i=2),
)
