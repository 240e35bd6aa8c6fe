"""Qwen 3.8 Flash Next 125B-A6B, a vision-language model with n-gram embeddings.

The vision tower is that of Qwen 3.5, and the layouts are those of ``qwen4_exp_text``. mlx-vlm has
stacked experts with separate gates, shards of the tables, and a channels-last patch embedding.

Sources: as for ``qwen4_exp_text``, and mlx-vlm's ``models/qwen4_exp``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Demand, Family

from . import _proofs, qwen3_5, qwen3_5_moe_text, qwen3_5_text, qwen4_exp_text

MLX_TEXT = "logical  axes  mlx: language_model.model."

MLX_LAYER = """
logical        mlx: language_model.model.layers.{i}.
linear_conv_q  linear_attn.conv1d.weight#0 (lk ld) taps one
linear_conv_k  linear_attn.conv1d.weight#1 (lk ld) taps one
linear_conv_v  linear_attn.conv1d.weight#2 (lh le) taps one
expert_w1      mlp.switch_mlp.gate_proj.weight
expert_w3      mlp.switch_mlp.up_proj.weight
expert_w2      mlp.switch_mlp.down_proj.weight
ple_conv       ple.conv1d.weight hd pt one
ple_table      ple.ple_embedding.ngram_embedding.shards.{y}.weight
"""

NESTED_FORMULAS = (
    ("hd", "text_config.hc_count * text_config.hidden_size"),
    ("de", "text_config.hidden_size"),
    ("nh", "text_config.ngram_size * text_config.heads_per_ngram - text_config.heads_per_ngram"),
)

FAMILY: Family = replace(
    qwen4_exp_text.FAMILY,
    name="qwen4_exp",
    title="Qwen 3.8 Flash Next",
    aliases=("qwen3_8_flash_next",),
    layouts=("hf", "hf-v5", "hf-fresh", "mlx"),
    tables=(
        *(table.replace("hf:", "hf, hf-v5:") for table in qwen3_5.VISUAL),
        "logical  axes  hf, hf-v5: model.language_model." + qwen3_5_text.EMBED,
        "logical  axes  hf, hf-v5: model.language_model.layers.{i}." + qwen4_exp_text.LAYER,
        "logical  hf-v5: model.language_model.layers.{i}." + qwen4_exp_text.TABLE,
        "logical  hf-fresh: model.language_model.layers.{i}." + qwen3_5_moe_text.APART,
        "logical  axes  hf, hf-v5: model.language_model." + qwen4_exp_text.MIXER,
        qwen4_exp_text.OUTPUT,
        *qwen4_exp_text.MTP,
        *qwen3_5.MLX_VISUAL,
        MLX_TEXT + qwen3_5_text.EMBED,
        MLX_TEXT + "layers.{i}." + qwen4_exp_text.LAYER,
        MLX_LAYER,
        MLX_TEXT + qwen4_exp_text.MIXER,
        qwen3_5_text.MLX_OUTPUT,
    ),
    like={"hf-fresh": "hf", "mlx": ""},
    architecture="Qwen4ExpForConditionalGeneration",
    demands=(Demand(("ple",), numbers="text_config.ple_layer_ids", start=1),),
    formulas=(*qwen3_5.VISION_FORMULAS, *NESTED_FORMULAS),
    kinds=tuple(kind.with_prefix("text_config") for kind in qwen4_exp_text.FAMILY.kinds),
    sizes={
        **{axis: (names, "") for axis, names in qwen4_exp_text.NESTED.items()},
        **qwen3_5.VISION_SIZES,
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "qwen4_exp", "vision_config": PRESENT},),
    tiny={**qwen4_exp_text.FAMILY.tiny, **qwen3_5.VISION_TINY},
)
