"""DeepSeek-V2 and V2-Lite: multi-head latent attention and experts.

Sources: transformers' ``modeling_deepseek_v2.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5); Megatron-Core's ``multi_latent_attention.py``, Megatron-Bridge's
``deepseek/common.py`` (``mcore``). DeepSeek's own code (``trust_remote_code``) has the names of
``hf``. All programs rotate neighboring pairs, so no axis is reordered.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Family, LayerKind, Tie

from . import _megatron, _proofs, qwen2_moe

BEFORE = """
logical  axes  hf, hf-v5
embed    v* d  model.embed_tokens.weight
"""

LAYER = """
logical                   axes        hf, hf-v5: model.layers.{i}.
norm_1                    d           input_layernorm.weight
q@q                       (h* qk) d   self_attn.q_proj.weight
q_a@qlora                 ql d        self_attn.q_a_proj.weight
q_a_bias@qlora?attention  ql          self_attn.q_a_proj.bias
q_a_norm@qlora            ql          self_attn.q_a_layernorm.weight
q_b@qlora                 (h* qk) ql  self_attn.q_b_proj.weight
kv_a                      kr d        self_attn.kv_a_proj_with_mqa.weight
kv_a_bias?attention       kr          self_attn.kv_a_proj_with_mqa.bias
kv_a_norm                 kl          self_attn.kv_a_layernorm.weight
kv_b                      (h* kv) kl  self_attn.kv_b_proj.weight
o                         d (h* vd)   self_attn.o_proj.weight
o_bias?attention          d           self_attn.o_proj.bias
norm_2@dense              d           post_attention_layernorm.weight
norm_2_moe@moe            d           post_attention_layernorm.weight
w1@dense                  f* d        mlp.gate_proj.weight
w3@dense                  f* d        mlp.up_proj.weight
w2@dense                  d f*        mlp.down_proj.weight
router@moe                x d         mlp.gate.weight
expert_w1@moe             x* m d      mlp.experts.{x}.gate_proj.weight
expert_w3@moe             x* m d      mlp.experts.{x}.up_proj.weight
expert_w2@moe             x* d m      mlp.experts.{x}.down_proj.weight
shared_w1@moe             s* d        mlp.shared_experts.gate_proj.weight
shared_w3@moe             s* d        mlp.shared_experts.up_proj.weight
shared_w2@moe             d s*        mlp.shared_experts.down_proj.weight
"""

AFTER = """
logical  axes  hf, hf-v5
norm     d     model.norm.weight
output   v* d  lm_head.weight
"""

MCORE_LATENT = """
logical     mcore: decoder.layers.{i}.
norm_1      input_layernorm.weight
q           self_attention.linear_q_proj.weight
q_a         self_attention.linear_q_down_proj.weight
q_a_norm    self_attention.linear_q_up_proj.layer_norm_weight
q_b         self_attention.linear_q_up_proj.weight
kv_a        self_attention.linear_kv_down_proj.weight
kv_a_norm   self_attention.linear_kv_up_proj.layer_norm_weight
o           self_attention.linear_proj.weight
"""

MCORE = (
    MCORE_LATENT
    + """
kv_b        self_attention.linear_kv_up_proj.weight
"""
)

MCORE_LOCAL = """
logical     mcore-local: decoder.layers.{i}.
q_a_norm    self_attention.q_layernorm.weight
kv_a_norm   self_attention.kv_layernorm.weight
norm_2      pre_mlp_layernorm.weight
"""

MLP_BIAS = """
logical                 axes  hf, hf-v5: model.layers.{i}.
w1_bias@dense?mlp       f     mlp.gate_proj.bias
w3_bias@dense?mlp       f     mlp.up_proj.bias
w2_bias@dense?mlp       d     mlp.down_proj.bias
shared_w1_bias@moe?mlp  s     mlp.shared_experts.gate_proj.bias
shared_w3_bias@moe?mlp  s     mlp.shared_experts.up_proj.bias
shared_w2_bias@moe?mlp  d     mlp.shared_experts.down_proj.bias
"""

FAMILY = Family(
    name="deepseek_v2",
    title="DeepSeek-V2, V2-Lite",
    layouts=("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    tables=(
        BEFORE,
        LAYER,
        AFTER,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        MLP_BIAS,
        *qwen2_moe.MCORE_ENDS,
        MCORE,
        qwen2_moe.MCORE_FEED_FORWARD,
        qwen2_moe.MCORE_SHARED,
        MCORE_LOCAL,
    ),
    like={"mcore-local": "mcore"},
    architecture="DeepseekV2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(("dense", "moe"), ("q", "qlora")),
    sizes={
        **{axis: SIZES[axis] for axis in "vdf"},
        "m": ("moe_intermediate_size", ""),
        "h": ("num_attention_heads", ""),
        "x": ("n_routed_experts", ""),
        "ql": ("q_lora_rank", ""),
        "kl": ("kv_lora_rank", ""),
        "vd": ("v_head_dim", ""),
        "i": ("num_hidden_layers", ""),
    },
    formulas=(
        ("qk", "qk_nope_head_dim + qk_rope_head_dim"),
        ("kr", "kv_lora_rank + qk_rope_head_dim"),
        ("kv", "qk_nope_head_dim + v_head_dim"),
        ("s", "n_shared_experts * moe_intermediate_size"),
    ),
    kinds=(
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("dense", first="first_k_dense_replace"),
        LayerKind("qlora", {"q_lora_rank": CHOSEN}),
    ),
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    config_signs=({"model_type": "deepseek_v2"},),
    megatron=_megatron.DEEPSEEK_V2,
    tiny=dict(v=24, d=16, f=12, m=6, s=8, h=4, x=4, qk=6, ql=10, kl=5, kr=7, kv=9, vd=3, i=2),
)
