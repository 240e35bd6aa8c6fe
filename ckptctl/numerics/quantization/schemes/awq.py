"""AWQ: 4-bit integers packed along the columns of the transposed weight, in groups of rows.

``zero_point: false`` means symmetric weights. GPTQModel then stores the middle of the codes as
every zero point, and AutoAWQ (version ``marlin``) stores none.

The default version is ``gemm``, as in transformers and AutoAWQ; tensors of other versions have
other shapes.

Source: ``dequantize_gemm`` in AutoAWQ's ``utils/packing_utils.py`` and in GPTQModel;
``pseudo_quantize_tensor`` in GPTQModel's ``looper/awq_processor.py``.
"""

from __future__ import annotations

from ckptctl.errors import MappingError
from ckptctl.numerics.quantization.formulas import IntegerGroups
from ckptctl.numerics.quantization.scheme import (
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)
from ckptctl.units import pluralize

BITS, WORD_BITS, VALUES_PER_WORD = 4, 32, 8
SCALES = ("float16", "bfloat16", "float32")
SUPPORTED_VERSION = "gemm"


def _build_weight(group: TensorGroup) -> QuantizedWeight:
    _zero_point_reason(group)
    group_rows = _read_group_size(group)
    rows, words = group.lead.shape if len(group.lead.shape) == 2 else (0, 0)
    columns, count = words * VALUES_PER_WORD, -(-rows // group_rows) if group_rows > 0 else 1
    scales, zeros = group.parts["scale"], group.parts["zero"]
    if not rows or (group_rows > 0 and rows % group_rows):
        raise group.mismatch_error(
            f"{pluralize(rows, 'row')} cannot be divided into groups of {group_rows}"
        )
    if scales.shape != (count, columns) or scales.dtype not in SCALES:
        raise group.mismatch_error(
            f"groups of {group_rows} require floats of shape {[count, columns]}", "scale"
        )
    if zeros.shape != (count, words) or zeros.dtype != "int32":
        raise group.mismatch_error("expected packed zero points for each scale", "zero")
    return group.build_weight(
        f"AWQ INT{BITS} with groups of {rows // count}",
        "int_rows",
        (rows, columns),
        ("scale", "zero"),
        IntegerGroups(
            rows // count,
            BITS,
            symmetric=group.quant_config.read_flag("zero_point") is False,
            optional=("zero",),
        ),
        transposed=True,
    )


def _zero_point_reason(group: TensorGroup) -> str:
    """Return why the AWQ version requires zero points, or raise if the version is unsupported."""
    quant_config = group.quant_config
    for key in ("version", "format"):
        version = quant_config.content.get(key, SUPPORTED_VERSION)
        if str(version).lower() not in (SUPPORTED_VERSION, "awq"):
            raise MappingError(
                f"`{key}` is {version!r}",
                where=quant_config.where,
                why=f"only {SUPPORTED_VERSION} is supported",
            )
    return f"version {SUPPORTED_VERSION} stores zero points for all weights"


def _read_group_size(group: TensorGroup) -> int:
    """Read the number of rows in a group from the config, or -1 if a group spans all rows."""
    quant_config = group.quant_config
    bits = quant_config.read_number("bits") or quant_config.read_number("w_bit")
    if bits != BITS:
        raise group.missing_setting_error("bits", f"expected {BITS}")
    size = quant_config.read_number("group_size", -1) or quant_config.read_number(
        "q_group_size", -1
    )
    if size is None:
        raise group.missing_setting_error("group_size", "expected a number of rows, or -1 for all")
    return size


SCHEMES = (
    Scheme(
        "AWQ",
        (
            NamingPattern(
                ".qweight",
                ("int32",),
                {
                    "scale": WeightPart(".scales", always_required),
                    "zero": WeightPart(".qzeros", _zero_point_reason),
                },
                _build_weight,
                unique_suffixes={".qweight": (), ".qzeros": ()},
            ),
        ),
        methods=("awq",),
    ),
)
