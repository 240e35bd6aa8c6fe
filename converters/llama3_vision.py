"""Llama 3.2 Vision, 11B and 90B: Llama 3.1 with interleaved cross-attention layers.

Transformers numbers both kinds of layers together. Its tile embeddings have a row for images of
each aspect ratio. Meta and torchtune store the grid from which these rows are cut (``Tiles``).
Cross-attention has no RoPE, so only axes of the other layers are reordered.

Sources: transformers' ``modeling_mllama.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5), ``llama_models/llama3/multimodal/model.py``, torchtune's
``models/llama3_2_vision/_convert_weights.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import FACTS, PRESENT, Drop, Family, ParamsStyle, Shift, Tie, Tiles

from . import _proofs, llama3

EMBED = """
embed        v* d   embed_tokens.weight#0
embed_extra  vx* d  embed_tokens.weight#1
"""

PEERS_EMBED = """
embed        tok_embeddings.weight       tok_embeddings.weight
embed_extra  learnable_embedding.weight  tok_embeddings.fusion_embedding.weight
"""

LAYER = """
q       (h* r p) d  self_attn.q_proj.weight (h p r) d
k       (k* r p) d  self_attn.k_proj.weight (k p r) d
v       (k* e) d    self_attn.v_proj.weight
o       d (h* e)    self_attn.o_proj.weight
w1      f* d        mlp.gate_proj.weight
w3      f* d        mlp.up_proj.weight
w2      d f*        mlp.down_proj.weight
norm_1  d           input_layernorm.weight
norm_2  d           post_attention_layernorm.weight
"""

PEERS_LAYER = """
q       attention.wq.weight     attn.q_proj.weight
k       attention.wk.weight     attn.k_proj.weight
v       attention.wv.weight     attn.v_proj.weight
o       attention.wo.weight     attn.output_proj.weight
w1      feed_forward.w1.weight  mlp.w1.weight
w3      feed_forward.w3.weight  mlp.w3.weight
w2      feed_forward.w2.weight  mlp.w2.weight
norm_1  attention_norm.weight   sa_norm.scale
norm_2  ffn_norm.weight         mlp_norm.scale
"""

CROSS = """
cross_q       (h* e) d  cross_attn.q_proj.weight
cross_k       (k* e) d  cross_attn.k_proj.weight
cross_v       (k* e) d  cross_attn.v_proj.weight
cross_o       d (h* e)  cross_attn.o_proj.weight
cross_q_norm  e         cross_attn.q_norm.weight
cross_k_norm  e         cross_attn.k_norm.weight
cross_gate    one       cross_attn_attn_gate
cross_w1      f* d      mlp.gate_proj.weight
cross_w3      f* d      mlp.up_proj.weight
cross_w2      d f*      mlp.down_proj.weight
cross_gate_2  one       cross_attn_mlp_gate
cross_norm_1  d         input_layernorm.weight
cross_norm_2  d         post_attention_layernorm.weight
"""

PEERS_CROSS = """
cross_q       attention.wq.weight      attn.q_proj.weight
cross_k       attention.wk.weight      attn.k_proj.weight
cross_v       attention.wv.weight      attn.v_proj.weight
cross_o       attention.wo.weight      attn.output_proj.weight
cross_q_norm  attention.q_norm.weight  attn.q_norm.scale
cross_k_norm  attention.k_norm.weight  attn.k_norm.scale
cross_gate    gate_attn                ca_scale.scale
cross_w1      feed_forward.w1.weight   mlp.w1.weight
cross_w3      feed_forward.w3.weight   mlp.w3.weight
cross_w2      feed_forward.w2.weight   mlp.w2.weight
cross_gate_2  gate_ffwd                mlp_scale.scale
cross_norm_1  attention_norm.weight    ca_norm.scale
cross_norm_2  ffn_norm.weight          mlp_norm.scale
"""

NORM = """
norm  d  norm.weight
"""

PEERS_NORM = """
norm  norm.weight  norm.scale
"""

OUTPUT = """
output  v* d  lm_head.weight
"""

PEERS_OUTPUT = """
output  output.weight  output.weight
"""

VISION = """
vision_patch          vd* (vc ph pw)  patch_embedding.weight vd vc ph pw
vision_class          vd              class_embedding
vision_position       vp vd           gated_positional_embedding.embedding
vision_position_gate  one             gated_positional_embedding.gate
vision_ratios         vr (vt vp vd)   gated_positional_embedding.tile_embedding.weight
vision_pre_gate       one             pre_tile_positional_embedding.gate
vision_pre_ratios     vr (vt vd)      pre_tile_positional_embedding.embedding.weight
vision_post_gate      one             post_tile_positional_embedding.gate
vision_post_ratios    vr (vt vd)      post_tile_positional_embedding.embedding.weight
vision_pre            vd              layernorm_pre.weight
vision_pre_bias       vd              layernorm_pre.bias
vision_post           vd              layernorm_post.weight
vision_post_bias      vd              layernorm_post.bias
"""

PEERS_VISION = """
vision_patch          conv1._linear.weight             conv.weight vd vc ph pw
vision_class          class_embedding                  cls_token_embedding.weight
vision_position       positional_embedding             token_pos_embedding.local_token_positional_embedding
vision_position_gate  gated_positional_embedding_gate  token_pos_embedding.gate
vision_pre_gate       pre_tile_pos_embed.gate          pre_tile_pos_embed.gate
vision_post_gate      post_tile_pos_embed.gate         post_tile_pos_embed.gate
vision_pre            ln_pre.weight                    ln_pre.weight
vision_pre_bias       ln_pre.bias                      ln_pre.bias
vision_post           ln_post.weight                   ln_post.weight
vision_post_bias      ln_post.bias                     ln_post.bias
"""  # noqa: E501

TILES = """
vision_tiles        ta tb vp vd   gated_positional_embedding     token_pos_embedding.global_token_positional_embedding
vision_pre_tiles    ta tb one vd  pre_tile_pos_embed.embedding   pre_tile_pos_embed.embedding
vision_post_tiles   ta tb one vd  post_tile_pos_embed.embedding  post_tile_pos_embed.embedding
"""  # noqa: E501

VISION_LAYER = """
vision_q            (vh* ve) vd  self_attn.q_proj.weight
vision_k            (vh* ve) vd  self_attn.k_proj.weight
vision_v            (vh* ve) vd  self_attn.v_proj.weight
vision_o            vd (vh* ve)  self_attn.o_proj.weight
vision_w1           vf* vd       mlp.fc1.weight
vision_w1_bias      vf*          mlp.fc1.bias
vision_w2           vd vf*       mlp.fc2.weight
vision_w2_bias      vd           mlp.fc2.bias
vision_norm_1       vd           input_layernorm.weight
vision_norm_1_bias  vd           input_layernorm.bias
vision_norm_2       vd           post_attention_layernorm.weight
vision_norm_2_bias  vd           post_attention_layernorm.bias
"""

PEERS_VISION_LAYER = """
vision_q            attn.wq.weight     attn.q_proj.weight
vision_k            attn.wk.weight     attn.k_proj.weight
vision_v            attn.wv.weight     attn.v_proj.weight
vision_o            attn.wo.weight     attn.output_proj.weight
vision_w1           mlp.c_fc.weight    mlp.w1.weight
vision_w1_bias      mlp.c_fc.bias      mlp.w1.bias
vision_w2           mlp.c_proj.weight  mlp.w2.weight
vision_w2_bias      mlp.c_proj.bias    mlp.w2.bias
vision_norm_1       ln_1.weight        sa_norm.weight
vision_norm_1_bias  ln_1.bias          sa_norm.bias
vision_norm_2       ln_2.weight        mlp_norm.weight
vision_norm_2_bias  ln_2.bias          mlp_norm.bias
"""

PROJECTOR = """
projector       d* vo  weight
projector_bias  d*     bias
"""

PEERS_PROJECTOR = """
projector       weight  weight
projector_bias  bias    bias
"""

GATES = """
global_gate    one  gate_attn
global_gate_2  one  gate_ffn
"""

PEERS_GATES = """
global_gate    gate_attn  sa_scale.scale
global_gate_2  gate_ffn   mlp_scale.scale
"""

GLOBAL_LAYER = VISION_LAYER.replace("vision_", "global_") + GATES
PEERS_GLOBAL_LAYER = PEERS_VISION_LAYER.replace("vision_", "global_") + PEERS_GATES

FREQUENCIES = "rotary frequencies are computed from rope_theta"

FAMILY = Family(
    name="llama3_vision",
    title="Llama 3.2 Vision 11B, 90B",
    aliases=("mllama", "llama3_2_vision"),
    layouts=("hf", "hf-v5", "meta", "torchtune"),
    tables=(
        "logical  axes  hf: vision_model." + VISION,
        "logical  axes  hf: vision_model.transformer.layers.{l}." + VISION_LAYER,
        "logical  axes  hf: vision_model.global_transformer.layers.{g}." + GLOBAL_LAYER,
        "logical  axes  hf: multi_modal_projector." + PROJECTOR,
        "logical  axes  hf: language_model.model." + EMBED,
        "logical  axes  hf: language_model.model.layers.{i}." + LAYER,
        "logical  axes  hf: language_model.model.layers.{j}." + CROSS,
        "logical  axes  hf: language_model.model." + NORM,
        "logical  axes  hf: language_model." + OUTPUT,
        "logical  axes  hf-v5: model.vision_model." + VISION,
        "logical  axes  hf-v5: model.vision_model.transformer.layers.{l}." + VISION_LAYER,
        "logical  axes  hf-v5: model.vision_model.global_transformer.layers.{g}." + GLOBAL_LAYER,
        "logical  axes  hf-v5: model.multi_modal_projector." + PROJECTOR,
        "logical  axes  hf-v5: model.language_model." + EMBED,
        "logical  axes  hf-v5: model.language_model.layers.{i}." + LAYER,
        "logical  axes  hf-v5: model.language_model.layers.{j}." + CROSS,
        "logical  axes  hf-v5: model.language_model." + NORM,
        "logical  axes  hf-v5" + OUTPUT,
        "logical  meta: vision_model.vision_encoder.  torchtune: encoder.clip." + PEERS_VISION,
        "logical  axes  meta: vision_model.vision_encoder.  torchtune: encoder.clip." + TILES,
        "logical  meta: vision_model.vision_encoder.transformer.resblocks.{l}."
        "  torchtune: encoder.clip.layers.{l}." + PEERS_VISION_LAYER,
        "logical  meta: vision_model.vision_encoder.global_transformer.resblocks.{g}."
        "  torchtune: encoder.projection.layers.{g}." + PEERS_GLOBAL_LAYER,
        "logical  meta: vision_model.vision_projection.  torchtune: encoder.projection.output."
        + PEERS_PROJECTOR,
        "logical  meta: text_model.  torchtune: decoder." + PEERS_EMBED,
        "logical  meta: text_model.layers.{i}.  torchtune: decoder.layers.{i}." + PEERS_LAYER,
        "logical  meta: text_model.cross_attention_layers.{j}."
        "  torchtune: decoder.layers.{j}.fusion_layer." + PEERS_CROSS,
        "logical  meta: text_model.  torchtune: decoder." + PEERS_NORM + PEERS_OUTPUT.lstrip(),
    ),
    architecture="MllamaForConditionalGeneration",
    drops=(Drop("meta", "text_model.rope.freqs", FREQUENCIES),),
    ties=(Tie("output", of="embed", stored_in=("hf-v5", "meta", "torchtune")),),
    shifts=(
        Shift(
            "hf",
            index="j",
            into="i",
            place="text_config.cross_attention_layers",
        ),
        Shift(
            "hf-v5",
            index="j",
            into="i",
            place="text_config.cross_attention_layers",
        ),
        Shift(
            "torchtune",
            index="j",
            into="i",
            place="text_config.cross_attention_layers",
            nested=True,
        ),
    ),
    tiles=(
        Tiles(grid="vision_tiles", rows="vision_ratios"),
        Tiles(grid="vision_pre_tiles", rows="vision_pre_ratios"),
        Tiles(grid="vision_post_tiles", rows="vision_post_ratios"),
    ),
    constants={"p": 2, "one": 1, "vc": 3},
    composite={"e": ("r", "p")},
    formulas=(
        ("i", "text_config.num_hidden_layers - len(text_config.cross_attention_layers)"),
        ("j", "len(text_config.cross_attention_layers)"),
        ("vc", "vision_config.num_channels"),
        ("vr", "len(vision_config.supported_aspect_ratios) + 1"),
        (
            "vp",
            "vision_config.image_size / vision_config.patch_size"
            " * vision_config.image_size / vision_config.patch_size + 1",
        ),
        ("vo", "vision_config.vision_output_dim"),
        ("e", "text_config.hidden_size / text_config.num_attention_heads"),
        ("ve", "vision_config.hidden_size / vision_config.attention_heads"),
    ),
    sizes={
        "v": ("text_config.vocab_size", "vocab_size"),
        "d": ("text_config.hidden_size", "dim"),
        "f": ("text_config.intermediate_size", ""),
        "h": ("text_config.num_attention_heads", "n_heads"),
        "k": ("text_config.num_key_value_heads", "n_kv_heads"),
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "vh": ("vision_config.attention_heads", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "vt": ("vision_config.max_num_tiles", "vision_max_num_chunks"),
        "ta": ("vision_config.max_num_tiles", "vision_max_num_chunks"),
        "tb": ("vision_config.max_num_tiles", "vision_max_num_chunks"),
        "l": ("vision_config.num_hidden_layers", ""),
        "g": ("vision_config.num_global_layers", ""),
        "i": ("", "n_layers"),
        "j": ("", "vision_num_cross_attention_layers"),
    },
    repeated=("k",),
    config_signs=({"model_type": "mllama"},),
    params_signs=({"vision_chunk_size": PRESENT},),
    params=ParamsStyle(
        "Meta's",
        within="text_config",
        text=(
            replace(FACTS["rms_norm_eps"], absent=1e-5),
            replace(FACTS["rope_theta"], absent=500000.0),
        ),
        translated=False,
    ),
    presets=(({"use_scaled_rope": True}, {"text_config": {"rope_scaling": llama3.SCALED_ROPE}}),),
    proofs=_proofs.get_proofs("hf", "hf-v5", "torchtune"),
    tiny=dict(
        v=24,
        vx=8,
        d=20,
        f=12,
        h=8,
        k=4,
        e=6,
        i=4,
        j=2,
        vd=20,
        vf=12,
        vh=4,
        ve=6,
        vc=3,
        ph=2,
        pw=5,
        vp=9,
        vo=10,
        vt=4,
        ta=4,
        tb=4,
        vr=9,
        one=1,
        l=2,
        g=2,
    ),
)
