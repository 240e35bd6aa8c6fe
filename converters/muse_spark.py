"""Muse Spark 816B-A42B: Muse Glimmer with experts in a smaller space, gates on residuals and audio.

Norms multiply by 1 + weight. Layers without RoPE have the same tensors. The experts are stacked.

mlx-vlm stores computed gates and norms, so its files are not a layout of this model. Sources:
transformers' ``modeling_muse_spark.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Demand, Family, LayerKind, Tie

from . import _proofs, muse_glimmer

LAYER = """
logical             axes     hf: model.language_model.layers.{i}.
norm_1              d        input_layernorm.weight
q                   (h e) d  self_attn.q_proj.weight
q_bias?qkvo         (h e)    self_attn.q_proj.bias
k                   (k e) d  self_attn.k_proj.weight
k_bias?qkvo         (k e)    self_attn.k_proj.bias
v                   (k e) d  self_attn.v_proj.weight
v_bias?qkvo         (k e)    self_attn.v_proj.bias
gate                (h e) d  self_attn.gate_proj.weight
o                   d (h e)  self_attn.o_proj.weight
o_bias?qkvo         d        self_attn.o_proj.bias
residual_1          d        post_attention_residual_gate.gate
norm_2@dense        d        pre_feedforward_layernorm.weight
w1@dense            f d      mlp.gate_proj.weight
w3@dense            f d      mlp.up_proj.weight
w2@dense            d f      mlp.down_proj.weight
norm_2_moe@moe      d        pre_feedforward_layernorm.weight
router@moe          x d      mlp.gate.weight
router_bias@moe     x        mlp.gate.e_score_correction_bias
pool@moe            l d      mlp.pre_expert_proj.weight
pool_norm@moe       l        mlp.pre_expert_norm.weight
expert_w1@moe       x m l    mlp.experts.gate_up_proj#0.1
expert_w3@moe       x m l    mlp.experts.gate_up_proj#1.1
expert_w2@moe       x l m    mlp.experts.down_proj
expert_norm@moe     l        mlp.experts.post_expert_norm.weight
unpool@moe          d l      mlp.post_expert_proj.weight
norm_2_post         d        post_feedforward_layernorm.weight
residual_2          d        post_feedforward_residual_gate.gate
"""

AUDIO = """
logical                       axes    hf: model.audio_tower.
audio_norm?audio              ad      norm.weight
audio_projector?audio         an ad   proj.weight
audio_projector_bias?audio    an      proj.bias
audio_projector_norm?audio    an      post_proj_norm.weight
"""

AUDIO_STAGE = """
logical                 axes   hf: model.audio_tower.layers.{n}.patch_embedder.
audio_patch?audio       ah ap  proj.weight
audio_patch_bias?audio  ah     proj.bias
audio_patch_norm?audio  ah     norm.weight
"""

AUDIO_BLOCK = """
logical                axes         hf: model.audio_tower.layers.{n}.conv_blocks.{b}.
audio_conv?audio       ah one taps  conv.weight
audio_conv_bias?audio  ah           conv.bias
audio_conv_norm?audio  ah           norm.weight
audio_w1?audio         af ah        mlp.fc1.weight
audio_w1_bias?audio    af           mlp.fc1.bias
audio_w2?audio         ah af        mlp.fc2.weight
audio_w2_bias?audio    ah           mlp.fc2.bias
"""

FAMILY: Family = replace(
    muse_glimmer.FAMILY,
    name="muse_spark",
    title="Muse Spark 816B-A42B",
    layouts=("hf",),
    tables=(
        muse_glimmer.PATCHES,
        muse_glimmer.VISION_LAYER,
        muse_glimmer.ADAPTER,
        AUDIO,
        AUDIO_STAGE,
        AUDIO_BLOCK,
        muse_glimmer.BEFORE,
        LAYER,
        muse_glimmer.AFTER,
    ),
    architecture="MuseSparkForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    constants={"p": 2, "one": 1},
    composite={"ve": ("vr", "p")},
    pinned=("router_bias",),
    variants=(("dense", "moe"),),
    demands=(Demand(("audio",), {"audio_config": PRESENT}),),
    kinds=(LayerKind("moe", kinds=("text_config.mlp_layer_types", "sparse")),),
    free=("ah", "ap", "af"),
    sizes={
        **muse_glimmer.FAMILY.sizes,
        "x": ("text_config.num_local_experts", ""),
        "m": ("text_config.moe_intermediate_size", ""),
        "l": ("text_config.moe_hidden_size", ""),
        "an": ("audio_config.out_hidden_size", ""),
        "taps": ("audio_config.conv_kernel_size", ""),
        "n": ("audio_config.num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf"),
    config_signs=({"model_type": "muse_spark"},),
    tiny={**muse_glimmer.FAMILY.tiny, "x": 3, "m": 14, "l": 26, "n": 2, "b": 2}
    | {"ad": 11, "an": 15, "ah": 13, "ap": 6, "af": 17, "taps": 3},
)
