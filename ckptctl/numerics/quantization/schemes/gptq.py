"""GPTQ: integers packed along the rows of the transposed weight, with scales of row groups.

``checkpoint_format`` is the storage of zero points: unchanged in ``gptq_v2``, minus one in
``gptq``, which is the default.

``g_idx`` is the group of each row regardless of ``desc_act``, as in GPTQModel and transformers. If
``desc_act`` is true all weights have it. Otherwise it may be missing from all of them, since vLLM
omits it.

With ``sym: true`` all zero points are the middle of the codes, and kernels do not read them.

Source: ``convert_gptq_file`` in GPTQModel's ``utils/model_dequant.py``; AutoGPTQ's
``nn_modules/qlinear``.
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

WORD = 32
WIDTHS = (2, 3, 4, 8)
SCALES = ("float16", "bfloat16", "float32")
V1, V2 = "gptq", "gptq_v2"


def _weight(group: Group) -> QuantizedWeight:
    bits = group.statement.number("bits")
    if bits not in WIDTHS:
        raise group.unstated("bits", f"expected one of {', '.join(map(str, WIDTHS))}")
    if group.statement.content.get("dynamic"):
        raise group.statement.wrong("dynamic", "per-layer settings are not supported")
    rows, columns = _sizes(group, bits)
    width, count = _groups(group, rows)
    scales, zeros = group.parts["scale"], group.parts["zero"]
    if scales.shape != (count, columns) or scales.dtype not in SCALES:
        raise group.unfit(f"groups of {width} require floats of shape {[count, columns]}", "scale")
    if zeros.shape != (count, -(-columns * bits // WORD)) or zeros.dtype != "int32":
        raise group.unfit("expected packed zero points for each scale", "zero")
    ordered = group.statement.flag("desc_act") is not False and "order" in group.parts
    optional = tuple(role for role in ("zero", "order") if role in group.parts)
    return group.quantized(
        f"GPTQ INT{bits} with groups of {width}{' in activation order' if ordered else ''}",
        "int_groups",
        (columns, rows),
        ("scale", *optional),
        IntegerGroups(
            width,
            bits,
            transposed=True,
            offset=int(_stored(group) == V1),
            symmetric=bool(group.statement.flag("sym")),
            optional=optional,
        ),
    )


def _stored(group: Group) -> str:
    """Return the storage format of zero points."""
    said = group.statement.content
    key = "checkpoint_format" if "checkpoint_format" in said else "format"
    found = said.get(key, V1)
    if found not in (V1, V2):
        raise MappingError(
            f"`{key}` is {found!r}",
            where=group.statement.where,
            why=f"only {V1} and {V2} are supported",
        )
    return str(found)


def _sizes(group: Group, bits: int) -> tuple[int, int]:
    """Return the numbers of packed rows (in whole words) and columns."""
    words, columns = group.lead.shape if len(group.lead.shape) == 2 else (0, 0)
    rows = words * WORD // bits
    order = group.parts.get("order")
    if not rows or not columns or words * WORD % bits:
        raise group.unfit(f"expected {bits}-bit integers in rows of whole words")
    if order is not None and (order.shape != (rows,) or order.dtype not in ("int32", "int64")):
        raise group.unfit("expected a group for each row", "order")
    return rows, columns


def _groups(group: Group, rows: int) -> tuple[int, int]:
    """Return the rows of a group, and the number of groups."""
    size = group.statement.number("group_size", -1)
    if size is None or size == 0:
        raise group.unstated("group_size", "expected a number of rows, or -1 for all")
    width = size if size > 0 else rows
    return width, -(-rows // width)


SCHEMES = (
    Scheme(
        "GPTQ",
        (
            Form(
                ".qweight",
                ("int32",),
                {
                    "scale": WeightPart(".scales", always),
                    "zero": WeightPart(".qzeros", always),
                    "order": WeightPart(
                        ".g_idx",
                        lambda group: (
                            "`desc_act` is true" if group.statement.flag("desc_act") else None
                        ),
                        uniform=lambda group: "order" in group.parts,
                    ),
                },
                _weight,
                tells={".qweight": (), ".qzeros": (), ".g_idx": ()},
            ),
        ),
        methods=("gptq",),
    ),
)
