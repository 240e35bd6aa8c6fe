"""NVIDIA's ModelOpt: NVFP4 with scales of blocks and of the tensor, FP8 and MXFP8.

Source: ``to_quantized_weight`` in ``modelopt/torch/export/quant_utils.py`` and the classes in
``modelopt/torch/quantization/qtensor``; ``convert_hf_config.py`` for the config files.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.errors import MappingError
from ckptctl.numerics.quantization.formulas import Fp4Groups
from ckptctl.numerics.quantization.scheme import (
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)
from ckptctl.numerics.quantization.schemes.compressed_tensors import DROPPED
from ckptctl.numerics.quantization.schemes.fp8 import FP8, scaled
from ckptctl.numerics.quantization.statement import Json, QuantizationStatement
from ckptctl.units import pluralize

NVFP4, MX = 16, 32
MIXED = "MIXED_PRECISION"
OF_FP4 = ("NVFP4", "W4A16_NVFP4")
OF_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")


def _algorithm(group: Group, known: tuple[str, ...]) -> Json:
    """Return the settings of a layer's algorithm, which must be one of *known*."""
    said, found = group.statement, group.statement.inner
    if found.get("quant_algo") == MIXED:
        layers = found.get("quantized_layers")
        layer = layers.get(group.module) if isinstance(layers, Mapping) else None
        if not isinstance(layer, Mapping):
            raise group.unstated("quantized_layers", f"`{group.module}` is not listed")
        found = layer
    name = found.get("quant_algo")
    if name not in known:
        why = f"`{group.lead.name}` is {group.lead.dtype}, which matches {', '.join(known)}"
        raise MappingError(f"`quant_algo` is {name!r}", where=said.where, why=why)
    return found


def _nvfp4(group: Group) -> QuantizedWeight:
    found = _algorithm(group, OF_FP4)
    width = (
        QuantizationStatement(content=found, where=group.statement.where).number("group_size")
        or NVFP4
    )
    scale, whole = group.parts["scale"], group.parts["global"]
    lead = group.lead.shape
    shape = (*lead[:-1], 2 * lead[-1]) if len(lead) > 1 else (0, 0)
    if width % 2 or not shape[-1] or shape[-1] % width:
        columns = pluralize(shape[-1], "column")
        raise group.unfit(f"{columns} cannot be divided into groups of {width}")
    if scale.dtype != FP8 or scale.shape != (*shape[:-1], shape[-1] // width):
        raise group.unfit(f"blocks of {width} require one {FP8} each", "scale")
    if whole.dtype != "float32" or whole.numel != 1:
        raise group.unfit("expected one float32", "global")
    return group.quantized(
        f"ModelOpt NVFP4 with blocks of {width}",
        "fp4_groups",
        shape,
        ("scale", "global"),
        Fp4Groups(width),
    )


def _fp8(group: Group) -> QuantizedWeight:
    name = _algorithm(group, OF_FP8)["quant_algo"]
    scale, shape = group.parts["scale"], group.lead.shape
    if len(shape) != 2:
        raise group.unfit("expected a matrix")
    rows, columns = shape
    if name == "MXFP8":
        if columns % MX or scale.dtype != "uint8" or scale.shape != (rows, columns // MX):
            raise group.unfit(f"blocks of {MX} require powers of two in uint8", "scale")
        return scaled(group, f"ModelOpt MXFP8 with blocks of {MX}", (1, MX))
    single = name == "FP8"
    if scale.dtype != "float32" or scale.numel != (1 if single else rows):
        raise group.unfit(f"expected {'one float32' if single else 'one float32 per row'}", "scale")
    how = "one scale" if single else "one scale per row"
    return scaled(group, f"ModelOpt FP8 with {how}", (rows if single else 1, columns))


SCHEMES = (
    Scheme(
        "ModelOpt",
        (
            Form(
                ".weight",
                ("uint8",),
                {
                    "scale": WeightPart(".weight_scale", always),
                    "global": WeightPart(".weight_scale_2", always),
                },
                _nvfp4,
                tells={".weight_scale_2": (), ".weight_scale": ()},
            ),
            Form(
                ".weight",
                (FP8,),
                {
                    "scale": WeightPart(".weight_scale", always),
                    "global": WeightPart(
                        ".weight_scale_2",
                        forbidden=lambda group: (
                            f"`quant_algo` is {_algorithm(group, OF_FP8)['quant_algo']}"
                        ),
                    ),
                },
                _fp8,
            ),
        ),
        methods=("modelopt", "modelopt_fp4"),
        dropped=DROPPED,
    ),
)
