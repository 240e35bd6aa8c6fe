"""Gemma, Gemma 1.1, CodeGemma: Llama's model with an explicit head dimension and tied embeddings.

All layouts except GGUF store ``w`` of a norm that multiplies by ``1 + w`` (Megatron-Core calls it
``layernorm_zero_centered_gamma``). All layouts store embeddings before the model scales them.

Sources: transformers' ``modeling_gemma.py`` (rotates halves), torchtune's ``models/gemma`` (rotates
pairs) and ``models/convert_weights.py``, Megatron-Bridge's ``models/gemma`` (``mcore``).
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _megatron, _proofs, llama2, qwen2

LAYER = """
logical     axes       hf: model.layers.{i}.              torchtune: layers.{i}.
q           (h r p) d  self_attn.q_proj.weight (h p r) d  attn.q_proj.weight
q_bias?qkv  (h r p)    self_attn.q_proj.bias (h p r)      -
k           (k r p) d  self_attn.k_proj.weight (k p r) d  attn.k_proj.weight
k_bias?qkv  (k r p)    self_attn.k_proj.bias (k p r)      -
v           (k e) d    self_attn.v_proj.weight            attn.v_proj.weight
v_bias?qkv  (k e)      self_attn.v_proj.bias              -
o           d (h e)    self_attn.o_proj.weight            attn.output_proj.weight
o_bias?     d          self_attn.o_proj.bias              -
w1          f d        mlp.gate_proj.weight               mlp.w1.weight
w3          f d        mlp.up_proj.weight                 mlp.w3.weight
w2          d f        mlp.down_proj.weight               mlp.w2.weight
norm_1      d          input_layernorm.weight             sa_norm.scale
norm_2      d          post_attention_layernorm.weight    mlp_norm.scale
"""

GGUF_LAYER = """
logical  gguf: blk.{i}.
q        attn_q.weight (h p r) d
k        attn_k.weight (k p r) d
v        attn_v.weight
o        attn_output.weight
w1       ffn_gate.weight
w3       ffn_up.weight
w2       ffn_down.weight
norm_1   attn_norm.weight+1
norm_2   ffn_norm.weight+1
"""

GGUF_NORM = """
logical  gguf
norm     output_norm.weight+1
"""

GGUF = (*llama2.GGUF_ENDS, GGUF_LAYER, GGUF_NORM)

MCORE = (
    llama2.MCORE_BEFORE,
    llama2.MCORE_ATTENTION,
    llama2.MCORE_FEED_FORWARD,
    llama2.MCORE_AFTER,
)

FAMILY = Family(
    name="gemma",
    title="Gemma, Gemma 1.1, CodeGemma",
    aliases=("gemma1", "codegemma"),
    layouts=("hf", "torchtune", "mlx", "gguf", "mcore"),
    tables=(qwen2.BEFORE, LAYER, qwen2.AFTER, *GGUF, *MCORE),
    architecture="GemmaForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    constants={"p": 2},
    composite={"h": ("k", "q"), "e": ("r", "p")},
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "torchtune", "mlx"),
    sources={"mcore": "Megatron-Bridge", "gguf": "llama.cpp"},
    config_signs=({"model_type": "gemma"},),
    megatron=_megatron.GEMMA1,
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=4, i=2),
)
