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
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)
from ckptctl.units import pluralize

BITS, WORD, EACH = 4, 32, 8
SCALES = ("float16", "bfloat16", "float32")
VERSION = "gemm"


def _weight(group: Group) -> QuantizedWeight:
    _packed_by(group)
    width = _group_size(group)
    rows, words = group.lead.shape if len(group.lead.shape) == 2 else (0, 0)
    columns, count = words * EACH, -(-rows // width) if width > 0 else 1
    scales, zeros = group.parts["scale"], group.parts["zero"]
    if not rows or (width > 0 and rows % width):
        raise group.unfit(f"{pluralize(rows, 'row')} cannot be divided into groups of {width}")
    if scales.shape != (count, columns) or scales.dtype not in SCALES:
        raise group.unfit(f"groups of {width} require floats of shape {[count, columns]}", "scale")
    if zeros.shape != (count, words) or zeros.dtype != "int32":
        raise group.unfit("expected packed zero points for each scale", "zero")
    return group.quantized(
        f"AWQ INT{BITS} with groups of {rows // count}",
        "int_rows",
        (rows, columns),
        ("scale", "zero"),
        IntegerGroups(
            rows // count,
            BITS,
            symmetric=group.statement.flag("zero_point") is False,
            optional=("zero",),
        ),
        transposed=True,
    )


def _packed_by(group: Group) -> str:
    """Return why zero points are required, or raise if the version is unsupported."""
    said = group.statement
    for key in ("version", "format"):
        found = said.content.get(key, VERSION)
        if str(found).lower() not in (VERSION, "awq"):
            raise MappingError(
                f"`{key}` is {found!r}", where=said.where, why=f"only {VERSION} is supported"
            )
    return f"version {VERSION} stores zero points for all weights"


def _group_size(group: Group) -> int:
    """Return the rows of a group, or -1 for all rows."""
    said = group.statement
    bits = said.number("bits") or said.number("w_bit")
    if bits != BITS:
        raise group.unstated("bits", f"expected {BITS}")
    size = said.number("group_size", -1) or said.number("q_group_size", -1)
    if size is None:
        raise group.unstated("group_size", "expected a number of rows, or -1 for all")
    return size


SCHEMES = (
    Scheme(
        "AWQ",
        (
            Form(
                ".qweight",
                ("int32",),
                {"scale": WeightPart(".scales", always), "zero": WeightPart(".qzeros", _packed_by)},
                _weight,
                tells={".qweight": (), ".qzeros": ()},
            ),
        ),
        methods=("awq",),
    ),
)
