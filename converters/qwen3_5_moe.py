"""Qwen 3.5 and 3.6 vision-language models with experts: 35B-A3B to 397B-A17B.

The layouts are those of ``qwen3_5_moe_text``, and torchtitan's. torchtitan's own adapter transposes
the experts, because it assumes Qwen 3 VL's order for Qwen 3.5.

Sources: as for ``qwen3_5_moe_text`` and ``qwen3_5``; torchtitan's ``models/common/moe.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Drop, Family, Tie

from . import _proofs, qwen3_5, qwen3_5_moe_text, qwen3_5_text

TITAN_EXPERTS = """
logical      torchtitan@0.3: layers.{i}.
router       moe.router.gate.weight
expert_w1    moe.routed_experts.inner_experts.w1_EFD
expert_w3    moe.routed_experts.inner_experts.w3_EFD
expert_w2    moe.routed_experts.inner_experts.w2_EDF
shared_w1    moe.shared_experts.w1.weight
shared_w3    moe.shared_experts.w3.weight
shared_w2    moe.shared_experts.w2.weight
shared_gate  moe.shared_experts.gate.weight
"""

FAMILY: Family = replace(
    qwen3_5_moe_text.FAMILY,
    name="qwen3_5_moe",
    title="Qwen 3.5, Qwen 3.6 MoE",
    aliases=("qwen3_6_moe",),
    layouts=("hf", "hf-3.5", "hf-fresh", "torchtitan@0.3", "mlx"),
    tables=(
        *qwen3_5.VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED,
        "logical  axes  hf: model.language_model.layers.{i}." + qwen3_5_moe_text.LAYER,
        "logical  hf-fresh: model.language_model.layers.{i}." + qwen3_5_moe_text.APART,
        "logical  axes  hf: model.language_model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT,
        *qwen3_5_moe_text.MTP,
        *qwen3_5.TITAN,
        qwen3_5.TITAN_NORM,
        TITAN_EXPERTS,
        *qwen3_5.MLX_VISUAL,
        *qwen3_5_moe_text.MLX,
    ),
    like={"hf-3.5": "hf", "hf-fresh": "hf", "mlx": ""},
    architecture="Qwen3_5MoeForConditionalGeneration",
    drops=(
        Drop(
            "torchtitan@0.3",
            "layers.{i}.moe.expert_bias_E",
            "Qwen 3.5 routes without a bias for load balancing",
            zeros="x",
            next_to="router",
        ),
    ),
    ties=(Tie("output", of="embed", stored_in=("torchtitan@0.3",)),),
    formulas=(*qwen3_5.VISION_FORMULAS, ("dd", "2 * text_config.hidden_size")),
    kinds=tuple(kind.with_prefix("text_config") for kind in qwen3_5_text.FAMILY.kinds),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in qwen3_5_moe_text.SIZES.items()},
        **qwen3_5.VISION_SIZES,
    },
    proofs=_proofs.get_proofs(
        "hf", "hf-3.5", "hf-fresh", "torchtitan@0.3", "mlx", mlx=_proofs.MLX_VLM
    ),
    config_signs=({"model_type": "qwen3_5_moe", "vision_config": PRESENT},),
    tiny={**qwen3_5_moe_text.FAMILY.tiny, **qwen3_5.VISION_TINY},
)
