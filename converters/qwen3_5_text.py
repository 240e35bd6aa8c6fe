"""Qwen 3.5 and 3.6 text models: gated delta nets, every fourth layer gated attention.

The model of Qwen 3 Next with dense layers. Its delta nets store the queries of all heads, then the
keys, then the values, and have separate tensors for the gate and both coefficients. Each key head
belongs to consecutive value heads. transformers ignores the MTP layers (``mtp``).

mlx-lm omits the vision tower of ``qwen3_5`` and ``vision_config``, so that its config.json
describes this model. It does not have ``mtp``.

Sources: transformers' ``modeling_qwen3_5.py`` (``Qwen3_5ForCausalLM``), vLLM's ``qwen3_5_mtp.py``
for ``mtp``, mlx-lm's ``qwen3_5.py``, Megatron-Bridge's ``qwen35_bridge.py`` (0.6, ``mcore``).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, LayerKind, Tie

from . import _megatron, _proofs, llama2, qwen3_moe, qwen3_next

EMBED = """
embed  v d  embed_tokens.weight
"""

LINEAR = """
linear_q@linear        (lk ld) d         linear_attn.in_proj_qkv.weight#0
linear_k@linear        (lk ld) d         linear_attn.in_proj_qkv.weight#1
linear_v@linear        (lh le) d         linear_attn.in_proj_qkv.weight#2
linear_z@linear        (lh le) d         linear_attn.in_proj_z.weight
linear_b@linear        lh d              linear_attn.in_proj_b.weight
linear_a@linear        lh d              linear_attn.in_proj_a.weight
"""

FEED_FORWARD = """
w1      f d  mlp.gate_proj.weight
w3      f d  mlp.up_proj.weight
w2      d f  mlp.down_proj.weight
norm_2  d    post_attention_layernorm.weight
"""

NORM = """
norm  d  norm.weight
"""

OUTPUT = """
logical  axes  hf
output   v d   lm_head.weight
"""

MTP = """
logical             axes  hf: mtp.
mtp_fc?mtp          d dd  fc.weight
mtp_embed_norm?mtp  d     pre_fc_norm_embedding.weight
mtp_norm_1?mtp      d     pre_fc_norm_hidden.weight
mtp_norm?mtp        d     norm.weight
"""

MTP_ATTENTION = """
q?mtp       (k q g e) d  self_attn.q_proj.weight
k?mtp       (k e) d      self_attn.k_proj.weight
v?mtp       (k e) d      self_attn.v_proj.weight
o?mtp       d (h e)      self_attn.o_proj.weight
q_norm?mtp  e            self_attn.q_norm.weight
k_norm?mtp  e            self_attn.k_norm.weight
"""

MTP_INPUT_NORM = """
norm_1?mtp  d            input_layernorm.weight
"""

MTP_FEED_FORWARD = """
w1?mtp      f d  mlp.gate_proj.weight
w3?mtp      f d  mlp.up_proj.weight
w2?mtp      d f  mlp.down_proj.weight
norm_2?mtp  d    post_attention_layernorm.weight
"""

MLX_OUTPUT = """
logical  axes  mlx
output   v d   language_model.lm_head.weight
"""

LAYER = LINEAR + qwen3_next.ATTENTION + FEED_FORWARD

AT_MLX = "mlx: model.", "mlx: language_model.model."

MLX = (
    "logical  axes  mlx: language_model.model." + EMBED,
    "logical  axes  mlx: language_model.model.layers.{i}." + LAYER,
    qwen3_next.MLX.replace(*AT_MLX),
    "logical  axes  mlx: language_model.model." + NORM.replace("norm.weight", "norm.weight+1"),
    MLX_OUTPUT,
)

MCORE = (
    llama2.MCORE_BEFORE,
    qwen3_next.MCORE_LINEAR,
    qwen3_next.MCORE_ATTENTION,
    qwen3_moe.MCORE_NORMS,
    llama2.MCORE_AFTER,
)

MCORE_DENSE = (
    llama2.MCORE_FEED_FORWARD,
    qwen3_next.MCORE_MTP,
    *(
        table.replace(*qwen3_next.IN_MTP)
        for table in (
            qwen3_next.MCORE_ATTENTION,
            qwen3_moe.MCORE_NORMS,
            llama2.MCORE_FEED_FORWARD,
        )
    ),
)

SIZES = {
    **{a: n for a, n in qwen3_next.FAMILY.sizes.items() if a not in ("x", "m", "s")},
    "j": ("mtp_num_hidden_layers", ""),
}

FAMILY: Family = replace(
    qwen3_next.FAMILY,
    name="qwen3_5_text",
    title="Qwen 3.5, Qwen 3.6, text only",
    layouts=("hf", "mlx", "mcore"),
    tables=(
        "logical  axes  hf: model." + EMBED,
        "logical  axes  hf: model.layers.{i}." + LAYER,
        "logical  axes  hf: model." + NORM,
        OUTPUT,
        MTP,
        "logical  axes  hf: mtp.layers.{j}." + MTP_ATTENTION + MTP_INPUT_NORM + MTP_FEED_FORWARD,
        *MLX,
        *MCORE,
        *MCORE_DENSE,
    ),
    like={"mlx": ""},
    architecture="Qwen3_5ForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(("linear", "full"),),
    formulas=(("dd", "2 * hidden_size"),),
    kinds=(
        LayerKind("linear", kinds=("layer_types", "linear_attention")),
        LayerKind("full", every="full_attention_interval"),
    ),
    sizes={axis: (f"{name}|text_config.{name}", "") for axis, (name, _) in SIZES.items()},
    proofs=_proofs.get_proofs("hf", "mlx", "mcore"),
    shown_by=("linear_a_log",),
    config_signs=(
        {"model_type": "qwen3_5_text"},
        {"model_type": "qwen3_5", "vision_config": None},
    ),
    megatron=_megatron.QWEN3_5_TEXT,
    tiny={a: n for a, n in qwen3_next.FAMILY.tiny.items() if a not in ("x", "m", "s")},
)
