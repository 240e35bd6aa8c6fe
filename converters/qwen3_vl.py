"""Qwen 3 VL, dense: Qwen 3 with a vision tower whose middle layers feed its first layers.

Each layer in ``deepstack_visual_indexes`` of config.json has a separate merger.

Sources: transformers' ``modeling_qwen3_vl.py``, mlx-vlm's ``models/qwen3_vl``, of which mlx-lm
reads only the text model; Megatron-Bridge's ``qwen3_vl_bridge.py`` and ``modelling_qwen3_vl`` (0.6,
``mcore``), whose vision tower interleaves queries, keys and values by head.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _megatron, _proofs, llama2, qwen2, qwen3, qwen3_5, qwen3_5_text

DEEPSTACK = """
deep_norm       vm     norm.weight
deep_norm_bias  vm     norm.bias
deep_w1         vn vm  linear_fc1.weight
deep_w1_bias    vn     linear_fc1.bias
deep_w2         d vn   linear_fc2.weight
deep_w2_bias    d      linear_fc2.bias
"""

ATTENTION = """
q           (h e) d  self_attn.q_proj.weight
k           (k e) d  self_attn.k_proj.weight
v           (k e) d  self_attn.v_proj.weight
o           d (h e)  self_attn.o_proj.weight
q_norm      e        self_attn.q_norm.weight
k_norm      e        self_attn.k_norm.weight
q_bias?qkv  (h e)    self_attn.q_proj.bias
k_bias?qkv  (k e)    self_attn.k_proj.bias
v_bias?qkv  (k e)    self_attn.v_proj.bias
o_bias?     d        self_attn.o_proj.bias
norm_1      d        input_layernorm.weight
"""

UNQUANTIZED = ("deep_w1", "deep_w2")
"""They belong to the vision tower, whatever their size is."""

VISION_HEADS = """
vision_q            (vh ve) vd  attn.qkv.weight#0
vision_k            (vh ve) vd  attn.qkv.weight#1
vision_v            (vh ve) vd  attn.qkv.weight#2
vision_q_bias       (vh ve)     attn.qkv.bias#0
vision_k_bias       (vh ve)     attn.qkv.bias#1
vision_v_bias       (vh ve)     attn.qkv.bias#2
vision_o            vd (vh ve)  attn.proj.weight
vision_o_bias       vd          attn.proj.bias
"""

VISUAL = (
    "logical  axes  hf: model.visual." + qwen3_5.VISION,
    "logical  axes  hf: model.visual.blocks.{u}." + VISION_HEADS + qwen3_5.VISION_LAYER,
    "logical  axes  hf: model.visual." + qwen3_5.MERGER,
    "logical  axes  hf: model.visual.deepstack_merger_list.{w}." + DEEPSTACK,
)

MLX_VISUAL = (*(table.replace(*qwen3_5.AT_MLX) for table in VISUAL), qwen3_5.MLX_PATCH)

MLX = (
    *MLX_VISUAL,
    "logical  axes  mlx: language_model.model." + qwen3_5_text.EMBED,
    "logical  axes  mlx: language_model.model.layers.{i}." + ATTENTION + qwen3_5_text.FEED_FORWARD,
    "logical  axes  mlx: language_model.model." + qwen3_5_text.NORM,
    qwen3_5_text.MLX_OUTPUT,
)

MCORE_VISION = """
logical            mcore: vision_model.
vision_patch       patch_embed.proj.weight
vision_patch_bias  patch_embed.proj.bias
vision_position    pos_embed.weight
merger_norm        merger.patch_norm.weight
merger_norm_bias   merger.patch_norm.bias
merger_w1          merger.linear_fc1.weight
merger_w1_bias     merger.linear_fc1.bias
merger_w2          merger.linear_fc2.weight
merger_w2_bias     merger.linear_fc2.bias
"""

MCORE_VISION_LAYER = """
logical             mcore: vision_model.decoder.layers.{u}.
vision_norm_1       self_attention.linear_qkv.layer_norm_weight
vision_norm_1_bias  self_attention.linear_qkv.layer_norm_bias
vision_q            self_attention.linear_qkv.weight#0/vh
vision_k            self_attention.linear_qkv.weight#1/vh
vision_v            self_attention.linear_qkv.weight#2/vh
vision_q_bias       self_attention.linear_qkv.bias#0/vh
vision_k_bias       self_attention.linear_qkv.bias#1/vh
vision_v_bias       self_attention.linear_qkv.bias#2/vh
vision_o            self_attention.linear_proj.weight
vision_o_bias       self_attention.linear_proj.bias
vision_norm_2       mlp.linear_fc1.layer_norm_weight
vision_norm_2_bias  mlp.linear_fc1.layer_norm_bias
vision_w1           mlp.linear_fc1.weight
vision_w1_bias      mlp.linear_fc1.bias
vision_w2           mlp.linear_fc2.weight
vision_w2_bias      mlp.linear_fc2.bias
"""

MCORE_DEEPSTACK = """
logical         mcore: vision_model.decoder.deepstack_merger_list.{w}.
deep_norm       patch_norm.weight
deep_norm_bias  patch_norm.bias
deep_w1         linear_fc1.weight
deep_w1_bias    linear_fc1.bias
deep_w2         linear_fc2.weight
deep_w2_bias    linear_fc2.bias
"""

MCORE_VISUAL = (MCORE_VISION, MCORE_VISION_LAYER, MCORE_DEEPSTACK)
MCORE = (
    *MCORE_VISUAL,
    *_megatron.put_under(
        "language_model.",
        llama2.MCORE_BEFORE,
        qwen2.MCORE_ATTENTION + qwen3.MCORE_NORMS,
        qwen2.MCORE_FEED_FORWARD,
        llama2.MCORE_AFTER,
    ),
)

VISION_SIZES = {
    **{axis: names for axis, names in qwen3_5.VISION_SIZES.items() if axis != "va"},
    "vh": ("vision_config.num_heads", ""),
}
VISION_FORMULAS = (
    *qwen3_5.VISION_FORMULAS,
    ("ve", "vision_config.hidden_size / vision_config.num_heads"),
)
VISION_TINY = {
    **{axis: size for axis, size in qwen3_5.VISION_TINY.items() if axis != "va"},
    "vh": 2,
    "ve": 5,
}

FAMILY: Family = replace(
    qwen3.FAMILY,
    name="qwen3_vl",
    title="Qwen 3 VL, dense",
    aliases=(),
    layouts=("hf", "mlx", "mcore"),
    tables=(
        *VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED,
        "logical  axes  hf: model.language_model.layers.{i}."
        + ATTENTION
        + qwen3_5_text.FEED_FORWARD,
        "logical  axes  hf: model.language_model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT,
        *MLX,
        *MCORE,
    ),
    like={"mlx": ""},
    unquantized=UNQUANTIZED,
    architecture="Qwen3VLForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    formulas=(*VISION_FORMULAS, ("e", "text_config.head_dim")),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in qwen3.FAMILY.sizes.items()},
        **VISION_SIZES,
    },
    proofs=_proofs.get_proofs("hf", "mlx", mlx=_proofs.MLX_VLM),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "qwen3_vl"},),
    megatron=_megatron.QWEN3_VL,
    tiny={**qwen3.FAMILY.tiny, **VISION_TINY, "w": 2},
)
