"""Qwen 3 VL MoE: 30B-A3B, 235B-A22B.

Files have the experts as ``[in, out]``, transformers 5 has them as ``[out, in]`` in memory
(``hf-v5``) under the same names, so shapes distinguish them. config.json may make some layers dense
(``decoder_sparse_step``, ``mlp_only_layers``).

Sources: transformers' ``modeling_qwen3_vl_moe.py`` and ``conversion_mapping.py``, mlx-vlm's
``models/qwen3_vl_moe``, Megatron-Bridge's ``qwen3_vl_bridge.py`` (0.6, ``mcore``).
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import (
    _llm_compressor,
    _megatron,
    _proofs,
    llama2,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_text,
    qwen3_moe,
    qwen3_vl,
)

FEED_FORWARD = """
w1@dense       f d    mlp.gate_proj.weight
w3@dense       f d    mlp.up_proj.weight
w2@dense       d f    mlp.down_proj.weight
router@moe     x d    mlp.gate.weight
expert_w1@moe  x m d  mlp.experts.gate_up_proj#0.2 x d m
expert_w3@moe  x m d  mlp.experts.gate_up_proj#1.2 x d m
expert_w2@moe  x d m  mlp.experts.down_proj x m d
norm_2@dense    d  post_attention_layernorm.weight
norm_2_moe@moe  d  post_attention_layernorm.weight
"""

HF_V5 = """
logical    hf-v5: model.language_model.layers.{i}.
expert_w1  mlp.experts.gate_up_proj#0.1
expert_w3  mlp.experts.gate_up_proj#1.1
expert_w2  mlp.experts.down_proj
"""

MCORE = (
    *qwen3_vl.MCORE_VISUAL,
    *_megatron.put_under(
        "language_model.",
        llama2.MCORE_BEFORE,
        qwen2.MCORE_ATTENTION + qwen3.MCORE_NORMS,
        qwen2_moe.MCORE_FEED_FORWARD,
        llama2.MCORE_AFTER,
    ),
)

FAMILY: Family = replace(
    qwen3_moe.FAMILY,
    name="qwen3_vl_moe",
    title="Qwen 3 VL MoE",
    aliases=(),
    layouts=("hf", "hf-v5", "llm-compressor", "mlx", "mcore"),
    tables=(
        *qwen3_vl.VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED,
        "logical  axes  hf: model.language_model.layers.{i}." + qwen3_vl.ATTENTION + FEED_FORWARD,
        HF_V5,
        _llm_compressor.build_table("model.language_model.layers.{i}.mlp.experts"),
        "logical  axes  hf: model.language_model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT,
        *qwen3_vl.MLX_VISUAL,
        qwen3_5_text.MLX[0],
        "logical  axes  mlx: language_model.model.layers.{i}." + qwen3_vl.ATTENTION + FEED_FORWARD,
        qwen2_moe.MLX.replace(*qwen3_5_text.AT_MLX),
        "logical  axes  mlx: language_model.model." + qwen3_5_text.NORM,
        qwen3_5_text.MLX_OUTPUT,
        *MCORE,
    ),
    like={"hf-v5": "hf", "mlx": ""},
    unquantized=qwen3_vl.UNQUANTIZED,
    architecture="Qwen3VLMoeForConditionalGeneration",
    drops=(),
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    formulas=qwen3_vl.VISION_FORMULAS,
    kinds=tuple(kind.with_prefix("text_config") for kind in qwen2_moe.FAMILY.kinds),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in qwen3_moe.FAMILY.sizes.items()},
        **qwen3_vl.VISION_SIZES,
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "llm-compressor", "mlx", mlx=_proofs.MLX_VLM),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "qwen3_vl_moe"},),
    megatron=_megatron.QWEN3_VL_MOE,
    tiny={**qwen3_moe.FAMILY.tiny, **qwen3_vl.VISION_TINY, "w": 2},
)
