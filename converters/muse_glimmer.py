"""Muse Glimmer 30B: gated attention with a vision tower, every fourth layer without RoPE.

In both layouts, the norms within layers multiply by 1 + weight, the final norm by its weight.
torchtitan rotates neighboring pairs, in the text model and in the vision tower. Layers without RoPE
also have the order of complex rotations there.

Sources: transformers' ``modeling_muse_glimmer.py``, torchtitan's ``models/muse_glimmer`` (0.3).
"""

from ckptctl.planner.layouts import Family, Tie

from . import _proofs

BEFORE = """
logical  axes  hf                                        torchtitan@0.3
embed    v d   model.language_model.embed_tokens.weight  tok_embeddings.embedding.weight
"""

LAYER = """
logical      axes       hf: model.language_model.layers.{i}.     torchtitan@0.3: layers.{i}.
norm_1       d          input_layernorm.weight                   attention_norm.weight
q            (h r p) d  self_attn.q_proj.weight (h p r) d        attention.qkv_linear.wq.weight
q_bias?qkvo  (h r p)    self_attn.q_proj.bias (h p r)            -
k            (k r p) d  self_attn.k_proj.weight (k p r) d        attention.qkv_linear.wk.weight
k_bias?qkvo  (k r p)    self_attn.k_proj.bias (k p r)            -
v            (k e) d    self_attn.v_proj.weight                  attention.qkv_linear.wv.weight
v_bias?qkvo  (k e)      self_attn.v_proj.bias                    -
gate         (h e) d    self_attn.gate_proj.weight               attention.o_gate.weight
o            d (h e)    self_attn.o_proj.weight                  attention.wo.weight
o_bias?qkvo  d          self_attn.o_proj.bias                    -
post_1       d          post_attention_layernorm.weight          post_attention_norm.weight
norm_2       d          pre_feedforward_layernorm.weight         ffn_norm.weight
w1           f d        mlp.gate_proj.weight                     feed_forward.w1.weight
w3           f d        mlp.up_proj.weight                       feed_forward.w3.weight
w2           d f        mlp.down_proj.weight                     feed_forward.w2.weight
post_2       d          post_feedforward_layernorm.weight        post_ffn_norm.weight
"""

AFTER = """
logical  axes  hf                                torchtitan@0.3
norm     d     model.language_model.norm.weight  norm.weight
output   v d   lm_head.weight                    lm_head.weight
"""

PATCHES = """
logical           axes              hf: model.vision_tower.                         torchtitan@0.3: vision_encoder.
vision_patch      vd (vt vc ph pw)  patch_embedder.patch_embedding.weight           conv1_linear.weight
vision_position   (gh gw) vd        patch_embedder.position_embedding_table.weight  positional_embedding_vlm
vision_pre        vd                ln_pre.weight                                   ln_pre.weight
vision_pre_bias   vd                ln_pre.bias                                     ln_pre.bias
vision_post       vd                ln_post.weight                                  ln_post.weight
vision_post_bias  vd                ln_post.bias                                    ln_post.bias
"""  # noqa: E501

VISION_LAYER = """
logical             axes          hf: model.vision_tower.layers.{j}.  torchtitan@0.3: vision_encoder.layers.{j}.
vision_norm_1       vd            norm1.weight                        norm1.weight
vision_norm_1_bias  vd            norm1.bias                          norm1.bias
vision_q            (vh vr p) vd  attn.q_proj.weight (vh p vr) vd     attn.wq.weight
vision_q_bias       (vh vr p)     attn.q_proj.bias (vh p vr)          attn.wq.bias
vision_k            (vh vr p) vd  attn.k_proj.weight (vh p vr) vd     attn.wk.weight
vision_k_bias       (vh vr p)     attn.k_proj.bias (vh p vr)          attn.wk.bias
vision_v            (vh ve) vd    attn.v_proj.weight                  attn.wv.weight
vision_v_bias       (vh ve)       attn.v_proj.bias                    attn.wv.bias
vision_o            vd (vh ve)    attn.proj.weight                    attn.proj.weight
vision_o_bias       vd            attn.proj.bias                      attn.proj.bias
vision_norm_2       vd            norm2.weight                        norm2.weight
vision_norm_2_bias  vd            norm2.bias                          norm2.bias
vision_w1           vf vd         mlp.fc1.weight                      mlp.linear_fc1.weight
vision_w1_bias      vf            mlp.fc1.bias                        mlp.linear_fc1.bias
vision_w2           vd vf         mlp.fc2.weight                      mlp.linear_fc2.weight
vision_w2_bias      vd            mlp.fc2.bias                        mlp.linear_fc2.bias
"""  # noqa: E501

ADAPTER = """
logical     axes   hf                               torchtitan@0.3
adapter_w1  a u    model.vision_adapter.fc1.weight  vision_adapter.c_fc.weight
adapter_w2  ao a   model.vision_adapter.fc2.weight  vision_adapter.c_proj.weight
projector   d ao   model.vision_projection.weight   vision_projection.weight
"""

FAMILY = Family(
    name="muse_glimmer",
    title="Muse Glimmer 30B",
    layouts=("hf", "torchtitan@0.3"),
    tables=(PATCHES, VISION_LAYER, ADAPTER, BEFORE, LAYER, AFTER),
    architecture="MuseGlimmerForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("torchtitan@0.3",)),),
    constants={"p": 2},
    composite={"e": ("r", "p"), "ve": ("vr", "p")},
    sizes={
        "v": ("text_config.vocab_size", ""),
        "d": ("text_config.hidden_size", ""),
        "f": ("text_config.intermediate_size", ""),
        "h": ("text_config.num_attention_heads", ""),
        "k": ("text_config.num_key_value_heads", ""),
        "e": ("text_config.head_dim", ""),
        "i": ("text_config.num_hidden_layers", ""),
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "vh": ("vision_config.num_attention_heads", ""),
        "vt": ("vision_config.patch_temporal", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "gh": ("vision_config.pos_emb_height", ""),
        "gw": ("vision_config.pos_emb_width", ""),
        "j": ("vision_config.num_hidden_layers", ""),
        "u": ("out_hidden_size", ""),
        "a": ("projector_hidden_size", ""),
        "ao": ("projector_hidden_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "torchtitan@0.3"),
    config_signs=({"model_type": "muse_glimmer"},),
    tiny=dict(
        v=24,
        d=16,
        f=12,
        h=8,
        k=4,
        e=6,
        i=2,
        vd=20,
        vf=28,
        vh=2,
        ve=10,
        vt=2,
        vc=3,
        ph=5,
        pw=5,
        gh=7,
        gw=3,
        u=80,
        a=18,
        ao=18,
        j=3,
    ),
)
