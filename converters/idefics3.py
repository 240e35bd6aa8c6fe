"""Idefics 3 and SmolVLM: a SigLIP vision tower, a shuffle of pixels, Llama's text model.

SmolVLM 2 has another ``model_type`` and the same tensors. Sources: transformers'
``modeling_idefics3.py`` and ``modeling_smolvlm.py``, mlx-vlm's ``models/idefics3``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _proofs, gemma3, llava, llava_onevision, qwen3_5_text

TOWER = "logical  axes  hf: model.vision_model."

CONNECTOR = """
logical    axes  hf: model.connector.
projector  d u   modality_projection.proj.weight
"""

MLX = """
logical       mlx: vision_model.
vision_patch  embeddings.patch_embedding.weight vd ph pw vc
"""

FAMILY: Family = replace(
    llava_onevision.FAMILY,
    name="idefics3",
    title="Idefics 3, SmolVLM",
    aliases=("smolvlm", "smolvlm2"),
    layouts=("hf", "mlx"),
    tables=(
        TOWER + gemma3.VISION_EMBED + gemma3.VISION_NORM,
        TOWER + "encoder.layers.{j}." + gemma3.VISION_LAYER,
        CONNECTOR,
        "logical  axes  hf: model.text_model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        "logical  axes  hf: model.text_model.layers.{i}." + llava.LAYER,
        qwen3_5_text.OUTPUT,
        MLX,
    ),
    like={},
    prefixes={
        "mlx": {
            "model.text_model.": "language_model.",
            "lm_head.": "language_model.lm_head.",
            "model.": "",
        }
    },
    architecture="Idefics3ForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("mlx",)),),
    formulas=(
        *llava_onevision.FAMILY.formulas[:3],
        ("u", "vision_config.hidden_size * scale_factor * scale_factor"),
    ),
    proofs=_proofs.get_proofs("hf", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "idefics3"}, {"model_type": "smolvlm"}),
    tiny={"u": 40} | {a: n for a, n in llava.FAMILY.tiny.items() if a != "a"},
)
