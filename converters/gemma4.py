"""Gemma 4 with vision, and in small models with audio: E2B, E4B, 26B-A4B, 31B.

The text model is that of ``gemma4_text`` under another prefix. Either tower may be missing. Linear
layers of a tower may clip inputs and outputs, with four bounds each. The in-memory names of
transformers are the names in files. mlx-vlm has channels-last convolutions. mlx-lm only has the
text model. Megatron-Bridge's dense model (``mcore``) contains the towers of transformers.

Sources: transformers' ``modeling_gemma4.py``, mlx-lm's ``gemma4.py``, mlx-vlm's ``models/gemma4``,
Megatron-Bridge's ``gemma4_vl_bridge.py`` and ``modeling_gemma4_vl.py`` (0.6, ``mcore``).
"""

from dataclasses import replace

from ckptctl.planner.layouts import CHOSEN, PRESENT, Demand, Family

from . import _llm_compressor, _megatron, _proofs, gemma4_text

VISION = """
vision_patch?vision     vd pp      patch_embedder.input_proj.weight
vision_position?vision  two vp vd  patch_embedder.position_embedding_table
vision_std_bias?std     vd         std_bias
vision_std_scale?std    vd         std_scale
"""

VISION_LAYER = """
vision_q?vision            va vd       self_attn.q_proj.linear.weight
vision_k?vision            vk vd       self_attn.k_proj.linear.weight
vision_v?vision            vk vd       self_attn.v_proj.linear.weight
vision_o?vision            vd va       self_attn.o_proj.linear.weight
vision_q_norm?vision       ve          self_attn.q_norm.weight
vision_k_norm?vision       ve          self_attn.k_norm.weight
vision_w1?vision           vf vd       mlp.gate_proj.linear.weight
vision_w3?vision           vf vd       mlp.up_proj.linear.weight
vision_w2?vision           vd vf       mlp.down_proj.linear.weight
vision_norm_1?vision       vd          input_layernorm.weight
vision_norm_1_post?vision  vd          post_attention_layernorm.weight
vision_norm_2?vision       vd          pre_feedforward_layernorm.weight
vision_norm_2_post?vision  vd          post_feedforward_layernorm.weight
"""

VISION_LINEAR = {
    "vision_q": "self_attn.q_proj",
    "vision_k": "self_attn.k_proj",
    "vision_v": "self_attn.v_proj",
    "vision_o": "self_attn.o_proj",
    "vision_w1": "mlp.gate_proj",
    "vision_w3": "mlp.up_proj",
    "vision_w2": "mlp.down_proj",
}

AUDIO = """
audio_conv_1?audio       ac one kh kw  subsample_conv_projection.layer0.conv.weight
audio_conv_1_norm?audio  ac            subsample_conv_projection.layer0.norm.weight
audio_conv_2?audio       ab ac kh kw   subsample_conv_projection.layer1.conv.weight
audio_conv_2_norm?audio  ab            subsample_conv_projection.layer1.norm.weight
audio_input?audio        ad ai         subsample_conv_projection.input_proj_linear.weight
audio_output?audio       ao ad         output_proj.weight
audio_output_bias?audio  ao            output_proj.bias
"""

AUDIO_LAYER = """
audio_before_norm?audio       ad           feed_forward1.pre_layer_norm.weight
audio_before_w1?audio         af ad        feed_forward1.ffw_layer_1.linear.weight
audio_before_w2?audio         ad af        feed_forward1.ffw_layer_2.linear.weight
audio_before_norm_post?audio  ad           feed_forward1.post_layer_norm.weight
audio_norm_1?audio            ad           norm_pre_attn.weight
audio_q?audio                 aq ad        self_attn.q_proj.linear.weight
audio_k?audio                 aq ad        self_attn.k_proj.linear.weight
audio_v?audio                 aq ad        self_attn.v_proj.linear.weight
audio_relative?audio          aq ad        self_attn.relative_k_proj.weight
audio_scale?audio             ae           self_attn.per_dim_scale
audio_o?audio                 ad aq        self_attn.post.linear.weight
audio_norm_1_post?audio       ad           norm_post_attn.weight
audio_light_norm?audio        ad           lconv1d.pre_layer_norm.weight
audio_light_in?audio          ag ad        lconv1d.linear_start.linear.weight
audio_light_conv?audio        ad one taps  lconv1d.depthwise_conv1d.weight
audio_light_conv_norm?audio   ad           lconv1d.conv_norm.weight
audio_light_out?audio         ad aw        lconv1d.linear_end.linear.weight
audio_after_norm?audio        ad           feed_forward2.pre_layer_norm.weight
audio_after_w1?audio          af ad        feed_forward2.ffw_layer_1.linear.weight
audio_after_w2?audio          ad af        feed_forward2.ffw_layer_2.linear.weight
audio_after_norm_post?audio   ad           feed_forward2.post_layer_norm.weight
audio_norm?audio              ad           norm_out.weight
"""

AUDIO_LINEAR = {
    "audio_before_w1": "feed_forward1.ffw_layer_1",
    "audio_before_w2": "feed_forward1.ffw_layer_2",
    "audio_q": "self_attn.q_proj",
    "audio_k": "self_attn.k_proj",
    "audio_v": "self_attn.v_proj",
    "audio_o": "self_attn.post",
    "audio_light_in": "lconv1d.linear_start",
    "audio_light_out": "lconv1d.linear_end",
    "audio_after_w1": "feed_forward2.ffw_layer_1",
    "audio_after_w2": "feed_forward2.ffw_layer_2",
}

VISION_CLIPS, AUDIO_CLIPS = (
    "\n".join(
        f"{name}_{bound}?{word}  scalar  {key}.{bound}"
        for name, key in linear.items()
        for bound in ("input_min", "input_max", "output_min", "output_max")
    )
    for linear, word in ((VISION_LINEAR, "vision_clips"), (AUDIO_LINEAR, "audio_clips"))
)

EMBEDDERS = """
logical                  axes  hf: model.                                mlx, mcore
vision_projector?vision  d vd  embed_vision.embedding_projection.weight  embed_vision.embedding_projection.weight
audio_projector?audio    d ao  embed_audio.embedding_projection.weight   embed_audio.embedding_projection.weight
"""  # noqa: E501

EMBED = gemma4_text.EMBED + gemma4_text.PLE_EMBED
LAYER = gemma4_text.LAYER + gemma4_text.PLE + gemma4_text.EXPERTS

MLX_OUTPUT = """
logical  mlx
output   language_model.lm_head.weight
"""

MLX_CONVOLUTIONS = """
logical       mlx: audio_tower.subsample_conv_projection.
audio_conv_1  layer0.conv.weight ac kh kw one
audio_conv_2  layer1.conv.weight ab kh kw ac
"""

MLX_LIGHT = """
logical           mlx: audio_tower.layers.{n}.
audio_light_conv  lconv1d.depthwise_conv1d.weight ad taps one
"""

MLX = (
    "logical  axes  mlx: vision_tower." + VISION,
    "logical  axes  mlx: vision_tower.encoder.layers.{j}." + VISION_LAYER + VISION_CLIPS,
    "logical  axes  mlx: audio_tower." + AUDIO,
    "logical  axes  mlx: audio_tower.layers.{n}." + AUDIO_LAYER + AUDIO_CLIPS,
    MLX_CONVOLUTIONS,
    MLX_LIGHT,
    "logical  axes  mlx: language_model.model." + EMBED,
    "logical  axes  mlx: language_model.model.layers.{i}." + LAYER,
    "logical  axes  mlx: language_model.model." + gemma4_text.NORM,
    "logical  mlx: language_model.model.layers.{i}." + gemma4_text.MLX_EXPERTS,
    MLX_OUTPUT,
)

MCORE = (
    "logical  axes  mcore: vision_tower." + VISION,
    "logical  axes  mcore: vision_tower.encoder.layers.{j}." + VISION_LAYER + VISION_CLIPS,
    "logical  axes  mcore: audio_tower." + AUDIO,
    "logical  axes  mcore: audio_tower.layers.{n}." + AUDIO_LAYER + AUDIO_CLIPS,
    *_megatron.put_under(
        "language_model.",
        gemma4_text.MCORE_AROUND,
        gemma4_text.MCORE_ATTENTION,
        gemma4_text.MCORE_LAYER,
    ),
)

FAMILY: Family = replace(
    gemma4_text.FAMILY,
    name="gemma4",
    title="Gemma 4 E2B, E4B, 26B-A4B, 31B",
    tables=(
        "logical  axes  hf: model.vision_tower." + VISION,
        "logical  axes  hf: model.vision_tower.encoder.layers.{j}." + VISION_LAYER + VISION_CLIPS,
        "logical  axes  hf: model.audio_tower." + AUDIO,
        "logical  axes  hf: model.audio_tower.layers.{n}." + AUDIO_LAYER + AUDIO_CLIPS,
        EMBEDDERS,
        "logical  axes  hf: model.language_model." + EMBED,
        "logical  axes  hf: model.language_model.layers.{i}." + LAYER,
        "logical  axes  hf: model.language_model." + gemma4_text.NORM,
        _llm_compressor.build_table("model.language_model.layers.{i}.experts"),
        gemma4_text.OUTPUT,
        *MLX,
        *MCORE,
    ),
    layouts=("hf", "llm-compressor", "mlx", "mcore"),
    like={"mlx": ""},
    architecture="Gemma4ForConditionalGeneration",
    constants={"one": 1, "two": 2},
    layer_words=tuple(word.with_prefix("text_config") for word in gemma4_text.LAYER_WORDS),
    demands=(
        *(demand.with_prefix("text_config") for demand in gemma4_text.DEMANDS),
        Demand(("vision",), {"vision_config": PRESENT}),
        Demand(("std",), {"vision_config.standardize": CHOSEN}),
        Demand(("vision_clips",), {"vision_config.use_clipped_linears": CHOSEN}),
        Demand(("audio",), {"audio_config": PRESENT}),
        Demand(("audio_clips",), {"audio_config.use_clipped_linears": CHOSEN}),
    ),
    layer_sizes=tuple(size.with_prefix("text_config") for size in gemma4_text.LAYER_SIZES),
    formulas=(
        ("pd", "text_config.hidden_size_per_layer_input"),
        ("pa", "text_config.num_hidden_layers * text_config.hidden_size_per_layer_input"),
    ),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in gemma4_text.FAMILY.sizes.items()},
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "vp": ("vision_config.position_embedding_size", ""),
        "j": ("vision_config.num_hidden_layers", ""),
        "ad": ("audio_config.hidden_size", ""),
        "ao": ("audio_config.output_proj_dims", ""),
        "taps": ("audio_config.conv_kernel_size", ""),
        "n": ("audio_config.num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs(
        *("hf", "llm-compressor", "mlx", "mcore"),
        mlx="mlx-lm 0.32.2, with towers mlx-vlm 0.7.10",
        mcore=_proofs.BRIDGE_06,
    ),
    config_signs=({"model_type": "gemma4"},),
    tiny=dict(gemma4_text.FAMILY.tiny)
    | {"vd": 10, "vf": 14, "vp": 9, "pp": 15, "va": 6, "vk": 8, "ve": 3, "j": 2}
    | {"ac": 4, "ab": 5, "kh": 3, "kw": 2, "ad": 11, "ai": 13, "ao": 9, "af": 17, "aq": 6}
    | {"ae": 2, "ag": 22, "aw": 7, "taps": 3, "n": 2},
)
