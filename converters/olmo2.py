"""OLMo 2: norms after attention and feed-forward, queries and keys normalized over all heads.

Sources: transformers' ``modeling_olmo2.py`` and ``convert_olmo2_weights_to_hf.py`` (``olmo``: the
``model.pt`` of ai2's first trainer, in which ``ff_proj`` is up, gate), OLMo-core's
``nn/hf/convert.py`` (``olmo-core``). All of these rotate halves, so no axis is reordered.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _proofs

BEFORE = """
logical  axes  hf                         olmo-core          olmo
embed    v d   model.embed_tokens.weight  embeddings.weight  transformer.wte.weight
"""

LAYER = """
logical      axes     hf: model.layers.{i}.              olmo-core: blocks.{i}.    olmo: transformer.blocks.{i}.
q            (h e) d  self_attn.q_proj.weight            attention.w_q.weight      att_proj.weight#0
k            (k e) d  self_attn.k_proj.weight            attention.w_k.weight      att_proj.weight#1
v            (k e) d  self_attn.v_proj.weight            attention.w_v.weight      att_proj.weight#2
q_bias?qkv   (h e)    self_attn.q_proj.bias              attention.w_q.bias        att_proj.bias#0
k_bias?qkv   (k e)    self_attn.k_proj.bias              attention.w_k.bias        att_proj.bias#1
v_bias?qkv   (k e)    self_attn.v_proj.bias              attention.w_v.bias        att_proj.bias#2
q_norm       (h e)    self_attn.q_norm.weight            attention.q_norm.weight   q_norm.weight
k_norm       (k e)    self_attn.k_norm.weight            attention.k_norm.weight   k_norm.weight
o            d (h e)  self_attn.o_proj.weight            attention.w_out.weight    attn_out.weight
o_bias?      d        self_attn.o_proj.bias              attention.w_out.bias      attn_out.bias
norm_1_post  d        post_attention_layernorm.weight    attention_norm.weight     attn_norm.weight
w3           f d      mlp.up_proj.weight                 feed_forward.w3.weight    ff_proj.weight#0
w1           f d      mlp.gate_proj.weight               feed_forward.w1.weight    ff_proj.weight#1
w2           d f      mlp.down_proj.weight               feed_forward.w2.weight    ff_out.weight
norm_2_post  d        post_feedforward_layernorm.weight  feed_forward_norm.weight  ff_norm.weight
"""  # noqa: E501

AFTER = """
logical  axes  hf                 olmo-core             olmo
norm     d     model.norm.weight  lm_head.norm.weight   transformer.ln_f.weight
output   v d   lm_head.weight     lm_head.w_out.weight  transformer.ff_out.weight
"""

FAMILY = Family(
    name="olmo2",
    title="OLMo 2",
    layouts=("hf", "olmo-core", "olmo", "mlx"),
    tables=(BEFORE, LAYER, AFTER),
    architecture="Olmo2ForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("olmo-core",)),),
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "olmo-core", "olmo", "mlx"),
    config_signs=({"model_type": "olmo2"},),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2),
)
