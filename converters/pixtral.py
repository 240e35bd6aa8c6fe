"""Pixtral 12B and Large: Mistral with Pixtral's vision tower and a projector of two linear layers.

transformers runs it as LLaVA. Sources: its ``modeling_llava.py``, ``modeling_pixtral.py`` and
``convert_pixtral_weights_to_hf.py``, its ``conversion_mapping.py`` (``hf-v5``: in-memory names of
transformers 5), mistral-inference's ``vision_encoder.py``. The queries and keys of the vision tower
are in the order of complex rotations in Mistral's files, too.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Fact, Family, ParamsStyle, Rule, Tie

from . import _proofs, mistral

BEFORE = """
logical  axes  hf                                        hf-v5                                     mistral
embed    v d   language_model.model.embed_tokens.weight  model.language_model.embed_tokens.weight  tok_embeddings.weight
"""  # noqa: E501

LAYER = """
logical  axes       hf: language_model.model.layers.{i}.  hf-v5: model.language_model.layers.{i}.  mistral: layers.{i}.
q        (h r p) d  self_attn.q_proj.weight (h p r) d     self_attn.q_proj.weight (h p r) d        attention.wq.weight
k        (k r p) d  self_attn.k_proj.weight (k p r) d     self_attn.k_proj.weight (k p r) d        attention.wk.weight
v        (k e) d    self_attn.v_proj.weight               self_attn.v_proj.weight                  attention.wv.weight
o        d (h e)    self_attn.o_proj.weight               self_attn.o_proj.weight                  attention.wo.weight
w1       f d        mlp.gate_proj.weight                  mlp.gate_proj.weight                     feed_forward.w1.weight
w3       f d        mlp.up_proj.weight                    mlp.up_proj.weight                       feed_forward.w3.weight
w2       d f        mlp.down_proj.weight                  mlp.down_proj.weight                     feed_forward.w2.weight
norm_1   d          input_layernorm.weight                input_layernorm.weight                   attention_norm.weight
norm_2   d          post_attention_layernorm.weight       post_attention_layernorm.weight          ffn_norm.weight
"""  # noqa: E501

AFTER = """
logical  axes  hf                                hf-v5                             mistral
norm     d     language_model.model.norm.weight  model.language_model.norm.weight  norm.weight
output   v d   language_model.lm_head.weight     lm_head.weight                    output.weight
"""

PATCHES = """
logical       axes         hf: vision_tower.  hf-v5: model.vision_tower.  mistral: vision_encoder.
vision_patch  vd vc ph pw  patch_conv.weight  patch_conv.weight           patch_conv.weight
vision_pre    vd           ln_pre.weight      ln_pre.weight               ln_pre.weight
"""

VISION = """
logical        axes          hf: vision_tower.transformer.layers.{j}.  hf-v5: model.vision_tower.transformer.layers.{j}.  mistral: vision_encoder.transformer.layers.{j}.
vision_q       (vh vr p) vd  attention.q_proj.weight (vh p vr) vd      attention.q_proj.weight (vh p vr) vd               attention.wq.weight
vision_k       (vh vr p) vd  attention.k_proj.weight (vh p vr) vd      attention.k_proj.weight (vh p vr) vd               attention.wk.weight
vision_v       (vh ve) vd    attention.v_proj.weight                   attention.v_proj.weight                            attention.wv.weight
vision_o       vd (vh ve)    attention.o_proj.weight                   attention.o_proj.weight                            attention.wo.weight
vision_w1      vf vd         feed_forward.gate_proj.weight             feed_forward.gate_proj.weight                      feed_forward.w1.weight
vision_w3      vf vd         feed_forward.up_proj.weight               feed_forward.up_proj.weight                        feed_forward.w3.weight
vision_w2      vd vf         feed_forward.down_proj.weight             feed_forward.down_proj.weight                      feed_forward.w2.weight
vision_norm_1  vd            attention_norm.weight                     attention_norm.weight                              attention_norm.weight
vision_norm_2  vd            ffn_norm.weight                           ffn_norm.weight                                    ffn_norm.weight
"""  # noqa: E501

ADAPTER = """
logical                  axes  hf: multi_modal_projector.  hf-v5: model.multi_modal_projector.  mistral: vision_language_adapter.
adapter_w1               a vd  linear_1.weight             linear_1.weight                      w_in.weight
adapter_w1_bias?adapter  a     linear_1.bias               linear_1.bias                        w_in.bias
adapter_w2               d a   linear_2.weight             linear_2.weight                      w_out.weight
adapter_w2_bias?adapter  d     linear_2.bias               linear_2.bias                        w_out.bias
"""  # noqa: E501

VISION_FACTS = (
    Fact("image_token_index", "vision_encoder.image_token_id", "count", default=10, absent=10),
    Fact("vision_config.image_size", "vision_encoder.image_size", "count", default=1024),
    Fact("vision_config.rope_theta", "vision_encoder.rope_theta", default=10000.0, absent=10000.0),
)
VISION_RULES = (
    Rule("model_type", ("llava",), "it is Pixtral"),
    Rule("vision_feature_layer", (-1,), "Mistral's adapter uses the last layer"),
    Rule("vision_config.model_type", ("pixtral",), "the vision tower must be Pixtral's"),
    Rule("vision_config.hidden_act", ("silu",), "Mistral's vision tower uses silu"),
    Rule("projector_hidden_act", ("gelu",), "Mistral's adapter uses gelu"),
)
FULL = Rule("vision_feature_select_strategy", ("full",), "Mistral's adapter uses every patch")
BIASED = Fact(
    "multimodal_projector_bias", "vision_encoder.adapter_bias", "flag", default=True, absent=True
)
PROCESSOR = (
    "vision_encoder.max_image_size",
    "vision_encoder.image_break_token_id",
    "vision_encoder.image_end_token_id",
)

STYLE: ParamsStyle = replace(
    mistral.STYLE,
    within="text_config",
    around=(*VISION_FACTS, BIASED),
    around_rules=(*VISION_RULES, FULL),
    silent=(*mistral.STYLE.silent, *PROCESSOR),
)

FAMILY = Family(
    name="pixtral",
    title="Pixtral 12B, Large",
    aliases=("pixtral_12b", "pixtral_large"),
    layouts=("hf", "hf-v5", "mistral"),
    tables=(BEFORE, LAYER, AFTER, PATCHES, VISION, ADAPTER),
    architecture="LlavaForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("mistral",)),),
    constants={"p": 2},
    composite={"e": ("r", "p"), "ve": ("vr", "p")},
    formulas=(
        ("pw", "vision_config.patch_size"),
        ("u", "vision_config.hidden_size * spatial_merge_size * spatial_merge_size"),
        ("a", "text_config.hidden_size"),
    ),
    sizes={
        "v": ("text_config.vocab_size", "vocab_size"),
        "d": ("text_config.hidden_size", "dim"),
        "f": ("text_config.intermediate_size", "hidden_dim"),
        "h": ("text_config.num_attention_heads", "n_heads"),
        "k": ("text_config.num_key_value_heads", "n_kv_heads"),
        "e": ("text_config.head_dim", "head_dim"),
        "i": ("text_config.num_hidden_layers", "n_layers"),
        "vd": ("vision_config.hidden_size", "vision_encoder.hidden_size"),
        "vf": ("vision_config.intermediate_size", "vision_encoder.intermediate_size"),
        "vh": ("vision_config.num_attention_heads", "vision_encoder.num_attention_heads"),
        "ve": ("vision_config.head_dim", ""),
        "vc": ("vision_config.num_channels", "vision_encoder.num_channels"),
        "ph": ("vision_config.patch_size", "vision_encoder.patch_size"),
        "j": ("vision_config.num_hidden_layers", "vision_encoder.num_hidden_layers"),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mistral"),
    config_signs=({"model_type": "llava"},),
    params_signs=({"vision_encoder": PRESENT},),
    params=STYLE,
    presets=(({}, {"text_config": mistral.BEYOND_PARAMS | {"max_position_embeddings": 1024000}}),),
    tiny=dict(
        v=24, d=16, f=12, h=8, k=4, e=4, i=2, vd=20, vf=28, vh=2, ve=10, vc=3, ph=5, pw=5, j=3, a=18
    ),
)
