"""GPTQ: integers packed along the rows of the transposed weight, with scales of row groups.

``checkpoint_format`` states how zero points are stored: unchanged in ``gptq_v2``, minus one in
``gptq``, which is the default.

``g_idx`` is the group of each row regardless of ``desc_act``, as in GPTQModel and transformers. If
``desc_act`` is true, all weights have ``g_idx``. Otherwise it may be missing from all weights,
since vLLM omits it.

With ``sym: true`` all zero points are the middle of the codes, and kernels do not read them.

Source: ``convert_gptq_file`` in GPTQModel's ``utils/model_dequant.py``; AutoGPTQ's
``nn_modules/qlinear``.
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

WORD_BITS = 32
BIT_WIDTHS = (2, 3, 4, 8)
SCALES = ("float16", "bfloat16", "float32")
FORMAT_V1, FORMAT_V2 = "gptq", "gptq_v2"


def _build_weight(group: TensorGroup) -> QuantizedWeight:
    bits = group.quant_config.read_number("bits")
    if bits not in BIT_WIDTHS:
        raise group.missing_setting_error(
            "bits", f"expected one of {', '.join(map(str, BIT_WIDTHS))}"
        )
    if group.quant_config.content.get("dynamic"):
        raise group.quant_config.invalid_value_error(
            "dynamic", "per-layer settings are not supported"
        )
    rows, columns = _read_packed_sizes(group, bits)
    group_rows, count = _read_group_sizes(group, rows)
    scales, zeros = group.parts["scale"], group.parts["zero"]
    if scales.shape != (count, columns) or scales.dtype not in SCALES:
        raise group.mismatch_error(
            f"groups of {group_rows} require floats of shape {[count, columns]}", "scale"
        )
    if zeros.shape != (count, -(-columns * bits // WORD_BITS)) or zeros.dtype != "int32":
        raise group.mismatch_error("expected packed zero points for each scale", "zero")
    has_order = group.quant_config.read_flag("desc_act") is not False and "order" in group.parts
    optional = tuple(role for role in ("zero", "order") if role in group.parts)
    return group.build_weight(
        f"GPTQ INT{bits} with groups of {group_rows}{' in activation order' if has_order else ''}",
        "int_groups",
        (columns, rows),
        ("scale", *optional),
        IntegerGroups(
            group_rows,
            bits,
            transposed=True,
            offset=int(_read_zero_point_format(group) == FORMAT_V1),
            symmetric=bool(group.quant_config.read_flag("sym")),
            optional=optional,
        ),
    )


def _read_zero_point_format(group: TensorGroup) -> str:
    """Return the storage format of zero points, which is ``gptq`` or ``gptq_v2``."""
    settings = group.quant_config.content
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    value = settings.get(key, FORMAT_V1)
    if value not in (FORMAT_V1, FORMAT_V2):
        raise MappingError(
            f"`{key}` is {value!r}",
            where=group.quant_config.where,
            why=f"only {FORMAT_V1} and {FORMAT_V2} are supported",
        )
    return str(value)


def _read_packed_sizes(group: TensorGroup, bits: int) -> tuple[int, int]:
    """Return the numbers of rows (unpacked) and columns of the transposed weight."""
    word_rows, columns = group.lead.shape if len(group.lead.shape) == 2 else (0, 0)
    rows = word_rows * WORD_BITS // bits
    order = group.parts.get("order")
    if not rows or not columns or word_rows * WORD_BITS % bits:
        raise group.mismatch_error(f"expected {bits}-bit integers in rows of whole words")
    if order is not None and (order.shape != (rows,) or order.dtype not in ("int32", "int64")):
        raise group.mismatch_error("expected a group for each row", "order")
    return rows, columns


def _read_group_sizes(group: TensorGroup, rows: int) -> tuple[int, int]:
    """Return the number of rows in a group, and the number of groups."""
    size = group.quant_config.read_number("group_size", -1)
    if size is None or size == 0:
        raise group.missing_setting_error("group_size", "expected a number of rows, or -1 for all")
    width = size if size > 0 else rows
    return width, -(-rows // width)


SCHEMES = (
    Scheme(
        "GPTQ",
        (
            NamingPattern(
                ".qweight",
                ("int32",),
                {
                    "scale": WeightPart(".scales", always_required),
                    "zero": WeightPart(".qzeros", always_required),
                    "order": WeightPart(
                        ".g_idx",
                        lambda group: (
                            "`desc_act` is true"
                            if group.quant_config.read_flag("desc_act")
                            else None
                        ),
                        is_complete=lambda group: "order" in group.parts,
                    ),
                },
                _build_weight,
                unique_suffixes={".qweight": (), ".qzeros": (), ".g_idx": ()},
            ),
        ),
        methods=("gptq",),
    ),
)
