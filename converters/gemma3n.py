"""Gemma 3n with vision and audio: E2B and E4B.

The text model is that of ``gemma3n_text`` under another prefix. The vision tower is timm's
``mobilenetv5_300m_enc``. Its blocks differ in kind, so tables list their numbers as stage and
block. mlx-vlm has channels-last convolutions, and requires keys and values in all layers, which
published files have. mlx-lm reads the layout ``hf`` without towers. It saves the text model with
the same names, and omits ``vision_config``.

Sources: transformers' ``modeling_gemma3n.py``, timm's ``mobilenetv5.py``, mlx-vlm's
``models/gemma3n``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Demand, Family

from . import _proofs, gemma3n_text

REDUCED = [f"2.{n}" for n in range(9, 36, 2)]
BLOCKS = {
    "a": [f"0.{n}" for n in range(3)],
    "u": [
        *(f"1.{n}" for n in range(5)),
        *(f"2.{n}" for n in (*range(9), *range(10, 37, 2))),
        *(f"3.{n}" for n in range(0, 39, 2)),
    ],
    "w": [*(f"1.{n}" for n in range(5)), *(f"2.{n}" for n in range(8)), "3.0"],
    "z": ["1.0", "2.0", "3.0"],
    "t": [*REDUCED, *(f"3.{n}" for n in range(1, 38, 2))],
    "y": REDUCED,
}
"""Edge residuals, inverted residuals, those with a first and with a middle depthwise convolution,
attention, and attention to fewer positions, by index."""

HEADERS = {
    index: "logical  axes"
    f"  hf: model.vision_tower.timm_model.blocks.{{{index}={'|'.join(numbers)}}}."
    f"  mlx: vision_tower.timm_model.blocks.{{{index}={'|'.join(numbers)}}}."
    for index, numbers in BLOCKS.items()
}

VISION_ENDS = """
logical                 axes         hf: model.vision_tower.timm_model.  mlx: vision_tower.timm_model.
stem?vision             wo wi kh kw  conv_stem.conv.weight               conv_stem.conv.weight wo kh kw wi
stem_bias?vision        wo           conv_stem.conv.bias                 conv_stem.conv.bias
stem_norm?vision        wo           conv_stem.bn.weight                 conv_stem.bn.weight
fusion_in?vision        wo wi kh kw  msfa.ffn.pw_exp.conv.weight         msfa.ffn.pw_exp.conv.weight wo kh kw wi
fusion_in_norm?vision   wo           msfa.ffn.pw_exp.bn.weight           msfa.ffn.pw_exp.bn.weight
fusion_out?vision       wo wi kh kw  msfa.ffn.pw_proj.conv.weight        msfa.ffn.pw_proj.conv.weight wo kh kw wi
fusion_out_norm?vision  wo           msfa.ffn.pw_proj.bn.weight          msfa.ffn.pw_proj.bn.weight
fusion_norm?vision      wo           msfa.norm.weight                    msfa.norm.weight
"""  # noqa: E501

EDGE = """
edge_in?vision        wo wi kh kw  conv_exp.weight  conv_exp.weight wo kh kw wi
edge_in_norm?vision   wo           bn1.weight       bn1.weight
edge_out?vision       wo wi kh kw  conv_pwl.weight  conv_pwl.weight wo kh kw wi
edge_out_norm?vision  wo           bn2.weight       bn2.weight
"""

INVERTED = """
inverted_in?vision        wo wi kh kw  pw_exp.conv.weight   pw_exp.conv.weight wo kh kw wi
inverted_in_norm?vision   wo           pw_exp.bn.weight     pw_exp.bn.weight
inverted_out?vision       wo wi kh kw  pw_proj.conv.weight  pw_proj.conv.weight wo kh kw wi
inverted_out_norm?vision  wo           pw_proj.bn.weight    pw_proj.bn.weight
inverted_scale?vision     wo           layer_scale.gamma    layer_scale.gamma
"""

FIRST = """
first?vision       wo wi kh kw  dw_start.conv.weight  dw_start.conv.weight wo kh kw wi
first_norm?vision  wo           dw_start.bn.weight    dw_start.bn.weight
"""

MIDDLE = """
middle?vision       wo wi kh kw  dw_mid.conv.weight  dw_mid.conv.weight wo kh kw wi
middle_norm?vision  wo           dw_mid.bn.weight    dw_mid.bn.weight
"""

ATTENTION = """
vision_norm?vision   wi           norm.weight              norm.weight
vision_q?vision      wo wi kh kw  attn.query.proj.weight   attn.query.proj.weight wo kh kw wi
vision_k?vision      wo wi kh kw  attn.key.proj.weight     attn.key.proj.weight wo kh kw wi
vision_v?vision      wo wi kh kw  attn.value.proj.weight   attn.value.proj.weight wo kh kw wi
vision_o?vision      wo wi kh kw  attn.output.proj.weight  attn.output.proj.weight wo kh kw wi
vision_scale?vision  wo           layer_scale.gamma        layer_scale.gamma
"""

REDUCTION = """
reduce_k?vision       wo wi kh kw  attn.key.down_conv.weight    attn.key.down_conv.weight wo kh kw wi
reduce_k_norm?vision  wo           attn.key.norm.weight         attn.key.norm.weight
reduce_v?vision       wo wi kh kw  attn.value.down_conv.weight  attn.value.down_conv.weight wo kh kw wi
reduce_v_norm?vision  wo           attn.value.norm.weight       attn.value.norm.weight
"""  # noqa: E501

AUDIO = """
logical                  axes         hf: model.audio_tower.subsample_conv_projection.  mlx: audio_tower.subsample_conv_projection.
audio_conv_1?audio       ac one kh kw  conv_0.conv.weight        conv_0.conv.weight ac kh kw one
audio_conv_1_norm?audio  ac            conv_0.norm.weight        conv_0.norm.weight
audio_conv_2?audio       ab ac kh kw   conv_1.conv.weight        conv_1.conv.weight ab kh kw ac
audio_conv_2_norm?audio  ab            conv_1.norm.weight        conv_1.norm.weight
audio_input?audio        ad ai         input_proj_linear.weight  input_proj_linear.weight
"""  # noqa: E501

AUDIO_LAYER = """
logical                       axes         hf: model.audio_tower.conformer.{n}.
audio_before_norm?audio       ad           ffw_layer_start.pre_layer_norm.weight
audio_before_w1?audio         af ad        ffw_layer_start.ffw_layer_1.weight
audio_before_w2?audio         ad af        ffw_layer_start.ffw_layer_2.weight
audio_before_norm_post?audio  ad           ffw_layer_start.post_layer_norm.weight
audio_norm_1?audio            ad           attention.pre_attn_norm.weight
audio_q?audio                 aq ad        attention.attn.q_proj.weight
audio_k?audio                 aq ad        attention.attn.k_proj.weight
audio_v?audio                 aq ad        attention.attn.v_proj.weight
audio_relative?audio          aq ad        attention.attn.relative_position_embedding.pos_proj.weight
audio_scale?audio             ae           attention.attn.per_dim_scale
audio_o?audio                 ad aq        attention.post.weight
audio_norm_1_post?audio       ad           attention.post_norm.weight
audio_light_norm?audio        ad           lconv1d.pre_layer_norm.weight
audio_light_in?audio          ag ad        lconv1d.linear_start.weight
audio_light_conv?audio        ad one taps  lconv1d.depthwise_conv1d.weight
audio_light_conv_norm?audio   ad           lconv1d.conv_norm.weight
audio_light_out?audio         ad aq        lconv1d.linear_end.weight
audio_after_norm?audio        ad           ffw_layer_end.pre_layer_norm.weight
audio_after_w1?audio          af ad        ffw_layer_end.ffw_layer_1.weight
audio_after_w2?audio          ad af        ffw_layer_end.ffw_layer_2.weight
audio_after_norm_post?audio   ad           ffw_layer_end.post_layer_norm.weight
audio_norm?audio              ad           norm.weight
"""  # noqa: E501

EMBEDDERS = """
logical                   axes   hf: model.
vision_embed?vision       ve vd  embed_vision.embedding.weight
vision_embed_norm?vision  vd     embed_vision.hard_embedding_norm.weight
vision_soft_norm?vision   vd     embed_vision.soft_embedding_norm.weight
vision_projector?vision   d vd   embed_vision.embedding_projection.weight
audio_embed?audio         av ad  embed_audio.embedding.weight
audio_embed_norm?audio    ad     embed_audio.hard_embedding_norm.weight
audio_soft_norm?audio     ad     embed_audio.soft_embedding_norm.weight
audio_projector?audio     d ad   embed_audio.embedding_projection.weight
"""

MLX_LIGHT = """
logical           mlx: audio_tower.conformer.{n}.
audio_light_conv  lconv1d.depthwise_conv1d.weight ad taps one
"""

MLX_OUTPUT = """
logical  mlx
output   -
"""

FAMILY: Family = replace(
    gemma3n_text.FAMILY,
    name="gemma3n",
    title="Gemma 3n E2B, E4B",
    layouts=("hf", "mlx"),
    tables=(
        VISION_ENDS,
        HEADERS["a"] + EDGE,
        HEADERS["w"] + FIRST,
        HEADERS["u"] + INVERTED,
        HEADERS["z"] + MIDDLE,
        HEADERS["y"] + REDUCTION,
        HEADERS["t"] + ATTENTION,
        AUDIO,
        AUDIO_LAYER,
        EMBEDDERS,
        "logical  axes  hf: model.language_model." + gemma3n_text.ENDS,
        "logical  axes  hf: model.language_model.altup_projections.{j}." + gemma3n_text.STREAM_IN,
        "logical  axes  hf: model.language_model.altup_unembed_projections.{j}."
        + gemma3n_text.STREAM_OUT,
        "logical  axes  hf: model.language_model.layers.{i}." + gemma3n_text.LAYER,
        gemma3n_text.OUTPUT,
        MLX_LIGHT,
        MLX_OUTPUT,
    ),
    prefixes={"mlx": {"model.language_model.": "language_model.model.", "model.": ""}},
    architecture="Gemma3nForConditionalGeneration",
    constants={"one": 1} | {index: len(numbers) for index, numbers in BLOCKS.items()},
    demands=(
        *(demand.with_prefix("text_config") for demand in gemma3n_text.FAMILY.demands),
        Demand(("vision",), {"vision_config": PRESENT}),
        Demand(("audio",), {"vision_config": PRESENT, "audio_config": PRESENT}),
    ),
    layer_sizes=tuple(one.with_prefix("text_config") for one in gemma3n_text.FAMILY.layer_sizes),
    free=("f", "wo", "wi", "kh", "kw"),
    formulas=(
        ("sc", "text_config.altup_num_inputs"),
        ("sp", "text_config.altup_num_inputs * text_config.altup_num_inputs"),
        ("ds", "text_config.hidden_size"),
        ("pa", "text_config.num_hidden_layers * text_config.hidden_size_per_layer_input"),
        ("j", "text_config.altup_num_inputs - 1"),
        ("af", "4 * audio_config.hidden_size"),
        ("ag", "2 * audio_config.hidden_size"),
        ("aq", "audio_config.hidden_size"),
        ("ae", "audio_config.hidden_size / audio_config.conf_num_attention_heads"),
    ),
    sizes={
        **{axis: (f"text_config.{n[0]}", "") for axis, n in gemma3n_text.FAMILY.sizes.items()},
        "vd": ("vision_config.hidden_size", ""),
        "ve": ("vision_config.vocab_size", ""),
        "ad": ("audio_config.hidden_size", ""),
        "av": ("audio_config.vocab_size", ""),
        "ac": ("audio_config.sscp_conv_channel_size.0", ""),
        "ab": ("audio_config.sscp_conv_channel_size.1", ""),
        "taps": ("audio_config.conf_conv_kernel_size", ""),
        "n": ("audio_config.conf_num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "gemma3n"},),
    tiny=dict(gemma3n_text.FAMILY.tiny)
    | {index: len(numbers) for index, numbers in BLOCKS.items()}
    | {"wo": 6, "wi": 10, "kh": 3, "kw": 2, "vd": 17, "ve": 19, "ad": 12, "av": 21, "ac": 4}
    | {"ab": 5, "ai": 13, "af": 48, "ag": 24, "aq": 12, "ae": 3, "taps": 7, "n": 2},
)
