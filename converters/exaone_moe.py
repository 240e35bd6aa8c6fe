"""K-EXAONE 236B-A23B: GLM-4.5's tensors, the correction bias next to the router, MTP layers.

In the MTP layers, the input of ``mtp_fc`` is the embedding, then the hidden state.

Sources: transformers' ``modeling_exaone_moe.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5, without MTP layers), vLLM's ``exaone_moe_mtp.py``, mlx-lm's
``exaone_moe.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, LayerKind

from . import _hf, _proofs, glm4_moe, qwen2_moe, qwen3_5_text

CORRECTION = """
logical      hf: model.layers.{i}.
router_bias  mlp.e_score_correction_bias
"""


FAMILY: Family = replace(
    glm4_moe.FAMILY,
    name="exaone_moe",
    title="K-EXAONE",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        _hf.BEFORE_V5,
        glm4_moe.LAYER,
        CORRECTION,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        qwen3_5_text.MTP,
        "logical  axes  hf: mtp.layers.{j}."
        + qwen3_5_text.MTP_ATTENTION.replace("(k q g e)", "(h e)")
        + qwen3_5_text.MTP_INPUT_NORM
        + qwen3_5_text.MTP_FEED_FORWARD,
        _hf.AFTER_V5,
    ),
    like={"mlx": "hf-v5"},
    architecture="ExaoneMoeForCausalLM",
    drops=(),
    unquantized=("mtp_fc",),
    shifts=(),
    formulas=(("s", "num_shared_experts * moe_intermediate_size"), ("dd", "2 * hidden_size")),
    kinds=(
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("moe", kinds=("is_moe_layer", True)),
        LayerKind("dense", first="first_k_dense_replace"),
    ),
    sizes=dict(glm4_moe.FAMILY.sizes) | {"x": ("num_experts", "")},
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    shown_by=("router",),
    config_signs=({"model_type": "exaone_moe"},),
    megatron=None,
    tiny=dict(glm4_moe.FAMILY.tiny) | {"j": 1},
)
