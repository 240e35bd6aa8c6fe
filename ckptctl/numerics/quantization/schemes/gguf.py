"""GGUF: rows of elements in blocks, each with its own scales.

The GGUF reader names a quantized tensor by its name in the file, a dot and the type; its elements
are the bytes of the blocks.

Source: ``gguf/quants.py`` (0.19), which also dequantizes them.
"""

from __future__ import annotations

from functools import partial

from ckptctl.numerics.quantization.ggml import BLOCKS, BlockType
from ckptctl.numerics.quantization.scheme import Form, Group, QuantizedWeight, Scheme
from ckptctl.units import pluralize

BYTES = "uint8"


def _weight(kind: BlockType, group: Group) -> QuantizedWeight:
    *rows, width = group.lead.shape or (1,)
    if width % kind.nbytes:
        raise group.unfit(
            f"the row size of {kind.name} must be a multiple of {pluralize(kind.nbytes, 'byte')}"
        )
    return group.quantized(
        f"GGUF {kind.name}",
        "gguf",
        (*rows, width // kind.nbytes * kind.elements),
        arguments=kind,
    )


def _scheme(name: str, *, understood: bool) -> Scheme:
    forms = tuple(
        Form(
            f".{kind.name}",
            (BYTES,),
            {},
            partial(_weight, kind) if understood else None,
            plain="",
            tells={f".{kind.name}": (BYTES,)},
        )
        for kind in BLOCKS.values()
        if kind.understood == understood
    )
    return Scheme(name, forms, by_names=understood)


SCHEMES = (_scheme("GGUF", understood=True), _scheme("rare GGUF types", understood=False))
