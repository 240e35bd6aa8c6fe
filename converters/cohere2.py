"""Cohere's Command R7B and Command A: parallel attention and feed-forward after one norm.

RoPE rotates neighboring pairs. The embeddings are always tied.

Source: transformers' ``modeling_cohere2.py``.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _hf, _proofs

ATTENTION = """
logical     axes     hf: model.layers.{i}.
norm_1      d        input_layernorm.weight
q           (h e) d  self_attn.q_proj.weight
q_bias?qkv  (h e)    self_attn.q_proj.bias
k           (k e) d  self_attn.k_proj.weight
k_bias?qkv  (k e)    self_attn.k_proj.bias
v           (k e) d  self_attn.v_proj.weight
v_bias?qkv  (k e)    self_attn.v_proj.bias
o           d (h e)  self_attn.o_proj.weight
o_bias?     d        self_attn.o_proj.bias
"""

FEED_FORWARD = """
w1          f d      mlp.gate_proj.weight
w3          f d      mlp.up_proj.weight
w2          d f      mlp.down_proj.weight
"""

FAMILY = Family(
    name="cohere2",
    title="Command R7B, Command A",
    aliases=("command_r7b", "command_a"),
    layouts=("hf", "mlx"),
    tables=(_hf.BEFORE, ATTENTION + FEED_FORWARD, _hf.AFTER),
    architecture="Cohere2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "cohere2"},),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2),
)
