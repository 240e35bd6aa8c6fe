"""Gemma 3 vision-language models, 4B to 27B: Gemma's text model with a SigLIP vision tower.

========  ======================================================================================
layout    where it is found
========  ======================================================================================
hf        on the Hub; transformers 5 reads it, and saves loaded models with these names
hf-v5     in-memory names of transformers 5
hf-fresh  saved by transformers 5 for new models, which it also reads
mlx       mlx-vlm, with channels-last convolutions
mcore     Megatron-Bridge, whose vision tower is the one of transformers 4
========  ======================================================================================

Sources: transformers' ``modeling_gemma3.py``, ``modeling_siglip.py`` and ``conversion_mapping.py``
(``llava``, ``CLIPVisionModel``), Megatron-Bridge's ``gemma3_vl_bridge.py`` and
``modeling_gemma3_vl.py``, mlx-vlm's ``models/gemma3``, which always stores the head.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _megatron, _proofs, gemma3_text

VISION_EMBED = """
vision_patch           vd vc ph pw  embeddings.patch_embedding.weight
vision_patch_bias      vd           embeddings.patch_embedding.bias
vision_position        vp vd        embeddings.position_embedding.weight
"""

VISION_LAYER = """
vision_q            va vd  self_attn.q_proj.weight
vision_q_bias       va     self_attn.q_proj.bias
vision_k            va vd  self_attn.k_proj.weight
vision_k_bias       va     self_attn.k_proj.bias
vision_v            va vd  self_attn.v_proj.weight
vision_v_bias       va     self_attn.v_proj.bias
vision_o            vd va  self_attn.out_proj.weight
vision_o_bias       vd     self_attn.out_proj.bias
vision_w1           vf vd  mlp.fc1.weight
vision_w1_bias      vf     mlp.fc1.bias
vision_w2           vd vf  mlp.fc2.weight
vision_w2_bias      vd     mlp.fc2.bias
vision_norm_1       vd     layer_norm1.weight
vision_norm_1_bias  vd     layer_norm1.bias
vision_norm_2       vd     layer_norm2.weight
vision_norm_2_bias  vd     layer_norm2.bias
"""

VISION_NORM = """
vision_norm       vd  post_layernorm.weight
vision_norm_bias  vd  post_layernorm.bias
"""

PROJECTOR = """
logical         axes  hf, hf-fresh: multi_modal_projector.  hf-v5: model.multi_modal_projector.
projector       vd d  mm_input_projection_weight            mm_input_projection_weight
projector_norm  vd    mm_soft_emb_norm.weight               mm_soft_emb_norm.weight
"""

MCORE_PROJECTOR = """
logical         mcore: multi_modal_projector.
projector       proj.weight d vd
projector_norm  mm_soft_embed_norm.weight
"""

OUTPUT = """
logical  axes  hf, hf-fresh                   hf-v5
output   v d   language_model.lm_head.weight  lm_head.weight
"""

MLX = """
logical       mlx: vision_tower.vision_model.
vision_patch  embeddings.patch_embedding.weight vd ph pw vc
"""

FAMILY: Family = replace(
    gemma3_text.FAMILY,
    name="gemma3",
    title="Gemma 3 4B, 12B, 27B",
    aliases=("gemma3_vlm", "medgemma"),
    layouts=("hf", "hf-v5", "hf-fresh", "mlx", "mcore"),
    tables=(
        "logical  axes  hf, mcore: vision_tower.vision_model." + VISION_EMBED,
        "logical  axes  hf, mcore: vision_tower.vision_model.encoder.layers.{j}." + VISION_LAYER,
        "logical  axes  hf, mcore: vision_tower.vision_model." + VISION_NORM,
        "logical  axes  hf-v5: model.vision_tower." + VISION_EMBED + VISION_NORM,
        "logical  axes  hf-v5: model.vision_tower.encoder.layers.{j}." + VISION_LAYER,
        "logical  axes  hf-fresh: vision_tower." + VISION_EMBED + VISION_NORM,
        "logical  axes  hf-fresh: vision_tower.encoder.layers.{j}." + VISION_LAYER,
        PROJECTOR,
        "logical  axes  hf, hf-fresh: language_model.model." + gemma3_text.EMBED,
        "logical  axes  hf, hf-fresh: language_model.model.layers.{i}." + gemma3_text.LAYER,
        "logical  axes  hf, hf-fresh: language_model.model." + gemma3_text.NORM,
        OUTPUT,
        "logical  axes  hf-v5: model.language_model." + gemma3_text.EMBED + gemma3_text.NORM,
        "logical  axes  hf-v5: model.language_model.layers.{i}." + gemma3_text.LAYER,
        "logical  mcore: language_model." + gemma3_text.MCORE_AROUND,
        "logical  mcore: language_model.decoder.layers.{i}." + gemma3_text.MCORE_LAYER,
        MCORE_PROJECTOR,
        MLX,
    ),
    architecture="Gemma3ForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5", "mlx")),),
    constants={"vc": 3},
    formulas=(
        ("e", "text_config.head_dim"),
        ("k", "text_config.num_key_value_heads"),
        ("vc", "vision_config.num_channels"),
        ("va", "vision_config.hidden_size"),
        (
            "vp",
            "vision_config.image_size / vision_config.patch_size"
            " * vision_config.image_size / vision_config.patch_size",
        ),
    ),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in gemma3_text.FAMILY.sizes.items()},
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "j": ("vision_config.num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx", mlx=_proofs.MLX_VLM),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "gemma3"},),
    megatron=_megatron.GEMMA3,
    tiny=dict(gemma3_text.FAMILY.tiny, vd=10, va=6, vf=14, ph=2, pw=5, vp=9, j=2),
)
