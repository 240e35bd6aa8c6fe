"""MLX: integers with a scale and a bias for each group of a row, or 4- or 8-bit floats.

A row of elements is a row of uint32 with the first element in the lowest bits. ``quantization`` in
config.json states the group size and the bits of an element, for all layers and, by module path,
for individual layers.

Sources: ``mlx.core.quantize`` (0.32.4); mlx-lm's ``utils.py`` (0.32.2), ``load_model`` and
``quantize_model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.numerics.quantization.formulas import MlxGroups
from ckptctl.numerics.quantization.scheme import (
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)
from ckptctl.numerics.quantization.statement import QuantizationConfig
from ckptctl.units import pluralize

FLOATS = ("float32", "bfloat16", "float16")
GROUP_SIZES = (32, 64, 128)
BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
FLOAT_MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group size and bits of an element, by mode with floating-point elements."""
AFFINE_MODE = "affine"
WORD_BITS = 32


def _build_weight(group: TensorGroup) -> QuantizedWeight:
    mode, size, bits = _read_settings(group)
    packed, scales = group.lead, group.parts["scales"]
    if len(packed.shape) < 2 or packed.shape[:-1] != scales.shape[:-1]:
        raise group.mismatch_error("expected a scale for each group of each row", "scales")
    *lead, group_count = scales.shape
    if packed.shape[-1] * WORD_BITS != group_count * size * bits:
        raise group.mismatch_error(
            f"expected {pluralize(group_count, 'group')} of {pluralize(size, 'element')} of "
            f"{bits} bits",
            "scales",
        )
    kind_name = "mlx_affine" if mode == AFFINE_MODE else "mlx_float"
    _require_scales(group, mode)
    mode_text = f"{bits} bits" if mode == AFFINE_MODE else mode
    return group.build_weight(
        f"MLX {mode_text} with groups of {size}",
        kind_name,
        (*lead, group_count * size),
        ("scales", "biases"),
        MlxGroups(size, bits, mode),
    )


def _require_scales(group: TensorGroup, mode: str) -> None:
    """Raise if scales or biases do not have the dtypes and shapes of *mode*."""
    scales = group.parts["scales"]
    if mode != AFFINE_MODE:
        if scales.dtype != "uint8":
            raise group.mismatch_error(f"{mode} requires one-byte scales", "scales")
        return
    if scales.dtype not in FLOATS:
        raise group.mismatch_error(f"scales must be one of {', '.join(FLOATS)}", "scales")
    biases = group.parts["biases"]
    if (biases.dtype, biases.shape) != (scales.dtype, scales.shape):
        raise group.mismatch_error("biases must match the scales in number and dtype", "biases")


def _read_settings(group: TensorGroup) -> tuple[str, int, int]:
    """Read the mode, the group size and the bits of an element from the layer's config."""
    quant_config = group.quant_config
    layer_settings = quant_config.content.get(group.module)
    if layer_settings is False:
        raise quant_config.invalid_value_error(group.module, "it has scales, so it is quantized")
    if isinstance(layer_settings, Mapping):
        quant_config = QuantizationConfig(
            quant_config.method, layer_settings, f"{group.module} in {quant_config.where}"
        )
        group = replace(group, quant_config=quant_config)
    mode = quant_config.content.get("mode", AFFINE_MODE)
    if isinstance(mode, str) and mode in FLOAT_MODES:
        size, bits = FLOAT_MODES[mode]
        for key, value in (("group_size", size), ("bits", bits)):
            if quant_config.read_number(key) not in (None, value):
                raise quant_config.invalid_value_error(key, f"{mode} requires {value}")
        return mode, size, bits
    if mode != AFFINE_MODE:
        raise quant_config.invalid_value_error(
            "mode", f"expected one of {', '.join((AFFINE_MODE, *FLOAT_MODES))}"
        )
    values = {key: quant_config.read_number(key) for key in ("group_size", "bits")}
    for key, allowed in (("group_size", GROUP_SIZES), ("bits", BIT_WIDTHS)):
        if values[key] not in allowed:
            raise group.missing_setting_error(
                key, f"expected one of {', '.join(map(str, allowed))}"
            )
    return AFFINE_MODE, int(values["group_size"] or 0), int(values["bits"] or 0)


def _bias_reason(group: TensorGroup) -> str | None:
    mode, _, _ = _read_settings(group)
    return f"`mode` is {mode}, which has a bias for each group" if mode == AFFINE_MODE else None


def _no_bias_reason(group: TensorGroup) -> str | None:
    mode, _, _ = _read_settings(group)
    return f"`mode` is {mode}" if mode != AFFINE_MODE else None


SCHEMES = (
    Scheme(
        "MLX",
        (
            NamingPattern(
                ".weight",
                ("uint32",),
                {
                    "scales": WeightPart(".scales", always_required),
                    "biases": WeightPart(".biases", _bias_reason, _no_bias_reason),
                    "global": WeightPart(
                        ".global_scale",
                        forbidden=lambda _: (
                            "a per-tensor scale in addition to group scales is not supported"
                        ),
                    ),
                },
                _build_weight,
                unique_suffixes={".biases": (), ".weight": ("uint32",), ".scales": ("uint8",)},
            ),
        ),
        methods=("mlx",),
    ),
)
