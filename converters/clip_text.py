"""CLIP's text encoder.

``hf`` are the names on the Hub and of ``CLIPTextModelWithProjection``. ``hf-fresh`` are the
in-memory names of ``CLIPTextModel`` in transformers 5, which it saves for new models. Sources:
transformers' ``modeling_clip.py``, torchtune's ``models/clip/_convert_weights.py``.
"""

from ckptctl.planner.layouts import SIZES, Drop, Family

from . import _proofs

BEFORE = """
logical    axes  hf: text_model.embeddings.  hf-fresh: embeddings.      torchtune
embed      v d   token_embedding.weight      token_embedding.weight     token_embedding.weight
positions  n d   position_embedding.weight   position_embedding.weight  position_embedding
"""

LAYER = """
logical      axes     hf: text_model.encoder.layers.{i}.  hf-fresh: encoder.layers.{i}.  torchtune: layers.{i}.
q            (h e) d  self_attn.q_proj.weight             self_attn.q_proj.weight        attn.q_proj.weight
q_bias       (h e)    self_attn.q_proj.bias               self_attn.q_proj.bias          attn.q_proj.bias
k            (h e) d  self_attn.k_proj.weight             self_attn.k_proj.weight        attn.k_proj.weight
k_bias       (h e)    self_attn.k_proj.bias               self_attn.k_proj.bias          attn.k_proj.bias
v            (h e) d  self_attn.v_proj.weight             self_attn.v_proj.weight        attn.v_proj.weight
v_bias       (h e)    self_attn.v_proj.bias               self_attn.v_proj.bias          attn.v_proj.bias
o            d (h e)  self_attn.out_proj.weight           self_attn.out_proj.weight      attn.output_proj.weight
o_bias       d        self_attn.out_proj.bias             self_attn.out_proj.bias        attn.output_proj.bias
w1           f d      mlp.fc1.weight                      mlp.fc1.weight                 mlp.w1.weight
w1_bias      f        mlp.fc1.bias                        mlp.fc1.bias                   mlp.w1.bias
w2           d f      mlp.fc2.weight                      mlp.fc2.weight                 mlp.w2.weight
w2_bias      d        mlp.fc2.bias                        mlp.fc2.bias                   mlp.w2.bias
norm_1       d        layer_norm1.weight                  layer_norm1.weight             sa_norm.weight
norm_1_bias  d        layer_norm1.bias                    layer_norm1.bias               sa_norm.bias
norm_2       d        layer_norm2.weight                  layer_norm2.weight             mlp_norm.weight
norm_2_bias  d        layer_norm2.bias                    layer_norm2.bias               mlp_norm.bias
"""  # noqa: E501

AFTER = """
logical      axes  hf                                  hf-fresh                 torchtune
norm         d     text_model.final_layer_norm.weight  final_layer_norm.weight  final_norm.weight
norm_bias    d     text_model.final_layer_norm.bias    final_layer_norm.bias    final_norm.bias
projection?  g d   text_projection.weight              -                        -
"""

NUMBERED = "position indices, counted from 0"

FAMILY = Family(
    name="clip_text",
    title="CLIP's text encoder",
    aliases=("clip",),
    layouts=("hf", "hf-fresh", "torchtune"),
    tables=(BEFORE, LAYER, AFTER),
    architecture="CLIPTextModel",
    drops=(
        Drop("hf", "text_model.embeddings.position_ids", NUMBERED),
        Drop("hf-fresh", "embeddings.position_ids", NUMBERED),
    ),
    formulas=(("g", "projection_dim"),),
    sizes={
        **{axis: SIZES[axis] for axis in "vdfh"},
        "n": ("max_position_embeddings", ""),
        "i": ("num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-fresh", "torchtune"),
    config_signs=({"model_type": "clip_text_model"},),
    tiny=dict(v=24, d=16, f=12, h=2, e=8, n=10, i=2, g=6),
)
