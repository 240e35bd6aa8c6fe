"""Llama 4 vision-language models: Scout, Maverick, Llama Guard 4.

The text model is that of ``llama4_text`` under another prefix. The patch embedding is a matrix on
the Hub and in Meta's files, and a convolution in torchtune.

Sources: as for ``llama4_text``; ``llama_models/llama4/vision``; torchtune's
``models/llama4/_convert_weights.py`` (0.7, which no release on PyPI has).
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Drop, Family, Tie

from . import _llm_compressor, _proofs, llama4_text

VISION = """
logical            axes              hf: vision_model.             meta: vision_embeddings.vision_encoder.  torchtune: encoders.vision.clip.
vision_patch       vd* (vc ph pw)    patch_embedding.linear.weight  conv1._linear.weight                    conv.weight vd vc ph pw
vision_class       vd                class_embedding                class_embedding                         cls_token_embedding.weight
vision_position    vp vd             positional_embedding_vlm       positional_embedding_vlm                token_pos_embedding.positional_embedding
vision_pre         vd                layernorm_pre.weight           ln_pre.weight                           ln_pre.weight
vision_pre_bias    vd                layernorm_pre.bias             ln_pre.bias                             ln_pre.bias
vision_post        vd                layernorm_post.weight          ln_post.weight                          ln_post.weight
vision_post_bias   vd                layernorm_post.bias            ln_post.bias                            ln_post.bias
"""  # noqa: E501

VISION_LAYER = """
logical             axes         hf: vision_model.model.layers.{j}.  meta: vision_embeddings.vision_encoder.transformer.resblocks.{j}.  torchtune: encoders.vision.clip.layers.{j}.
vision_q            (vh* ve) vd  self_attn.q_proj.weight             attn.wq.weight      attn.q_proj.weight
vision_q_bias       (vh* ve)     self_attn.q_proj.bias               attn.wq.bias        attn.q_proj.bias
vision_k            (vh* ve) vd  self_attn.k_proj.weight             attn.wk.weight      attn.k_proj.weight
vision_k_bias       (vh* ve)     self_attn.k_proj.bias               attn.wk.bias        attn.k_proj.bias
vision_v            (vh* ve) vd  self_attn.v_proj.weight             attn.wv.weight      attn.v_proj.weight
vision_v_bias       (vh* ve)     self_attn.v_proj.bias               attn.wv.bias        attn.v_proj.bias
vision_o            vd (vh* ve)  self_attn.o_proj.weight             attn.wo.weight      attn.output_proj.weight
vision_o_bias       vd           self_attn.o_proj.bias               attn.wo.bias        attn.output_proj.bias
vision_w1           vf* vd       mlp.fc1.weight                      mlp.c_fc.weight     mlp.w1.weight
vision_w1_bias      vf*          mlp.fc1.bias                        mlp.c_fc.bias       mlp.w1.bias
vision_w2           vd vf*       mlp.fc2.weight                      mlp.c_proj.weight   mlp.w2.weight
vision_w2_bias      vd           mlp.fc2.bias                        mlp.c_proj.bias     mlp.w2.bias
vision_norm_1       vd           input_layernorm.weight              ln_1.weight         sa_norm.weight
vision_norm_1_bias  vd           input_layernorm.bias                ln_1.bias           sa_norm.bias
vision_norm_2       vd           post_attention_layernorm.weight     ln_2.weight         mlp_norm.weight
vision_norm_2_bias  vd           post_attention_layernorm.bias       ln_2.bias           mlp_norm.bias
"""  # noqa: E501

PROJECTOR = """
logical     axes    hf                                      meta                                             torchtune: encoders.vision.projection.output.
adapter_w1  va* vs  vision_model.vision_adapter.mlp.fc1.weight  vision_embeddings.vision_adapter.mlp.c_fc.weight    0.weight
adapter_w2  vo va*  vision_model.vision_adapter.mlp.fc2.weight  vision_embeddings.vision_adapter.mlp.c_proj.weight  2.weight
projector   d* vo   multi_modal_projector.linear_1.weight       vision_projection.weight                            4.weight
"""  # noqa: E501

TUNE = """
logical  torchtune: decoder.
embed    tok_embeddings.weight
norm     norm.scale
output   output.weight
"""

TUNE_LAYER = """
logical         torchtune: decoder.layers.{i}.
q               attn.q_proj.weight
k               attn.k_proj.weight
v               attn.v_proj.weight
o               attn.output_proj.weight
w1@dense        mlp.w1.weight
w3@dense        mlp.w3.weight
w2@dense        mlp.w2.weight
router@moe      mlp.router.gate.weight
expert_w1@moe   mlp.experts.gate_proj
expert_w3@moe   mlp.experts.up_proj
expert_w2@moe   mlp.experts.down_proj
shared_w1@moe   mlp.shared_expert.w1.weight
shared_w3@moe   mlp.shared_expert.w3.weight
shared_w2@moe   mlp.shared_expert.w2.weight
norm_1          sa_norm.scale
norm_2@dense    mlp_norm.scale
norm_2_moe@moe  mlp_norm.scale
"""

FAMILY: Family = replace(
    llama4_text.FAMILY,
    name="llama4",
    title="Llama 4 Scout, Maverick",
    aliases=("llama4_scout", "llama4_maverick", "llama_guard_4"),
    layouts=("hf", "llm-compressor", "meta", "torchtune"),
    tables=(
        VISION,
        VISION_LAYER,
        PROJECTOR,
        "logical  axes  hf: language_model.model.  meta" + llama4_text.EMBED,
        "logical  axes  hf: language_model.model.layers.{i}.  meta: layers.{i}."
        + llama4_text.LAYER,
        "logical  axes  hf: language_model.model.  meta" + llama4_text.NORM,
        "logical  axes  hf: language_model.  meta" + llama4_text.OUTPUT,
        TUNE_LAYER,
        TUNE,
        _llm_compressor.build_table("language_model.model.layers.{i}.feed_forward.experts"),
    ),
    architecture="Llama4ForConditionalGeneration",
    drops=(
        *llama4_text.META_DROPS,
        Drop(
            "meta",
            "vision_embeddings.vision_adapter.fc.weight",
            "Meta's model uses the identity instead",
        ),
    ),
    ties=(Tie("output", of="embed", stored_in=("meta", "torchtune")),),
    constants={"vc": 3},
    formulas=(
        ("vc", "vision_config.num_channels"),
        ("vo", "vision_config.projector_output_dim"),
        (
            "vp",
            "vision_config.image_size / vision_config.patch_size"
            " * vision_config.image_size / vision_config.patch_size + 1",
        ),
    ),
    kinds=tuple(kind.with_prefix("text_config") for kind in llama4_text.FAMILY.kinds),
    sizes={
        **{axis: ("text_config." + n[0], n[1]) for axis, n in llama4_text.FAMILY.sizes.items()},
        "vd": ("vision_config.hidden_size", "vision_args.dim"),
        "vf": ("vision_config.intermediate_size", ""),
        "vh": ("vision_config.num_attention_heads", "vision_args.n_heads"),
        "ph": ("vision_config.patch_size", "vision_args.patch_size.height"),
        "pw": ("vision_config.patch_size", "vision_args.patch_size.width"),
        "va": ("vision_config.projector_input_dim", ""),
        "vo": ("vision_config.vision_output_dim", "vision_args.output_dim"),
        "j": ("vision_config.num_hidden_layers", "vision_args.n_layers"),
    },
    config_signs=({"model_type": "llama4"},),
    params_signs=({"vision_args": PRESENT},),
    params=replace(llama4_text.STYLE, within="text_config"),
    presets=(({"use_scaled_rope": True}, {"text_config": {"rope_scaling": llama4_text.SCALED}}),),
    tiny=dict(llama4_text.FAMILY.tiny)
    | {"vd": 20, "vh": 4, "ve": 6, "vf": 12, "vc": 3, "ph": 2, "pw": 5, "vp": 9}
    | {"va": 16, "vs": 14, "vo": 10, "j": 2},
    proofs=_proofs.get_proofs("hf", "llm-compressor", "meta"),
)
