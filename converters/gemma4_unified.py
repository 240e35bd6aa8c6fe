"""Gemma 4 12B: image patches and audio frames go into the language model without towers.

The text model is that of ``gemma4_text`` under another prefix; mlx-lm has only the text model.

Sources: transformers' ``modeling_gemma4_unified.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5), mlx-lm's ``gemma4.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Demand, Family, Tie

from . import _proofs, gemma4, gemma4_text

VISION = """
logical                       axes       hf: model.                               hf-v5: model.embed_vision.
vision_norm_1?vision          pp         vision_embedder.patch_ln1.weight         patch_ln1.weight
vision_norm_1_bias?vision     pp         vision_embedder.patch_ln1.bias           patch_ln1.bias
vision_patch?vision           vd pp      vision_embedder.patch_dense.weight       patch_dense.weight
vision_patch_bias?vision      vd         vision_embedder.patch_dense.bias         patch_dense.bias
vision_norm_2?vision          vd         vision_embedder.patch_ln2.weight         patch_ln2.weight
vision_norm_2_bias?vision     vd         vision_embedder.patch_ln2.bias           patch_ln2.bias
vision_position?vision        vp two vd  vision_embedder.pos_embedding            pos_embedding
vision_norm_3?vision          vd         vision_embedder.pos_norm.weight          pos_norm.weight
vision_norm_3_bias?vision     vd         vision_embedder.pos_norm.bias            pos_norm.bias
vision_projector?vision       d vo       embed_vision.embedding_projection.weight  multimodal_embedder.embedding_projection.weight
"""  # noqa: E501

AUDIO = """
logical                axes  hf: model.
audio_projector?audio  d ao  embed_audio.embedding_projection.weight
"""

FAMILY: Family = replace(
    gemma4_text.FAMILY,
    name="gemma4_unified",
    title="Gemma 4 12B",
    layouts=("hf", "hf-v5", "mlx"),
    like={"hf-v5": "hf", "mlx": ""},
    tables=(
        VISION,
        AUDIO,
        "logical  axes  hf: model.language_model." + gemma4_text.EMBED,
        "logical  axes  hf: model.language_model.layers.{i}." + gemma4_text.LAYER,
        "logical  axes  hf: model.language_model." + gemma4_text.NORM,
        gemma4_text.OUTPUT,
        "logical  axes  mlx: language_model.model." + gemma4_text.EMBED,
        "logical  axes  mlx: language_model.model.layers.{i}." + gemma4_text.LAYER,
        "logical  axes  mlx: language_model.model." + gemma4_text.NORM,
        gemma4.MLX_OUTPUT,
    ),
    architecture="Gemma4UnifiedForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    constants={"one": 1, "two": 2},
    composite={},
    free=("e", "f"),
    layer_words=(),
    fills=(),
    demands=(
        *(demand.with_prefix("text_config") for demand in gemma4_text.KEYS),
        Demand(("vision",), {"vision_config": PRESENT}),
        Demand(("audio",), {"audio_config": PRESENT}),
    ),
    layer_sizes=tuple(one.with_prefix("text_config") for one in gemma4_text.LAYER_SIZES),
    formulas=(
        ("pd", "text_config.hidden_size_per_layer_input"),
        ("pa", "text_config.num_hidden_layers * text_config.hidden_size_per_layer_input"),
    ),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in gemma4_text.SIZES.items()},
        "vd": ("vision_config.mm_embed_dim", ""),
        "vp": ("vision_config.mm_posemb_size", ""),
        "vo": ("vision_config.output_proj_dims", ""),
        "ao": ("audio_config.audio_embed_dim", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "gemma4_unified"},),
    tiny={"v": 24, "d": 20, "f": 12, "h": 8, "k": 4, "e": 4, "i": 2}
    | {"vd": 10, "vp": 9, "pp": 15, "vo": 10, "ao": 13},
)
