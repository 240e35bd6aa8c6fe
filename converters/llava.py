"""LLaVA 1.5 and later: a CLIP vision tower and any text model with the names of Llama.

========  ======================================================================================
layout    where it is found
========  ======================================================================================
hf        on the Hub; transformers 5 reads it, and saves loaded models with these names
hf-v5     in-memory names of transformers 5
hf-fresh  saved by transformers 5 for new models, which it also reads
mlx       mlx-vlm, with channels-last convolutions
========  ======================================================================================

Sources: transformers' ``modeling_llava.py``, ``modeling_clip.py`` and ``conversion_mapping.py``
(``llava``, ``CLIPVisionModel``), mlx-vlm's ``models/llava``. Pixtral is another family.
"""

from ckptctl.planner.layouts import SIZES, Demand, Family, Tie

from . import _proofs, gemma3

ENDS = """
logical  axes  hf: language_model.
embed    v d   model.embed_tokens.weight
norm     d     model.norm.weight
output   v d   lm_head.weight
"""

LAYER = """
q           (h e) d  self_attn.q_proj.weight
q_bias?qkv  (h e)    self_attn.q_proj.bias
k           (k e) d  self_attn.k_proj.weight
k_bias?qkv  (k e)    self_attn.k_proj.bias
v           (k e) d  self_attn.v_proj.weight
v_bias?qkv  (k e)    self_attn.v_proj.bias
o           d (h e)  self_attn.o_proj.weight
q_norm?qk   e        self_attn.q_norm.weight
k_norm?qk   e        self_attn.k_norm.weight
w1          f d      mlp.gate_proj.weight
w3          f d      mlp.up_proj.weight
w2          d f      mlp.down_proj.weight
norm_1      d        input_layernorm.weight
norm_2      d        post_attention_layernorm.weight
"""

TEXT_LAYER = "logical  axes  hf: language_model.model.layers.{i}." + LAYER

CLIP = """
vision_class     vd           embeddings.class_embedding
vision_patch     vd vc ph pw  embeddings.patch_embedding.weight
vision_position  vp vd        embeddings.position_embedding.weight
vision_pre       vd           pre_layrnorm.weight
vision_pre_bias  vd           pre_layrnorm.bias
"""

PROJECTOR = """
logical                  axes  hf: multi_modal_projector.
adapter_w1               a vd  linear_1.weight
adapter_w1_bias?adapter  a     linear_1.bias
adapter_w2               d a   linear_2.weight
adapter_w2_bias?adapter  d     linear_2.bias
"""

TOWER = "logical  axes  hf: vision_tower.vision_model."
TOWER_LAYERS = TOWER + "encoder.layers.{j}." + gemma3.VISION_LAYER

PREFIXES = {
    "hf-v5": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.vision_model.": "model.vision_tower.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "image_newline": "model.image_newline",
    },
    "hf-fresh": {"vision_tower.vision_model.": "vision_tower."},
}

PATCHES = "vision_config.image_size / vision_config.patch_size"

FAMILY = Family(
    name="llava",
    title="LLaVA 1.5",
    layouts=("hf", "hf-v5", "hf-fresh", "mlx"),
    tables=(
        TOWER + CLIP + gemma3.VISION_NORM,
        TOWER_LAYERS,
        PROJECTOR,
        ENDS,
        TEXT_LAYER,
        gemma3.MLX,
    ),
    like={"hf-v5": "hf", "hf-fresh": "hf"},
    prefixes=PREFIXES,
    architecture="LlavaForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    demands=(
        Demand(("qkv",), {"text_config.model_type": "qwen2"}),
        Demand(("qk",), {"text_config.model_type": "qwen3"}),
    ),
    constants={"vc": 3},
    formulas=(
        ("vp", f"{PATCHES} * {PATCHES} + 1"),
        ("va", "vision_config.hidden_size"),
        ("vc", "vision_config.num_channels"),
        ("a", "text_config.hidden_size"),
    ),
    sizes={
        **{axis: (f"text_config.{names[0]}", "") for axis, names in SIZES.items()},
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "j": ("vision_config.num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "llava", "vision_config.model_type": "clip_vision_model"},),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2)
    | dict(vd=10, va=6, vf=14, vc=3, ph=2, pw=5, vp=9, a=18, j=2),
)
