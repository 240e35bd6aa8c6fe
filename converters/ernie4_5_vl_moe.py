"""ERNIE 4.5 VL 28B-A3B: experts of text and smaller ones of pictures, a resampler.

Files number the experts of pictures after those of text, of which there are as many, and stack the
correction biases of both. transformers saves the vision tower with the prefix ``model.``
(``hf-fresh``), and reads both names. In memory (``hf-v5``) and in mlx-vlm (``mlx``), both kinds of
experts are separate.

The published config.json has the model type ``ernie4_5_moe_vl`` and no ``text_config``, and lists
sizes of text before those of pictures. mlx-vlm reads only this one, transformers only its own.

Sources: transformers' ``modeling_ernie4_5_vl_moe.py`` and ``conversion_mapping.py``
(``ErnieFuseAndSplitTextVisionExperts``), vLLM's ``ernie45_vl.py`` (names on the Hub), mlx-vlm's
``models/ernie4_5_moe_vl``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import SECOND_HALF, Family, LayerKind, Shift, Tie

from . import _hf, _proofs, ernie4_5_moe, granitemoe, qwen2_moe

VISION = """
logical           axes   hf: vision_model.
vision_patch      vd vp  patch_embed.proj.weight
vision_post       vd     ln.weight
vision_post_bias  vd     ln.bias
"""

VISION_LAYER = """
logical             axes   hf: vision_model.blocks.{u}.
vision_norm_1       vd     norm1.weight
vision_norm_1_bias  vd     norm1.bias
vision_norm_2       vd     norm2.weight
vision_norm_2_bias  vd     norm2.bias
vision_q            va vd  attn.qkv.weight#0
vision_k            va vd  attn.qkv.weight#1
vision_v            va vd  attn.qkv.weight#2
vision_q_bias       va     attn.qkv.bias#0
vision_k_bias       va     attn.qkv.bias#1
vision_v_bias       va     attn.qkv.bias#2
vision_o            vd va  attn.proj.weight
vision_o_bias       vd     attn.proj.bias
vision_w1           vf vd  mlp.fc1.weight
vision_w1_bias      vf     mlp.fc1.bias
vision_w2           vd vf  mlp.fc2.weight
vision_w2_bias      vd     mlp.fc2.bias
"""

RESAMPLER = """
logical             axes   hf: model.resampler_model.  hf-v5: model.resampler_model.
spatial_w1          rd rs  spatial_linear.0.weight     spatial_linear.fc1.weight
spatial_w1_bias     rd     spatial_linear.0.bias       spatial_linear.fc1.bias
spatial_w2          rd rs  spatial_linear.2.weight     spatial_linear.fc2.weight
spatial_w2_bias     rd     spatial_linear.2.bias       spatial_linear.fc2.bias
spatial_norm        rd     spatial_linear.3.weight     spatial_linear.ln.weight
spatial_norm_bias   rd     spatial_linear.3.bias       spatial_linear.ln.bias
temporal_w1         rd rt  temporal_linear.0.weight    temporal_linear.fc1.weight
temporal_w1_bias    rd     temporal_linear.0.bias      temporal_linear.fc1.bias
temporal_w2         rd rs  temporal_linear.2.weight    temporal_linear.fc2.weight
temporal_w2_bias    rd     temporal_linear.2.bias      temporal_linear.fc2.bias
temporal_norm       rd     temporal_linear.3.weight    temporal_linear.ln.weight
temporal_norm_bias  rd     temporal_linear.3.bias      temporal_linear.ln.bias
adapter             d rs   mlp.weight                  mlp.weight
adapter_bias        d      mlp.bias                    mlp.bias
adapter_norm        d      after_norm.weight           after_norm.weight
"""

EXPERTS = """
logical      hf: model.layers.{i}.mlp.                  hf-v5: model.language_model.layers.{i}.mlp.text_moe.
router       gate.weight d x                            gate.weight
router_bias  moe_statics.e_score_correction_bias#0      gate.moe_statics.e_score_correction_bias
expert_w1    experts.{x}.gate_proj.weight               experts.gate_up_proj#0.1
expert_w3    experts.{x}.up_proj.weight                 experts.gate_up_proj#1.1
expert_w2    experts.{x}.down_proj.weight               experts.down_proj
"""  # noqa: E501

VISION_EXPERTS = """
logical                 axes    hf: model.layers.{i}.mlp.              hf-v5: model.language_model.layers.{i}.mlp.vision_moe.
vision_router@moe       y d     gate.weight_1 d y                      gate.weight
vision_router_bias@moe  one y   moe_statics.e_score_correction_bias#1  gate.moe_statics.e_score_correction_bias
vision_expert_w1@moe    y vm d  experts.{y}.gate_proj.weight           experts.gate_up_proj#0.1
vision_expert_w3@moe    y vm d  experts.{y}.up_proj.weight             experts.gate_up_proj#1.1
vision_expert_w2@moe    y d vm  experts.{y}.down_proj.weight           experts.down_proj
"""  # noqa: E501

MLX = """
logical             mlx: resampler_model.
spatial_w1          spatial_linear.layers.0.weight
spatial_w1_bias     spatial_linear.layers.0.bias
spatial_w2          spatial_linear.layers.2.weight
spatial_w2_bias     spatial_linear.layers.2.bias
spatial_norm        spatial_linear.layers.3.weight
spatial_norm_bias   spatial_linear.layers.3.bias
temporal_w1         temporal_linear.layers.0.weight
temporal_w1_bias    temporal_linear.layers.0.bias
temporal_w2         temporal_linear.layers.2.weight
temporal_w2_bias    temporal_linear.layers.2.bias
temporal_norm       temporal_linear.layers.3.weight
temporal_norm_bias  temporal_linear.layers.3.bias
"""

MLX_EXPERTS = """
logical             mlx: language_model.model.layers.{i}.mlp.
router              gate.weight
router_bias         e_score_correction_bias (one x)
expert_w1           switch_mlp.gate_proj.weight
expert_w3           switch_mlp.up_proj.weight
expert_w2           switch_mlp.down_proj.weight
vision_router       gate_1.weight
vision_router_bias  e_score_correction_bias_1 (one y)
vision_expert_w1    switch_mlp_1.gate_proj.weight
vision_expert_w3    switch_mlp_1.up_proj.weight
vision_expert_w2    switch_mlp_1.down_proj.weight
"""

FAMILY: Family = replace(
    ernie4_5_moe.FAMILY,
    name="ernie4_5_vl_moe",
    title="ERNIE 4.5 VL",
    aliases=("ernie4_5_vl", "ernie4_5_moe_vl"),
    layouts=("hf", "hf-v5", "hf-fresh", "mlx"),
    tables=(
        VISION,
        VISION_LAYER,
        RESAMPLER,
        _hf.BEFORE,
        qwen2_moe.LAYER + qwen2_moe.FEED_FORWARD + granitemoe.NORMS + ernie4_5_moe.SHARED,
        EXPERTS,
        VISION_EXPERTS,
        MLX,
        MLX_EXPERTS,
        _hf.AFTER,
    ),
    like={"hf-v5": "hf", "hf-fresh": "hf"},
    prefixes={
        "hf-v5": {"vision_model.": "model.vision_tower.", "model.": "model.language_model."},
        "hf-fresh": {"vision_model.": "model.vision_model."},
        "mlx": {
            "vision_model.": "vision_tower.",
            "model.resampler_model.": "resampler_model.",
            "model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
        },
    },
    architecture="Ernie4_5_VLMoeForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    pinned=("router_bias", "vision_router_bias"),
    shifts=tuple(Shift(layout, "y", "x", SECOND_HALF) for layout in ("hf", "hf-fresh")),
    kinds=(
        LayerKind("moe", kinds=("text_config.mlp_layer_types", "sparse")),
        LayerKind(
            "moe",
            after="moe_layer_start_index.0",
            every="moe_layer_interval",
            last="moe_layer_end_index.0",
        ),
    ),
    formulas=(
        ("va", "vision_config.hidden_size"),
        (
            "vp",
            "vision_config.in_channels * vision_config.patch_size * vision_config.patch_size",
        ),
        *(
            (
                axis,
                "vision_config.hidden_size * vision_config.spatial_merge_size"
                " * vision_config.spatial_merge_size" + times,
            )
            for axis, times in (
                ("rd", ""),
                ("rs", ""),
                ("rt", " * vision_config.temporal_merge_size"),
            )
        ),
        ("s", "moe_num_shared_experts * moe_intermediate_size.0"),
        ("s", "text_config.moe_num_shared_experts * moe_intermediate_size.0"),
    ),
    sizes={
        **{a: (f"{n[0]}|text_config.{n[0]}", "") for a, n in ernie4_5_moe.FAMILY.sizes.items()},
        "x": ("moe_num_experts.0|text_config.moe_num_experts", ""),
        "y": ("moe_num_experts.1|text_config.moe_num_experts", ""),
        "m": ("moe_intermediate_size.0|text_config.moe_intermediate_size.0", ""),
        "vm": ("moe_intermediate_size.1|text_config.moe_intermediate_size.1", ""),
        "vd": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "u": ("vision_config.depth", ""),
    },
    experts_apart=True,
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx", mlx=_proofs.MLX_VLM),
    shown_by=None,
    config_signs=({"model_type": "ernie4_5_vl_moe"}, {"model_type": "ernie4_5_moe_vl"}),
    tiny={
        **{name: size for name, size in ernie4_5_moe.FAMILY.tiny.items() if name != "dd"},
        **dict(y=ernie4_5_moe.FAMILY.tiny["x"], vm=22, vd=18, va=26, vf=30, vp=27, u=2),
        **dict(rd=34, rs=38, rt=42),
    },
)
