"""A kind that has llama.cpp's own package compute what GGUF files hold.

``gguf``: blocks of quantized elements, as ``gguf.quants.dequantize`` computes them in float32,
rounded once. Input: ``weight``, uint8 ``[..., blocks of a row * nbytes]``. The arguments
are a :class:`~ckptctl.planner.quantization.ggml.BlockType`.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.planner.quantization.ggml import BlockType
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind


def _blocks(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    name, size, nbytes, _ = typed(BlockType, computed.arguments)
    first, last = columns.start // size, -(-columns.stop // size)
    blocks = inputs.tensor("weight", rows)[:, first * nbytes : last * nbytes].contiguous()
    kind = GGMLQuantizationType[name]
    values = torch.from_numpy(dequantize(blocks.numpy(), kind))
    start = columns.start - first * size
    elements(out, computed.dtype, len(columns)).copy_(values[:, start : start + len(columns)])


KINDS = {
    # Scales that are not finite show in what is computed, and are no numbers of a model.
    "gguf": Kind(_blocks, lambda _inputs, _rows: None, package="gguf"),
}
