"""GLM-4.5V, GLM-4.6V 106B: GLM-4.5-Air with the vision tower of GLM-4.1V.

transformers 5 has packed experts in memory (``hf-v5``).

Sources: as for ``glm4v`` and ``glm4_moe``, and transformers' ``modeling_glm4v_moe.py``, mlx-vlm's
``models/glm4v_moe``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, glm4_moe, glm4v, qwen2_moe, qwen3_5_text

FAMILY: Family = replace(
    glm4_moe.FAMILY,
    name="glm4v_moe",
    title="GLM-4.5V, GLM-4.6V",
    aliases=("glm4_5v",),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        *glm4v.VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        glm4_moe.LAYER.replace("hf, hf-v5: model.", glm4v.AT_TEXT[1]),
        qwen2_moe.PACKED.replace("hf-v5: model.", "hf-v5: model.language_model."),
        qwen2_moe.MLX.replace(*qwen3_5_text.AT_MLX),
        qwen3_5_text.OUTPUT,
    ),
    like={"hf-v5": "hf"},
    prefixes=glm4v.PREFIXES,
    architecture="Glm4vMoeForConditionalGeneration",
    drops=(),
    unquantized=(),
    shifts=(),
    formulas=(
        *glm4v.FORMULAS,
        ("s", "text_config.n_shared_experts * text_config.moe_intermediate_size"),
    ),
    kinds=tuple(kind.with_prefix("text_config") for kind in glm4_moe.FAMILY.kinds),
    sizes={
        **{a: (f"text_config.{n[0]}", "") for a, n in glm4_moe.FAMILY.sizes.items()},
        **glm4v.SIZES,
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "glm4v_moe"},),
    megatron=None,
    tiny={a: n for a, n in glm4_moe.FAMILY.tiny.items() if a != "dd"} | glm4v.TINY,
)
