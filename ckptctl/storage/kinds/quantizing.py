"""Kinds that quantize a weight by the largest of its elements: round to nearest, without data.

Each way has a kind for the quantized elements and one for their scales. Both read the plain weight
as they go, in pieces. It is the first input: float16, bfloat16 or float32, ``[rows, columns]``;
arithmetic is done in its dtype where the reference does so, so that all bits are the same. A stack
of weights of whole blocks is one of more rows.

``to_fp8_block``: E4M3 times the inverse scale of its block of 128 x 128, in float32; the last block
of a row or column may be smaller. Source: ``Fp8Quantize`` in transformers'
``integrations/finegrained_fp8.py``.

``to_fp8_channel``: E4M3, a scale for each row. ``to_mxfp8``: E4M3, an E8M0 scale for each 32
elements. ``to_mxfp4``: two E2M1 numbers in a byte, the low half first, likewise. ``to_nvfp4``: the
same with an E4M3 scale for each 16 elements; the second input is a float32 that all scales are
multiplied by. Sources: compressed-tensors' ``calculate_qparams``, ``generate_mx_scales``,
``generate_gparam`` and ``pack_fp4_to_uint8``, as llm-compressor's ``model_free_ptq`` calls them.

``to_nvfp4_global`` is that number, of several weights together where programs fuse them; its inputs
are of the kind ``largest``: the largest absolute value of a weight, found once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

from ckptctl.catalog import VIRTUAL
from ckptctl.errors import RefusedError, spell_option
from ckptctl.storage.computed import InputTensor, Kind, Output, SharedResults
from ckptctl.storage.outcome import EXACT, Rounding

if TYPE_CHECKING:
    import torch

    Scales: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    Numbers: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PIECE = 1 << 19
"""Elements that are quantized at a time, or the rows that share scales of one block."""
FP8, FP4 = 448.0, 6.0
"""The largest numbers of E4M3 and of E2M1."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127


@dataclass(frozen=True, slots=True)
class _Way:
    """How elements are quantized that share a scale: blocks of a matrix.

    Attributes:
        rows: Of a block.
        columns: Of a block; 0: all.
        scales: Returns what blocks are divided by, of their largest absolute values and the global
            scale: ``[block rows, block columns]``.
        stored: Returns these as they are stored.
        numbers: Returns the quantized elements of blocks divided by their scales.
        wide: Whether all that is done in float32, whatever the weight is.
        multiplied: Whether the scales are the inverse ones: blocks are multiplied by them.
    """

    rows: int
    columns: int
    scales: Scales
    stored: Callable[[torch.Tensor], torch.Tensor]
    numbers: Callable[[torch.Tensor], torch.Tensor]
    wide: bool = False
    multiplied: bool = False
    packed: bool = False

    def divisors(self, scales: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """Return what elements are divided by, ``[block rows, 1, block columns, 1]``."""
        found = scales if shared is None else scales / shared
        return found[:, None, :, None]


def _elements(way: _Way, out: Output) -> Rounding:
    rows, columns, target = out.rows, out.columns, out.elements
    weight, shape, shared = _inputs(out)
    each = 1 + way.packed
    wanted = range(columns.start * each, columns.stop * each)
    total = EXACT
    for block in _aligned(rows, shape[0], way.rows, shape[1]):
        plain = weight.read(block)
        own = range(max(block.start, rows.start), min(block.stop, rows.stop))
        for span in _spans(wanted, shape[1], way.columns, len(block)):
            part = plain[:, span.start : span.stop]
            blocks = _blocks(part, way)
            scales = _scales_of(way, weight, blocks, shared)
            divisors = way.divisors(scales, shared)
            numbers = way.numbers(blocks * divisors if way.multiplied else blocks / divisors)
            factors = (1.0 / divisors) if way.multiplied else divisors
            cut = _Cut(part.shape, block, own, span, wanted)
            total += cut.rounding(part, _values(numbers) * factors.float())
            found = cut.of(numbers)
            place = range(cut.columns.start - wanted.start, cut.columns.stop - wanted.start)
            into = target[own.start - rows.start : own.stop - rows.start]
            into = into[:, place.start // each : place.stop // each]
            into.copy_(_pairs(found) if way.packed else found)
    return total


@dataclass(frozen=True, slots=True)
class _Cut:
    """The wanted part of what was computed of blocks.

    Attributes:
        shape: Of what the blocks were made of.
        block: Rows of the weight that these are.
        own: Those of them that are wanted.
        span: Columns of the weight that these are.
        wanted: Those that are wanted.
    """

    shape: tuple[int, ...]
    block: range
    own: range
    span: range
    wanted: range

    @property
    def columns(self) -> range:
        """Return the wanted columns of the weight among these."""
        return range(max(self.span.start, self.wanted.start), min(self.span.stop, self.wanted.stop))

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the wanted part of ``[block rows, rows, block columns, columns]``."""
        down, rows, across, columns = blocks.shape
        return self.inside(blocks.reshape(down * rows, across * columns))

    def inside(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the wanted part of a matrix."""
        first, columns = self.span.start, self.columns
        rows = matrix[self.own.start - self.block.start : self.own.stop - self.block.start]
        return rows[:, columns.start - first : columns.stop - first]

    def rounding(self, plain: torch.Tensor, blocks: torch.Tensor) -> Rounding:
        """Return how far *blocks* are from *plain*."""
        import torch

        before = self.inside(plain).double()
        off = self.of(blocks) - before
        norm = torch.linalg.vector_norm
        return Rounding(
            float(norm(off, float("inf"))), float(norm(off)) ** 2, float(norm(before)) ** 2
        )


def _scales(way: _Way, out: Output) -> None:
    rows, columns, target = out.rows, out.columns, out.elements
    weight, shape, shared = _inputs(out)
    across = way.columns or shape[1]
    whole = range(rows.start * way.rows, min(rows.stop * way.rows, shape[0]))
    wanted = range(columns.start * across, min(columns.stop * across, shape[1]))
    for block in _aligned(whole, shape[0], way.rows, shape[1]):
        plain = weight.read(block)
        for span in _spans(wanted, shape[1], way.columns, len(block)):
            blocks = _blocks(plain[:, span.start : span.stop], way)
            found = way.stored(_scales_of(way, weight, blocks, shared))
            first = span.start // across - columns.start
            into = target[block.start // way.rows - rows.start :][: len(found)]
            into[:, first : first + found.shape[1]].copy_(found)


def _inputs(out: Output) -> tuple[InputTensor, tuple[int, int], torch.Tensor | None]:
    """Return the weight, its rows, those of a stack together, and columns; and the global scale."""
    weight, *shared = out.inputs
    *rows, columns = weight.entry.shape
    return weight, (math.prod(rows), columns), shared[0].read_all() if shared else None


def _aligned(rows: range, height: int, down: int, width: int) -> Iterator[range]:
    """Yield consecutive rows that hold *rows*: whole blocks, few enough for a piece."""
    step = max(down, PIECE // max(width, 1) // down * down)
    start = rows.start // down * down
    end = min(-(-rows.stop // down) * down, height)
    return (range(at, min(at + step, end)) for at in range(start, end, step))


def _spans(columns: range, width: int, across: int, rows: int) -> Iterator[range]:
    """Yield consecutive columns that hold *columns*: whole blocks, few enough for a piece."""
    if not across:
        yield range(width)
        return
    step = max(across, PIECE // max(rows, 1) // across * across)
    end = min(-(-columns.stop // across) * across, width)
    for at in range(columns.start // across * across, end, step):
        yield range(at, min(at + step, end))


def _blocks(part: torch.Tensor, way: _Way) -> torch.Tensor:
    """Return ``[block rows, rows, block columns, columns]``; zeros fill up smaller blocks."""
    import torch

    part = part.float() if way.wide else part
    height, width = part.shape
    down, across = way.rows, way.columns or width
    missing = (-width % across, -height % down)
    if any(missing):
        part = torch.nn.functional.pad(part, (0, missing[0], 0, missing[1]))
    return part.reshape(part.shape[0] // down, down, part.shape[1] // across, across)


def _scales_of(
    way: _Way, weight: InputTensor, blocks: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    return _finite(weight, way.scales(_largest(weight, blocks), shared))


def _largest(weight: InputTensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each block."""
    return _finite(weight, blocks.abs().amax((1, 3)))


def _finite(weight: InputTensor, found: torch.Tensor) -> torch.Tensor:
    if not bool(found.isfinite().all()):
        raise RefusedError(
            "a weight to be quantized contains infinity, NaN or values near the dtype's maximum",
            where=f"tensor `{weight.entry.name.removeprefix(VIRTUAL)}`",
            why="no scale can represent them",
            hint=f"pass {spell_option('--quantize-not GLOB')} to skip it",
        )
    return found


# ------------------------------------------------------------------------------------- scales


def _inverse(largest: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    some = largest > 0
    return (FP8 / largest.where(some, 1.0)).where(some, 1.0)


def _of_rows(largest: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    import torch

    found = largest / FP8
    return found.where(found != 0, torch.finfo(found.dtype).eps)


def _power(largest: torch.Tensor, _: torch.Tensor | None, *, offset: int) -> torch.Tensor:
    """Return powers of two: what rounds to more than the largest number is rounded up first."""
    import torch

    kinds = {torch.float32: (torch.int32, 23), torch.float16: (torch.int16, 10)}
    opaque, mantissa = kinds.get(largest.dtype, (torch.int16, 7))
    bits = largest.view(opaque) + (1 << (mantissa - 2))
    rounded = (bits & -(1 << mantissa)).view(largest.dtype)
    exponent = (BIAS + rounded.log2().floor() - offset).clamp(0, 255).round().to(torch.uint8)
    found = (2.0 ** (exponent.float() - BIAS)).to(largest.dtype)
    return found.where(found != 0, 1.0)


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    import torch

    return (BIAS + scales.log2().floor().to(torch.int32)).to(torch.uint8)


def _under_global(largest: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    import torch

    assert shared is not None
    found = (shared * (largest / FP4)).clamp(-FP8, FP8).to(torch.float8_e4m3fn).float()
    return found.where(found != 0, 0.125).to(largest.dtype)


# ------------------------------------------------------------------------------------ numbers


def _e4m3(divided: torch.Tensor) -> torch.Tensor:
    import torch

    return divided.clamp(-FP8, FP8).to(torch.float8_e4m3fn)


def _e2m1(divided: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest number, of two as near that with an even mantissa."""
    import torch

    size = divided.abs()
    code = (divided < 0).to(torch.uint8) * 8
    code += size > 0.25
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    return code.add_(size > 5.0)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _values(numbers: torch.Tensor) -> torch.Tensor:
    """Return quantized elements as float32."""
    import torch

    if numbers.dtype != torch.uint8:
        return numbers.float()
    return _table().index_select(0, numbers.int().view(-1)).view(numbers.shape)


@cache
def _table() -> torch.Tensor:
    import torch

    return torch.tensor([*E2M1, *(-value for value in E2M1)])


def _itself(scales: torch.Tensor) -> torch.Tensor:
    return scales


# ----------------------------------------------------------------------------- the whole weight


_LARGEST = SharedResults["torch.Tensor"]()


def _of_all(out: Output) -> None:
    weight, (height, width), _ = _inputs(out)

    def search() -> torch.Tensor:
        import torch

        parts = (weight.read(rows) for rows in _aligned(range(height), height, 1, width))
        return torch.cat([_largest(weight, part[None, :, None, :]) for part in parts]).amax()

    out.elements.copy_(_LARGEST.get(weight.files, weight.entry.name, search))


def _global(out: Output) -> None:
    import torch

    every = torch.stack([one.read_all() for one in out.inputs])
    largest = every.amax().clamp(min=torch.finfo(every.dtype).tiny).reshape(1)
    out.elements.copy_(torch.nan_to_num(FP8 * FP4 / largest, nan=1.0, posinf=1.0, neginf=1.0))


MXFP8 = _Way(1, 32, partial(_power, offset=8), _exponents, _e4m3)
MXFP4 = _Way(1, 32, partial(_power, offset=2), _exponents, _e2m1, packed=True)
NVFP4 = _Way(1, 16, _under_global, _itself, _e2m1, packed=True)
CHANNEL = _Way(1, 0, _of_rows, _itself, _e4m3)
BLOCK = _Way(128, 128, _inverse, lambda scales: 1.0 / scales, _e4m3, wide=True, multiplied=True)


def _kinds(name: str, way: _Way) -> dict[str, Kind]:
    return {
        f"to_{name}": Kind(partial(_elements, way), rows=way.rows),
        f"to_{name}_scales": Kind(partial(_scales, way)),
    }


KINDS = {
    **_kinds("fp8_block", BLOCK),
    **_kinds("fp8_channel", CHANNEL),
    **_kinds("mxfp8", MXFP8),
    **_kinds("mxfp4", MXFP4),
    **_kinds("nvfp4", NVFP4),
    "to_nvfp4_global": Kind(_global),
    "largest": Kind(_of_all),
}
