"""Kinds that dequantize GGUF blocks in float32, rounded once.

``gguf``: integers times the scale of their block, or of a part of the block, minus an offset. A
:class:`_BlockLayout` describes where a block stores them. ``gguf_table``: types that look up their
elements in tables, computed by the package ``gguf``.

Input of both: the blocks, uint8 ``[..., blocks of a row * nbytes]``. The arguments are a
:class:`~ckptctl.numerics.quantization.ggml.BlockType`. Sources: ``gguf/quants.py`` (0.19),
``ggml-quants.c`` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptctl.numerics.quantization.ggml import BlockType
from ckptctl.storage.computed import Kind, OutputRectangle

if TYPE_CHECKING:
    import torch

    Scales: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]

BYTE_BITS = 8
LOW_NIBBLE = 0x0F


class _Plane(NamedTuple):
    """Range of bytes of a block that stores some of the bits of all its integers.

    Byte ``i`` of a run stores integers ``i``, ``i + run``, ``i + 2 * run``, ... of the run, from
    the lowest bits.

    Attributes:
        start: Offset of the first byte in the block.
        nbytes: Number of bytes.
        bits: Number of bits of each integer.
        run: Number of bytes in a run.
    """

    start: int
    nbytes: int
    bits: int
    run: int

    def select_from(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the plane, ``[blocks, runs, 1, run]``, as a view of *blocks*."""
        plane = blocks[:, self.start : self.start + self.nbytes]
        return plane.view(len(blocks), -1, 1, self.run)


@dataclass(frozen=True, slots=True)
class _BlockLayout:
    """Layout of a block.

    Attributes:
        low: The lower bits of the integers.
        read_scales: Reads the scales and the offsets of equal parts of each block, ``[blocks,
            parts]`` in float32. Offsets are None if the type has none.
        high: The upper bits of the integers, if they are stored separately.
        center: Number to subtract from each integer.
    """

    low: _Plane
    read_scales: Callable[[torch.Tensor], Scales]
    high: _Plane | None = None
    center: int = 0


def _dequantize_integers(out: OutputRectangle) -> None:
    block: BlockType = out.arguments
    layout, groups = LAYOUTS[block.name], out.list_groups(block.elements)
    blocks = _read_blocks(out).view(-1, block.nbytes)
    count = len(blocks) * block.elements
    integers = _unpack(layout.low, blocks, out.get_scratch("integers", "uint8", count))
    if layout.high:
        high = _unpack(layout.high, blocks, out.get_scratch("high", "uint8", count))
        integers.bitwise_or_(high.bitwise_left_shift_(layout.low.bits))
    numbers = out.get_scratch("numbers", "float32", count)
    numbers.copy_(_to_signed(integers, layout))
    scales, offsets = layout.read_scales(blocks)
    parts = numbers.view(*scales.shape, -1)
    parts.mul_(scales[..., None])
    if offsets is not None:
        parts.sub_(offsets[..., None])
    out.write(numbers, groups.start * block.elements)


def _read_blocks(out: OutputRectangle) -> torch.Tensor:
    """Read the blocks that overlap the rectangle, uint8 ``[rows, bytes]``."""
    block: BlockType = out.arguments
    groups = out.list_groups(block.elements)
    byte_range = range(groups.start * block.nbytes, groups.stop * block.nbytes)
    return out.inputs[0].read(out.rows, byte_range).contiguous()


def _unpack(plane: _Plane, blocks: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Unpack the bits of a plane to *into*, one uint8 for each integer."""
    import torch

    packed = plane.select_from(blocks)
    target = into.view(len(blocks), packed.shape[1], BYTE_BITS // plane.bits, plane.run)
    for index in range(target.shape[2]):
        shifted = target[:, :, index : index + 1]
        torch.bitwise_right_shift(packed, index * plane.bits, out=shifted)
    return into if plane.bits == BYTE_BITS else into.bitwise_and_((1 << plane.bits) - 1)


def _to_signed(integers: torch.Tensor, layout: _BlockLayout) -> torch.Tensor:
    """Return centered integers as int8, or the unsigned integers if the layout has no center."""
    import torch

    if not layout.center and layout.low.bits < BYTE_BITS:
        return integers
    return integers.view(torch.int8).sub_(layout.center)


# ------------------------------------------------------------------------------------- scales


def _read_half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Read a float16 of each block as float32, ``[blocks, 1]``."""
    import torch

    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _read_one_scale(blocks: torch.Tensor) -> Scales:
    return _read_half(blocks, 0), None


def _read_scale_and_minimum(blocks: torch.Tensor) -> Scales:
    """Read the scale and the minimum, which is added to the products."""
    return _read_half(blocks, 0), _read_half(blocks, 2).neg_()


def _read_nibble_scales(blocks: torch.Tensor) -> Scales:
    """Read 16 pairs of a scale and an offset, 4 bits each, with two factors (Q2_K)."""
    pairs = blocks[:, :16]
    scales, offsets = (pairs & LOW_NIBBLE).float(), (pairs >> 4).float()
    return scales.mul_(_read_half(blocks, 80)), offsets.mul_(_read_half(blocks, 82))


def _read_centered_scales(blocks: torch.Tensor) -> Scales:
    """Read 16 scales of 6 bits, stored plus 32, with one factor (Q3_K)."""
    import torch

    low, high = blocks[:, 96:104], blocks[:, 104:108]
    low = torch.cat((low & LOW_NIBBLE, low >> 4), dim=1)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    return (low | high << 4).float().sub_(32).mul_(_read_half(blocks, 108)), None


def _read_six_bit_scales(blocks: torch.Tensor) -> Scales:
    """Read 8 scales and 8 offsets of 6 bits, with two factors (Q4_K, Q5_K)."""
    import torch

    scales, offsets, upper = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    late_scales = upper & LOW_NIBBLE | scales >> 2 & 0x30
    late_offsets = upper >> 4 | offsets >> 2 & 0x30
    all_scales = torch.cat((scales & 0x3F, late_scales), dim=1).float()
    all_offsets = torch.cat((offsets & 0x3F, late_offsets), dim=1).float()
    return all_scales.mul_(_read_half(blocks, 0)), all_offsets.mul_(_read_half(blocks, 2))


def _read_byte_scales(blocks: torch.Tensor) -> Scales:
    """Read 16 scales of int8, with one factor (Q6_K)."""
    import torch

    return blocks[:, 192:208].view(torch.int8).float().mul_(_read_half(blocks, 208)), None


LAYOUTS: Mapping[str, _BlockLayout] = {
    "Q4_0": _BlockLayout(_Plane(2, 16, 4, 16), _read_one_scale, center=8),
    "Q4_1": _BlockLayout(_Plane(4, 16, 4, 16), _read_scale_and_minimum),
    "Q5_0": _BlockLayout(_Plane(6, 16, 4, 16), _read_one_scale, _Plane(2, 4, 1, 1), center=16),
    "Q5_1": _BlockLayout(_Plane(8, 16, 4, 16), _read_scale_and_minimum, _Plane(4, 4, 1, 1)),
    "Q8_0": _BlockLayout(_Plane(2, 32, 8, 32), _read_one_scale),
    "Q2_K": _BlockLayout(_Plane(16, 64, 2, 32), _read_nibble_scales),
    "Q3_K": _BlockLayout(
        _Plane(32, 64, 2, 32), _read_centered_scales, _Plane(0, 32, 1, 32), center=4
    ),
    "Q4_K": _BlockLayout(_Plane(16, 128, 4, 32), _read_six_bit_scales),
    "Q5_K": _BlockLayout(_Plane(48, 128, 4, 32), _read_six_bit_scales, _Plane(16, 32, 1, 32)),
    "Q6_K": _BlockLayout(
        _Plane(0, 128, 4, 64), _read_byte_scales, _Plane(128, 64, 2, 32), center=32
    ),
}


# ------------------------------------------------------------------------------------- tables


def _dequantize_with_package(out: OutputRectangle) -> None:
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    block: BlockType = out.arguments
    values = dequantize(_read_blocks(out).numpy(), GGMLQuantizationType[block.name])
    out.write(torch.from_numpy(values), out.list_groups(block.elements).start * block.elements)


# Non-finite results come from damaged scales, not from values of the model.
KINDS = {
    "gguf": Kind(_dequantize_integers, overflows=True),
    "gguf_table": Kind(_dequantize_with_package, overflows=True, package="gguf", host_only=True),
}
