"""GLM-4 0414 and Z1: four norms per layer.

RoPE rotates neighboring pairs of half of each head, also in ``mcore`` (``rotary_interleaved``).

Sources: transformers' ``modeling_glm4.py`` (``gate_up_proj``: gate, up), slime's
``megatron_to_hf/glm4.py`` (``mcore``; Megatron-Core itself has no norms after attention and
feed-forward, slime and mbridge add them).
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _hf, _megatron, _proofs, llama2, qwen2

LAYER = """
logical      axes     hf: model.layers.{i}.
norm_1       d        input_layernorm.weight
q            (h e) d  self_attn.q_proj.weight
q_bias?qkv   (h e)    self_attn.q_proj.bias
k            (k e) d  self_attn.k_proj.weight
k_bias?qkv   (k e)    self_attn.k_proj.bias
v            (k e) d  self_attn.v_proj.weight
v_bias?qkv   (k e)    self_attn.v_proj.bias
o            d (h e)  self_attn.o_proj.weight
norm_1_post  d        post_self_attn_layernorm.weight
norm_2       d        post_attention_layernorm.weight
w1           f d      mlp.gate_up_proj.weight#0
w3           f d      mlp.gate_up_proj.weight#1
w2           d f      mlp.down_proj.weight
norm_2_post  d        post_mlp_layernorm.weight
"""

MCORE_NORMS = """
logical      mcore: decoder.layers.{i}.
norm_1_post  post_self_attn_layernorm.weight
norm_2_post  post_mlp_layernorm.weight
"""

FAMILY = Family(
    name="glm4",
    title="GLM-4 0414, GLM-Z1",
    layouts=("hf", "mlx", "mcore"),
    tables=(
        _hf.BEFORE,
        LAYER,
        _hf.AFTER,
        llama2.MCORE_BEFORE,
        qwen2.MCORE_ATTENTION,
        qwen2.MCORE_FEED_FORWARD,
        MCORE_NORMS,
        llama2.MCORE_AFTER,
    ),
    architecture="Glm4ForCausalLM",
    ties=(Tie("output", of="embed"),),
    composite={"h": ("k", "q")},
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "mlx"),
    sources={"mcore": "slime"},
    config_signs=({"model_type": "glm4"},),
    megatron=_megatron.GLM4,
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2),
)
