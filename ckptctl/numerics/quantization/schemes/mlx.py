"""MLX: integers with a scale and a bias for each group of a row, or 4- or 8-bit floats.

A row of elements is a row of uint32 with the first element in the lowest bits. ``quantization`` in
config.json has the group size and the bits of an element, for all layers and, by path, for single
layers.

Sources: ``mlx.core.quantize`` (0.32.4); mlx-lm's ``utils.py`` (0.32.2), ``load_model`` and
``quantize_model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.numerics.quantization.formulas import MlxGroups
from ckptctl.numerics.quantization.scheme import (
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)
from ckptctl.numerics.quantization.statement import QuantizationStatement
from ckptctl.units import pluralize

FLOATS = ("float32", "bfloat16", "float16")
GROUPS = (32, 64, 128)
BITS = (1, 2, 3, 4, 5, 6, 8)
FIXED = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group size and bits of an element in each mode with floats."""
AFFINE = "affine"
WORD = 32


def _weight(group: Group) -> QuantizedWeight:
    mode, size, bits = _said(group)
    packed, scales = group.lead, group.parts["scales"]
    if len(packed.shape) < 2 or packed.shape[:-1] != scales.shape[:-1]:
        raise group.unfit("expected a scale for each group of each row", "scales")
    *lead, groups = scales.shape
    if packed.shape[-1] * WORD != groups * size * bits:
        raise group.unfit(
            f"expected {pluralize(groups, 'group')} of {pluralize(size, 'element')} of {bits} bits",
            "scales",
        )
    kind = "mlx_affine" if mode == AFFINE else "mlx_float"
    _require_scales(group, mode)
    shown = f"{bits} bits" if mode == AFFINE else mode
    return group.quantized(
        f"MLX {shown} with groups of {size}",
        kind,
        (*lead, groups * size),
        ("scales", "biases"),
        MlxGroups(size, bits, mode),
    )


def _require_scales(group: Group, mode: str) -> None:
    """Raise if scales or biases do not have the dtypes and shapes of *mode*."""
    scales = group.parts["scales"]
    if mode != AFFINE:
        if scales.dtype != "uint8":
            raise group.unfit(f"{mode} requires one-byte scales", "scales")
        return
    if scales.dtype not in FLOATS:
        raise group.unfit(f"scales must be one of {', '.join(FLOATS)}", "scales")
    biases = group.parts["biases"]
    if (biases.dtype, biases.shape) != (scales.dtype, scales.shape):
        raise group.unfit("biases must match the scales in number and dtype", "biases")


def _said(group: Group) -> tuple[str, int, int]:
    """Return the mode, the group size and the bits of an element."""
    statement = group.statement
    own = statement.content.get(group.module)
    if own is False:
        raise statement.wrong(group.module, "it has scales, so it is quantized")
    if isinstance(own, Mapping):
        statement = QuantizationStatement(
            statement.method, own, f"{group.module} in {statement.where}"
        )
        group = replace(group, statement=statement)
    mode = statement.content.get("mode", AFFINE)
    if isinstance(mode, str) and mode in FIXED:
        size, bits = FIXED[mode]
        for key, value in (("group_size", size), ("bits", bits)):
            if statement.number(key) not in (None, value):
                raise statement.wrong(key, f"{mode} requires {value}")
        return mode, size, bits
    if mode != AFFINE:
        raise statement.wrong("mode", f"expected one of {', '.join((AFFINE, *FIXED))}")
    found = {key: statement.number(key) for key in ("group_size", "bits")}
    for key, known in (("group_size", GROUPS), ("bits", BITS)):
        if found[key] not in known:
            raise group.unstated(key, f"expected one of {', '.join(map(str, known))}")
    return AFFINE, int(found["group_size"] or 0), int(found["bits"] or 0)


def _of_integers(group: Group) -> str | None:
    mode, _, _ = _said(group)
    return f"`mode` is {mode}, which has a bias for each group" if mode == AFFINE else None


def _of_floats(group: Group) -> str | None:
    mode, _, _ = _said(group)
    return f"`mode` is {mode}" if mode != AFFINE else None


SCHEMES = (
    Scheme(
        "MLX",
        (
            Form(
                ".weight",
                ("uint32",),
                {
                    "scales": WeightPart(".scales", always),
                    "biases": WeightPart(".biases", _of_integers, _of_floats),
                    "global": WeightPart(
                        ".global_scale",
                        forbidden=lambda _: (
                            "a per-tensor scale in addition to group scales is not supported"
                        ),
                    ),
                },
                _weight,
                tells={".biases": (), ".weight": ("uint32",), ".scales": ("uint8",)},
            ),
        ),
        methods=("mlx",),
    ),
)
