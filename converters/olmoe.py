"""OLMoE 1B-7B: experts in every layer, queries and keys normalized over all heads.

Sources: transformers' ``modeling_olmoe.py``, ``conversion_mapping.py`` (``hf-v5``: in-memory names
of transformers 5) and ``convert_olmoe_weights_to_hf.py`` (``olmo``: ``model.pt`` with megablocks'
experts, whose rows follow one another, ``w2`` transposed); ai2's ``olmo/model.py``;
Megatron-Bridge's ``olmoe_provider.py`` (``mcore``), which normalizes all heads together. All
programs rotate halves, so no axis is reordered.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _megatron, _proofs, mixtral, qwen2, qwen2_moe, qwen3_moe

BEFORE = """
logical  axes  hf, hf-v5                  olmo
embed    v d   model.embed_tokens.weight  transformer.wte.weight
"""

LAYER = """
logical     axes     hf, hf-v5: model.layers.{i}.      olmo: transformer.blocks.{i}.
norm_1      d        input_layernorm.weight            attn_norm.weight
q           (h e) d  self_attn.q_proj.weight           att_proj.weight#0
k           (k e) d  self_attn.k_proj.weight           att_proj.weight#1
v           (k e) d  self_attn.v_proj.weight           att_proj.weight#2
q_bias?qkv  (h e)    self_attn.q_proj.bias             att_proj.bias#0
k_bias?qkv  (k e)    self_attn.k_proj.bias             att_proj.bias#1
v_bias?qkv  (k e)    self_attn.v_proj.bias             att_proj.bias#2
q_norm      (h e)    self_attn.q_norm.weight           q_norm.weight
k_norm      (k e)    self_attn.k_norm.weight           k_norm.weight
o           d (h e)  self_attn.o_proj.weight           attn_out.weight
o_bias?     d        self_attn.o_proj.bias             attn_out.bias
norm_2      d        post_attention_layernorm.weight   ff_norm.weight
router      x d      mlp.gate.weight                   ffn.router.layer.weight
expert_w1   x f d    mlp.experts.{x}.gate_proj.weight  ffn.experts.mlp.w1 (x f) d
expert_w3   x f d    mlp.experts.{x}.up_proj.weight    ffn.experts.mlp.v1 (x f) d
expert_w2   x d f    mlp.experts.{x}.down_proj.weight  ffn.experts.mlp.w2 (x f) d
"""

AFTER = """
logical  axes  hf, hf-v5          olmo
norm     d     model.norm.weight  transformer.ln_f.weight
output   v d   lm_head.weight     transformer.ff_out.weight
"""

MCORE = """
logical    mcore: decoder.layers.{i}.
norm_2     pre_mlp_layernorm.weight
router     mlp.router.weight
expert_w1  mlp.experts.experts.linear_fc1.weight#0.1
expert_w3  mlp.experts.experts.linear_fc1.weight#1.1
expert_w2  mlp.experts.experts.linear_fc2.weight
"""

FAMILY = Family(
    name="olmoe",
    title="OLMoE 1B-7B",
    layouts=("hf", "hf-v5", "olmo", "mlx", "mcore", "mcore-local"),
    tables=(
        BEFORE,
        LAYER,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        AFTER,
        *qwen2_moe.MCORE_ENDS,
        qwen2.MCORE_ATTENTION,
        qwen3_moe.MCORE_NORMS,
        MCORE,
        mixtral.MCORE_LOCAL,
    ),
    like={"mcore-local": "mcore"},
    architecture="OlmoeForCausalLM",
    ties=(Tie("output", of="embed"),),
    composite={"h": ("k", "q")},
    sizes={**SIZES, "x": ("num_experts", "")},
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", "mcore", "mcore-local"),
    config_signs=({"model_type": "olmoe"},),
    megatron=_megatron.OLMOE,
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, x=4, i=2),
)
