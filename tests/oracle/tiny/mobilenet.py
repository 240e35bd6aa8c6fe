"""A small MobileNet-V5 for Gemma 3n: the blocks of ``mobilenetv5_300m_enc`` with few channels."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.oracle import shims

NAME = "mobilenetv5_tiny_enc"
FEATURES = 32
"""Channels of the result."""
SIDE = 2
"""Rows and columns of the result, each position of which is a token."""
STEM = 64
"""Channels of the first convolution, of which mlx-vlm knows no other number."""
STAGES = (
    ["er_r1_k3_s2_e0.125_c8", *["er_r1_k3_s1_e2_c8"] * 2],
    ["uir_r1_a3_k5_s2_e2_c8", *[f"uir_r1_a{size}_k0_s1_e3_c8" for size in (5, 3, 5, 3)]],
    [
        "uir_r1_a5_k5_s2_e2_c8",
        *["uir_r1_a5_k0_s1_e2_c8"] * 7,
        "uir_r1_a0_k0_s1_e1_c8",
        *["mqa_r1_k3_h3_v2_s1_d4_c8", "uir_r1_a0_k0_s1_e2_c8"] * 14,
    ],
    ["uir_r1_a5_k5_s2_e2_c16", *["mqa_r1_k3_h2_s1_d5_c16", "uir_r1_a0_k0_s1_e1_c16"] * 19],
)


def register() -> str:
    """Let timm know the architecture, and return its name."""
    shims.timm()
    from timm.models import is_model, register_model

    if not is_model(NAME):
        register_model(mobilenetv5_tiny_enc)
    return NAME


def mobilenetv5_tiny_enc(pretrained: bool = False, **options: Any) -> Any:
    """Return timm's encoder with these blocks and its adapter with few features."""
    from timm.models import mobilenetv5
    from timm.models._efficientnet_builder import decode_arch_def, round_channels

    norm, act = mobilenetv5.RmsNorm2d, mobilenetv5._GELU
    model = mobilenetv5.MobileNetV5Encoder(
        decode_arch_def([list(stage) for stage in STAGES]),
        stem_size=STEM,
        fix_stem=True,
        msfa_output_resolution=SIDE,
        round_chs_fn=partial(round_channels, multiplier=1.0),
        pad_type="same",
        layer_scale_init_value=1e-5,
    )
    model.num_features = model.head_hidden_size = FEATURES
    model.msfa = mobilenetv5.MobileNetV5MultiScaleFusionAdapter(
        model.msfa_in_chs, FEATURES, SIDE, norm_layer=norm, act_layer=act
    )
    return model
