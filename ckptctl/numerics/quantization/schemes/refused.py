"""Unsupported schemes that are recognized by the names of their tensors.

Sources: mistral-inference for its fp8; ``modelopt/torch/export/unified_export_hf.py`` for stacked
experts, which are stored transposed, and for weights with activation scales;
``torchao/prototype/safetensors``.
"""

from __future__ import annotations

from ckptctl.numerics.quantization.scheme import NamingPattern, Scheme


def _build_scheme_by_suffixes(name: str, *endings: str) -> Scheme:
    return Scheme(name, (NamingPattern(".weight", (), unique_suffixes=dict.fromkeys(endings, ())),))


def _build_scheme_by_dtype(name: str, dtype: str) -> Scheme:
    return Scheme(
        name, (NamingPattern(".weight", (dtype,), unique_suffixes={".weight": (dtype,)}),)
    )


SCHEMES = (
    _build_scheme_by_suffixes("Mistral's fp8", ".qscale_weight", ".qscale_act"),
    _build_scheme_by_suffixes("ModelOpt's AWQ or SVDQuant", ".pre_quant_scale", ".svdquant_lora_a"),
    _build_scheme_by_suffixes("torchao", "._weight_qdata"),
    _build_scheme_by_suffixes(
        "ModelOpt's stacked experts", "_proj_weight_scale", "_proj_weight_scale_2"
    ),
    _build_scheme_by_dtype("int8 weights", "int8"),
    _build_scheme_by_dtype("packed fp4", "float4_e2m1fn_x2"),
)
