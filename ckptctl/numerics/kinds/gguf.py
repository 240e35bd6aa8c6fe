"""A kind that dequantizes GGUF blocks with llama.cpp's package.

``gguf``: elements that ``gguf.quants.dequantize`` computes from blocks in float32, rounded once.
Input: the blocks, uint8 ``[..., blocks of a row * nbytes]``. The arguments are a
:class:`~ckptctl.numerics.quantization.ggml.BlockType`.
"""

from __future__ import annotations

from ckptctl.numerics.quantization.ggml import BlockType
from ckptctl.storage.computed import Kind, OutputRectangle


def _dequantize_blocks(out: OutputRectangle) -> None:
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    block: BlockType = out.arguments
    groups = out.list_groups(block.elements)
    byte_range = range(groups.start * block.nbytes, groups.stop * block.nbytes)
    raw = out.inputs[0].read(out.rows, byte_range).contiguous().numpy()
    values = dequantize(raw, GGMLQuantizationType[block.name])
    out.write(torch.from_numpy(values), groups.start * block.elements)


KINDS = {
    # Non-finite results come from damaged scales, not from values of the model.
    "gguf": Kind(_dequantize_blocks, overflows=True, package="gguf"),
}
