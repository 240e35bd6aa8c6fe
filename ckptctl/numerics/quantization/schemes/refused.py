"""Unsupported schemes that are recognized by the names of their tensors.

Sources: mistral-inference for its fp8; ``modelopt/torch/export/unified_export_hf.py`` for stacked
experts, which are stored transposed, and for weights with activation scales;
``torchao/prototype/safetensors``.
"""

from __future__ import annotations

from ckptctl.numerics.quantization.scheme import Form, Scheme


def _named(name: str, *endings: str) -> Scheme:
    return Scheme(name, (Form(".weight", (), tells=dict.fromkeys(endings, ())),))


def _of_dtype(name: str, dtype: str) -> Scheme:
    return Scheme(name, (Form(".weight", (dtype,), tells={".weight": (dtype,)}),))


SCHEMES = (
    _named("Mistral's fp8", ".qscale_weight", ".qscale_act"),
    _named("ModelOpt's AWQ or SVDQuant", ".pre_quant_scale", ".svdquant_lora_a"),
    _named("torchao", "._weight_qdata"),
    _named("ModelOpt's stacked experts", "_proj_weight_scale", "_proj_weight_scale_2"),
    _of_dtype("int8 weights", "int8"),
    _of_dtype("packed fp4", "float4_e2m1fn_x2"),
)
