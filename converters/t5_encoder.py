"""The encoder of T5 1.1 and later (gated feed-forward), which image generators use.

Sources: transformers' ``modeling_t5.py``, torchtune's ``models/t5/_convert_weights.py``. The first
layer contains the relative position biases of all layers.
"""

from ckptctl.planner.layouts import Family, Tie

from . import _proofs

BEFORE = """
logical    axes  hf                                                                    torchtune
shared     v d   shared.weight                                                         token_embedding.weight
embed      v d   encoder.embed_tokens.weight                                           -
positions  n h   encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight  relative_position_bias.embedding.weight
"""  # noqa: E501

LAYER = """
logical  axes     hf: encoder.block.{i}.layer.  torchtune: layers.{i}.
q        (h e) d  0.SelfAttention.q.weight      attn.q_proj.weight
k        (h e) d  0.SelfAttention.k.weight      attn.k_proj.weight
v        (h e) d  0.SelfAttention.v.weight      attn.v_proj.weight
o        d (h e)  0.SelfAttention.o.weight      attn.output_proj.weight
w1       f d      1.DenseReluDense.wi_0.weight  mlp.w1.weight
w3       f d      1.DenseReluDense.wi_1.weight  mlp.w3.weight
w2       d f      1.DenseReluDense.wo.weight    mlp.w2.weight
norm_1   d        0.layer_norm.weight           sa_norm.scale
norm_2   d        1.layer_norm.weight           mlp_norm.scale
"""

AFTER = """
logical  axes  hf                               torchtune
norm     d     encoder.final_layer_norm.weight  final_norm.scale
"""

FAMILY = Family(
    name="t5_encoder",
    title="T5's encoder",
    aliases=("t5",),
    layouts=("hf", "torchtune"),
    tables=(BEFORE, LAYER, AFTER),
    architecture="T5EncoderModel",
    ties=(Tie("embed", of="shared"),),
    tied=True,
    sizes={
        "v": ("vocab_size", ""),
        "d": ("d_model", ""),
        "f": ("d_ff", ""),
        "h": ("num_heads", ""),
        "e": ("d_kv", ""),
        "n": ("relative_attention_num_buckets", ""),
        "i": ("num_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "torchtune"),
    config_signs=({"model_type": "t5"},),
    tiny=dict(v=24, d=16, f=12, h=4, e=8, n=10, i=2),
)
