"""Qwen 3.5 and 3.6 text models with experts.

========  ====================================================================================
layout    experts
========  ====================================================================================
hf        stacked; in-memory names of transformers 5, which reads all three ``hf`` layouts
hf-3.5    stacked, except in ``mtp``; Qwen 3.5 as published (Qwen 3.6 has ``hf``)
hf-fresh  separate; published FP8 models, and new models saved by transformers 5
mlx       stacked, gate and up separate; no ``mtp``
========  ====================================================================================

Sources: transformers' ``modeling_qwen3_5_moe.py`` and ``conversion_mapping.py``, vLLM's
``qwen3_5_mtp.py`` and Megatron-Bridge's ``qwen35_vl_bridge.py`` for ``mtp`` and
``qwen35_bridge.py`` (0.6) for ``mcore``, mlx-lm's
``qwen3_5_moe.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _megatron, _proofs, qwen2_moe, qwen3_5_text, qwen3_moe, qwen3_next

EXPERTS = """
router       x d    mlp.gate.weight
expert_w1    x m d  mlp.experts.gate_up_proj#0.1
expert_w3    x m d  mlp.experts.gate_up_proj#1.1
expert_w2    x d m  mlp.experts.down_proj
shared_w1    s d    mlp.shared_expert.gate_proj.weight
shared_w3    s d    mlp.shared_expert.up_proj.weight
shared_w2    d s    mlp.shared_expert.down_proj.weight
shared_gate  one d  mlp.shared_expert_gate.weight
"""

NORM_2 = """
norm_2       d      post_attention_layernorm.weight
"""

APART = """
expert_w1  mlp.experts.{x}.gate_proj.weight
expert_w3  mlp.experts.{x}.up_proj.weight
expert_w2  mlp.experts.{x}.down_proj.weight
"""

MTP_EXPERTS = """
router?mtp       x d    mlp.gate.weight
expert_w1?mtp    x m d  mlp.experts.gate_up_proj#0.1
expert_w3?mtp    x m d  mlp.experts.gate_up_proj#1.1
expert_w2?mtp    x d m  mlp.experts.down_proj
shared_w1?mtp    s d    mlp.shared_expert.gate_proj.weight
shared_w3?mtp    s d    mlp.shared_expert.up_proj.weight
shared_w2?mtp    d s    mlp.shared_expert.down_proj.weight
shared_gate?mtp  one d  mlp.shared_expert_gate.weight
"""

MTP_NORM_2 = """
norm_2?mtp       d      post_attention_layernorm.weight
"""

MTP = (
    qwen3_5_text.MTP,
    "logical  axes  hf: mtp.layers.{j}."
    + qwen3_5_text.MTP_ATTENTION
    + qwen3_5_text.MTP_INPUT_NORM
    + MTP_EXPERTS
    + MTP_NORM_2,
    "logical  hf-3.5, hf-fresh: mtp.layers.{j}." + APART,
)

LAYER = qwen3_5_text.LINEAR + qwen3_next.ATTENTION + EXPERTS + NORM_2

SIZES = {
    **{axis: n for axis, n in qwen3_next.FAMILY.sizes.items() if axis != "f"},
    "j": ("mtp_num_hidden_layers", ""),
}

MLX = (
    qwen3_5_text.MLX[0],
    "logical  axes  mlx: language_model.model.layers.{i}." + LAYER,
    qwen3_next.MLX.replace(*qwen3_5_text.AT_MLX),
    qwen2_moe.MLX.replace(*qwen3_5_text.AT_MLX),
    *qwen3_5_text.MLX[3:],
)

MCORE_LAYER = (
    qwen3_next.MCORE_ATTENTION + qwen2_moe.MCORE_EXPERTS.replace("norm_2_moe", "norm_2"),
    qwen3_moe.MCORE_NORMS,
    qwen2_moe.MCORE_SHARED,
    qwen2_moe.MCORE_SHARED_GATE,
)

MCORE = (
    *qwen3_5_text.MCORE,
    *MCORE_LAYER,
    qwen3_next.MCORE_MTP,
    *(table.replace(*qwen3_next.IN_MTP) for table in MCORE_LAYER),
)

FAMILY: Family = replace(
    qwen3_5_text.FAMILY,
    name="qwen3_5_moe_text",
    title="Qwen 3.5, Qwen 3.6 MoE, text only",
    layouts=("hf", "hf-3.5", "hf-fresh", "mlx", "mcore"),
    tables=(
        "logical  axes  hf: model." + qwen3_5_text.EMBED,
        "logical  axes  hf: model.layers.{i}." + LAYER,
        "logical  hf-fresh: model.layers.{i}." + APART,
        "logical  axes  hf: model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT,
        *MTP,
        *MLX,
        *MCORE,
    ),
    like={"hf-3.5": "hf", "hf-fresh": "hf", "mlx": ""},
    architecture="Qwen3_5MoeForCausalLM",
    kinds=qwen3_5_text.FAMILY.kinds,
    sizes={axis: (f"{name}|text_config.{name}", "") for axis, (name, _) in SIZES.items()},
    proofs=_proofs.get_proofs("hf", "hf-3.5", "hf-fresh", "mlx", "mcore"),
    megatron=_megatron.QWEN3_5_MOE_TEXT,
    config_signs=(
        {"model_type": "qwen3_5_moe_text"},
        {"model_type": "qwen3_5_moe", "vision_config": None},
    ),
    tiny={axis: size for axis, size in qwen3_next.FAMILY.tiny.items() if axis != "f"},
)
