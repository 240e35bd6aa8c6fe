"""NVIDIA's ModelOpt: NVFP4 with block-wise and per-tensor scales, FP8 and MXFP8.

Source: ``to_quantized_weight`` in ``modelopt/torch/export/quant_utils.py`` and the classes in
``modelopt/torch/quantization/qtensor``; ``convert_hf_config.py`` for the config files.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.errors import MappingError
from ckptctl.numerics.quantization.formulas import Fp4Groups
from ckptctl.numerics.quantization.scheme import (
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)
from ckptctl.numerics.quantization.schemes.compressed_tensors import DROP_REASONS
from ckptctl.numerics.quantization.schemes.fp8 import FP8, build_fp8_weight
from ckptctl.numerics.quantization.statement import Json, QuantizationConfig
from ckptctl.units import pluralize

NVFP4_GROUP_SIZE, MX_GROUP_SIZE = 16, 32
MIXED_PRECISION = "MIXED_PRECISION"
FP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")


def _read_algorithm(group: TensorGroup, supported: tuple[str, ...]) -> Json:
    """Return the config settings of a layer, or raise if its ``quant_algo`` is not *supported*."""
    quant_config, settings = group.quant_config, group.quant_config.weight_settings
    if settings.get("quant_algo") == MIXED_PRECISION:
        layers = settings.get("quantized_layers")
        layer = layers.get(group.module) if isinstance(layers, Mapping) else None
        if not isinstance(layer, Mapping):
            raise group.missing_setting_error("quantized_layers", f"`{group.module}` is not listed")
        settings = layer
    name = settings.get("quant_algo")
    if name not in supported:
        why = f"`{group.lead.name}` is {group.lead.dtype}, which matches {', '.join(supported)}"
        raise MappingError(f"`quant_algo` is {name!r}", where=quant_config.where, why=why)
    return settings


def _build_nvfp4_weight(group: TensorGroup) -> QuantizedWeight:
    settings = _read_algorithm(group, FP4_ALGORITHMS)
    width = (
        QuantizationConfig(content=settings, where=group.quant_config.where).read_number(
            "group_size"
        )
        or NVFP4_GROUP_SIZE
    )
    scale, global_scale = group.parts["scale"], group.parts["global"]
    packed_shape = group.lead.shape
    shape = (*packed_shape[:-1], 2 * packed_shape[-1]) if len(packed_shape) > 1 else (0, 0)
    if width % 2 or not shape[-1] or shape[-1] % width:
        columns = pluralize(shape[-1], "column")
        raise group.mismatch_error(f"{columns} cannot be divided into groups of {width}")
    if scale.dtype != FP8 or scale.shape != (*shape[:-1], shape[-1] // width):
        raise group.mismatch_error(f"blocks of {width} require one {FP8} each", "scale")
    if global_scale.dtype != "float32" or global_scale.numel != 1:
        raise group.mismatch_error("expected one float32", "global")
    return group.build_weight(
        f"ModelOpt NVFP4 with blocks of {width}",
        "fp4_groups",
        shape,
        ("scale", "global"),
        Fp4Groups(width),
    )


def _build_fp8_weight(group: TensorGroup) -> QuantizedWeight:
    name = _read_algorithm(group, FP8_ALGORITHMS)["quant_algo"]
    scale, shape = group.parts["scale"], group.lead.shape
    if len(shape) != 2:
        raise group.mismatch_error("expected a matrix")
    rows, columns = shape
    if name == "MXFP8":
        if (
            columns % MX_GROUP_SIZE
            or scale.dtype != "uint8"
            or scale.shape != (rows, columns // MX_GROUP_SIZE)
        ):
            raise group.mismatch_error(
                f"blocks of {MX_GROUP_SIZE} require powers of two in uint8", "scale"
            )
        return build_fp8_weight(
            group, f"ModelOpt MXFP8 with blocks of {MX_GROUP_SIZE}", (1, MX_GROUP_SIZE)
        )
    has_one_scale = name == "FP8"
    if scale.dtype != "float32" or scale.numel != (1 if has_one_scale else rows):
        raise group.mismatch_error(
            f"expected {'one float32' if has_one_scale else 'one float32 per row'}", "scale"
        )
    scale_text = "one scale" if has_one_scale else "one scale per row"
    return build_fp8_weight(
        group, f"ModelOpt FP8 with {scale_text}", (rows if has_one_scale else 1, columns)
    )


SCHEMES = (
    Scheme(
        "ModelOpt",
        (
            NamingPattern(
                ".weight",
                ("uint8",),
                {
                    "scale": WeightPart(".weight_scale", always_required),
                    "global": WeightPart(".weight_scale_2", always_required),
                },
                _build_nvfp4_weight,
                unique_suffixes={".weight_scale_2": (), ".weight_scale": ()},
            ),
            NamingPattern(
                ".weight",
                (FP8,),
                {
                    "scale": WeightPart(".weight_scale", always_required),
                    "global": WeightPart(
                        ".weight_scale_2",
                        forbidden=lambda group: (
                            "`quant_algo` is "
                            f"{_read_algorithm(group, FP8_ALGORITHMS)['quant_algo']}"
                        ),
                    ),
                },
                _build_fp8_weight,
            ),
        ),
        methods=("modelopt", "modelopt_fp4"),
        drop_reasons=DROP_REASONS,
    ),
)
