"""Kinds that quantize a weight by its largest elements: round to nearest, no calibration.

Each scheme has a kind for the quantized elements and one for their scales. Both read the weight in
chunks. The weight is the first input: float16, bfloat16 or float32, ``[rows, columns]``. Arithmetic
uses its dtype if the reference does, so that all bits are equal. A stack of weights with complete
blocks is treated as a weight with more rows.

``to_fp8_block``: E4M3 times the inverse scale of its block of 128 x 128, in float32; the last block
of a row or column may be smaller. Source: ``Fp8Quantize`` in transformers'
``integrations/finegrained_fp8.py``.

``to_fp8_channel``: E4M3, a scale for each row. ``to_mxfp8``: E4M3, an E8M0 scale for each 32
elements. ``to_mxfp4``: two E2M1 numbers in a byte, the low half first, with the same scales.
``to_nvfp4``: the same with an E4M3 scale for each 16 elements. The second input is the float32
global scale, by which all scales are multiplied. Sources: compressed-tensors'
``calculate_qparams``, ``generate_mx_scales``, ``generate_gparam`` and ``pack_fp4_to_uint8``, as
llm-compressor's ``model_free_ptq`` calls them.

``to_int4`` and ``to_int8``: symmetric integers with a scale for each 128 elements, made unsigned by
an offset and packed into int32 from the lowest bits. ``to_int8_channel``: int8, a scale for each
row. ``to_weight_shape``: the shape of the weight, which is stored next to packed integers. Sources:
``calculate_qparams``, ``quantize`` and ``pack_to_int32`` of compressed-tensors.

``to_nvfp4_global`` is that global scale, shared by weights that programs fuse. Its inputs are of
the kind ``largest``: the largest absolute value of a weight, computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ckptctl.catalog import VIRTUAL_PREFIX
from ckptctl.errors import RefusedError, format_option
from ckptctl.numerics.kinds.narrow_floats import FP8_SCALE_OF_HALVES, shift_fp8_to_float16
from ckptctl.storage.computed import InputTensor, Kind, OutputRectangle, SharedResults
from ckptctl.storage.outcome import NO_ROUNDING, Rounding

if TYPE_CHECKING:
    import torch

    Scales: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

CHUNK_ELEMENTS = 1 << 18
"""Approximate number of elements that are quantized at a time, in complete blocks."""
DEVICE_CHUNK_ELEMENTS = 1 << 22
"""The same on a CUDA device, where the launch of a kernel takes longer than its computation."""
FP8_MAX, FP4_MAX = 448.0, 6.0
"""The largest values of E4M3 and E2M1."""
EXPONENT_BIAS, FLOAT32_MANTISSA_BITS = 127, 23
EXPONENT_MASK, MAGNITUDE_MASK = 0x7F800000, 0x7FFFFFFF
"""Bit masks of a float32."""
E2M1_STEP = 1.5 * 2.0**22
"""Factor for rounding to E2M1.

Near this multiple of 2 ** e, the spacing of float32 numbers is 2 ** (e - 1), as in E2M1.
"""
E2M1_OF_HALVES = 2.0**-14
"""Factor that maps E2M1 values to float16 values with the same lowest exponent bit."""
ROUND_TO_INTEGER = 1.5 * 2.0**23
"""Summand that rounds a float32 to an integer, with ties to even, which its lowest bits contain."""
MIN_FLOAT32_SQUARES, MAX_FLOAT32_SQUARES = 1e-20, 1e35
"""Sums of squares between which float32 can neither overflow nor lose what matters."""
BYTE_BITS = 8
CODE_BITS = ((9, 0x7), (12, 0x8), (21, 0x70), (24, 0x80))
"""Shifts and masks that convert two scaled float16 in an int32 to two E2M1 codes in a byte."""


@dataclass(frozen=True, slots=True)
class _BlockScheme:
    """Scheme that quantizes a matrix in blocks, each with its own scale.

    Attributes:
        rows: Number of rows in a block.
        columns: Number of columns in a block, or 0 for all columns of the weight.
        compute_divisors: Computes the divisors of blocks from their largest absolute values and the
            global scale, ``[block rows, block columns]``.
        to_stored_scales: Converts divisors to the scales that the output stores.
        is_float32: Whether to compute in float32 regardless of the weight's dtype.
        is_inverse: Whether *compute_divisors* returns factors instead of divisors.
        has_power_scales: Whether divisors are powers of two, for which the quotients, once rounded,
            do not exceed the largest value of E4M3 or E2M1.
        is_packed: Whether elements are E2M1, two in a byte, instead of E4M3.
        integer_bits: Bits of an integer, or 0 if elements are floating-point.
        columns_per_element: Number of columns of the weight that a stored element contains.
    """

    rows: int
    columns: int
    compute_divisors: Scales
    to_stored_scales: Callable[[torch.Tensor], torch.Tensor]
    is_float32: bool = False
    is_inverse: bool = False
    has_power_scales: bool = False
    is_packed: bool = False
    integer_bits: int = 0
    columns_per_element: int = 1


def _quantize_elements(scheme: _BlockScheme, out: OutputRectangle) -> Rounding:
    """Fill *out* with quantized elements, and return a summary of the rounding errors."""
    weight, shape, global_scale = _parse_inputs(out)
    per_element = scheme.columns_per_element
    columns = range(out.columns.start * per_element, out.columns.stop * per_element)
    total = NO_ROUNDING
    for block_rows in _split_into_blocks(
        out.rows, shape[0], scheme.rows, _get_chunk_elements(out) // max(shape[1], 1)
    ):
        matrix = weight.read(block_rows)
        block_columns = scheme.columns or shape[1]
        for span in _split_into_blocks(
            columns, shape[1], block_columns, _get_chunk_elements(out) // len(block_rows)
        ):
            blocks = _Blocks(out, scheme, matrix[:, span.start : span.stop])
            scales = blocks.compute_divisors(weight, global_scale)
            codes = blocks.quantize_blocks(
                scales if global_scale is None else scales / global_scale
            )
            wanted = _OutputPart(block_rows, span, out.rows, columns)
            total += blocks.measure_rounding(wanted)
            target = out.elements[wanted.rows.start - out.rows.start :][: len(wanted.rows)]
            first_column = wanted.columns.start - columns.start
            target = target[
                :, first_column // per_element : (first_column + len(wanted.columns)) // per_element
            ]
            target.copy_(wanted.select_from(codes, per_element))
    return total


def _write_scales(scheme: _BlockScheme, out: OutputRectangle) -> None:
    """Fill *out* with the scales of its blocks, in the dtype in which they are stored."""
    rows, columns, target = out.rows, out.columns, out.elements
    weight, shape, global_scale = _parse_inputs(out)
    block_columns = scheme.columns or shape[1]
    weight_rows = range(rows.start * scheme.rows, min(rows.stop * scheme.rows, shape[0]))
    weight_columns = range(
        columns.start * block_columns, min(columns.stop * block_columns, shape[1])
    )
    for block_rows in _split_into_blocks(
        weight_rows, shape[0], scheme.rows, _get_chunk_elements(out) // max(shape[1], 1)
    ):
        matrix = weight.read(block_rows)
        for span in _split_into_blocks(
            weight_columns, shape[1], block_columns, _get_chunk_elements(out) // len(block_rows)
        ):
            blocks = _Blocks(out, scheme, matrix[:, span.start : span.stop])
            scales = blocks.compute_divisors(weight, global_scale)
            first_block = span.start // block_columns - columns.start
            target_rows = target[block_rows.start // scheme.rows - rows.start :][: len(scales)]
            target_rows[:, first_block : first_block + scales.shape[1]].copy_(
                scheme.to_stored_scales(scales)
            )


def _get_chunk_elements(out: OutputRectangle) -> int:
    return CHUNK_ELEMENTS if out.device_elements is None else DEVICE_CHUNK_ELEMENTS


def _parse_inputs(out: OutputRectangle) -> tuple[InputTensor, tuple[int, int], torch.Tensor | None]:
    """Return the weight, its 2-D shape, and the global scale or None if the scheme has none."""
    weight, *shared = out.inputs
    *rows, columns = weight.entry.shape
    return weight, (math.prod(rows), columns), shared[0].read_all() if shared else None


def _split_into_blocks(
    requested: range, size: int, block_size: int, max_size: int
) -> Iterator[range]:
    """Yield ranges of complete blocks, each about *max_size* indices, that cover *requested*."""
    step = max(block_size, max_size // block_size * block_size)
    end = min(-(-requested.stop // block_size) * block_size, size)
    for start in range(requested.start // block_size * block_size, end, step):
        yield range(start, min(start + step, end))


@dataclass(frozen=True, slots=True)
class _OutputPart:
    """Intersection of the blocks that were read with the rectangle to write.

    Attributes:
        block_rows: Rows of the weight that the blocks cover.
        block_columns: Columns of the weight that the blocks cover.
        wanted_rows: Rows of the weight to write.
        wanted_columns: Columns of the weight to write.
    """

    block_rows: range
    block_columns: range
    wanted_rows: range
    wanted_columns: range

    @property
    def rows(self) -> range:
        """Rows of the weight that are in the blocks and to be written."""
        return _intersect_ranges(self.block_rows, self.wanted_rows)

    @property
    def columns(self) -> range:
        """Columns of the weight that are in the blocks and to be written."""
        return _intersect_ranges(self.block_columns, self.wanted_columns)

    def select_from(self, matrix: torch.Tensor, per_element: int = 1) -> torch.Tensor:
        """Return the rectangle of *matrix* to write, where *matrix* covers the blocks.

        Each element of *matrix* contains *per_element* columns of the weight.
        """
        row = self.rows.start - self.block_rows.start
        column = self.columns.start - self.block_columns.start
        stop = column + len(self.columns)
        return matrix[row : row + len(self.rows), column // per_element : stop // per_element]


def _intersect_ranges(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


class _Blocks:
    """Complete blocks of a weight, in scratch memory that is reused for the next blocks.

    Args:
        out: Provides scratch memory.
        scheme: Quantization of the blocks.
        matrix: Elements of the weight, ``[rows, columns]``; smaller blocks are padded with zeros.
    """

    def __init__(self, out: OutputRectangle, scheme: _BlockScheme, matrix: torch.Tensor) -> None:
        height, width = matrix.shape
        block_rows, block_columns = scheme.rows, scheme.columns or width
        rows, columns = -(-height // block_rows), -(-width // block_columns)
        self._out, self._scheme = out, scheme
        self._shape = (rows, block_rows, columns, block_columns)
        self._size = rows * block_rows * columns * block_columns
        self._dtype = matrix.dtype
        self._elements = self._allocate("plain", "float32")
        padded = self._as_matrix(self._elements)
        if padded.shape != matrix.shape:
            padded.zero_()
        padded[:height, :width].copy_(matrix)

    def compute_divisors(
        self, weight: InputTensor, global_scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the divisor of each block, ``[block rows, block columns]``.

        Raises:
            RefusedError: *weight* has elements that no scale can represent.
        """
        import torch

        bits = self._allocate("values", "int32")
        torch.bitwise_and(self._elements.view(torch.int32), MAGNITUDE_MASK, out=bits)
        largest = bits.amax((1, 3)).view(torch.float32)
        largest = largest if self._scheme.is_float32 else largest.to(self._dtype)
        return _require_finite(
            weight, self._scheme.compute_divisors(_require_finite(weight, largest), global_scale)
        )

    def quantize_blocks(self, divisors: torch.Tensor) -> torch.Tensor:
        """Quantize the blocks and return their codes, ``[rows, columns or bytes or words]``.

        Quotients are rounded to the dtype in which torch would compute them.
        """
        import torch

        wide_divisors = divisors.float()[:, None, :, None]
        values = self._values = self._allocate("values", "float32")
        self._factors = 1.0 / wide_divisors if self._scheme.is_inverse else wide_divisors
        if self._scheme.is_inverse:
            torch.mul(self._elements, wide_divisors, out=values)
        else:
            torch.div(self._elements, wide_divisors, out=values)
        dtype = torch.promote_types(self._dtype, divisors.dtype)
        # By powers of two, only values that E4M3 rounds to 0 are inexact, and E2M1 has no -0.
        is_exact = self._scheme.has_power_scales and not self._scheme.is_packed
        if dtype != torch.float32 and not (self._scheme.is_float32 or is_exact):
            values.copy_(self._allocate("narrow", str(dtype).removeprefix("torch.")).copy_(values))
        if self._scheme.integer_bits:
            return self._round_to_integers(self._scheme.integer_bits)
        return self._round_to_e2m1() if self._scheme.is_packed else self._round_to_e4m3()

    def measure_rounding(self, part: _OutputPart) -> Rounding:
        """Measure the errors of the last quantization, for the elements in *part* only."""
        import torch

        errors = self._values.mul_(self._factors).sub_(self._elements)
        wanted_errors, wanted_elements = (
            part.select_from(self._as_matrix(errors)),
            part.select_from(self._as_matrix(self._elements)),
        )
        if not wanted_errors.numel():
            return NO_ROUNDING
        low, high = torch.aminmax(wanted_errors)
        return Rounding(
            max(-float(low), float(high)),
            _sum_squares(wanted_errors),
            _sum_squares(wanted_elements),
        )

    def _round_to_e4m3(self) -> torch.Tensor:
        """Round the quotients to E4M3 and return their bytes."""
        values = self._clamp(FP8_MAX)
        codes = self._allocate("codes", "float8_e4m3fn").copy_(values)
        halves = shift_fp8_to_float16(codes.view(-1), self._allocate("moved", "int16").view(-1))
        self._factors = self._factors * FP8_SCALE_OF_HALVES
        values.copy_(halves.view(self._shape))
        return self._as_matrix(codes)

    def _round_to_integers(self, bits: int) -> torch.Tensor:
        """Round the quotients to integers and return their codes, packed if the scheme packs."""
        import torch

        half = 1 << (bits - 1)
        packs = self._scheme.columns_per_element > 1
        shift = ROUND_TO_INTEGER + half if packs else ROUND_TO_INTEGER
        values = self._values.clamp_(-half, half - 1).add_(shift)
        codes = self._allocate("codes", "uint8" if packs else "int8")
        codes.copy_(values.view(torch.int32))
        values.sub_(shift)
        if packs and 2 * bits == BYTE_BITS:
            pairs = codes.view(torch.int16)
            moved, halves = (
                self._allocate(*buffer).view(-1)[: pairs.numel()].view(pairs.shape)
                for buffer in (("moved", "int16"), ("pairs", "uint8"))
            )
            codes = halves.copy_(
                torch.bitwise_right_shift(pairs, bits, out=moved).bitwise_or_(pairs)
            )
        matrix = self._as_matrix(codes)
        return matrix.view(torch.int32) if packs else matrix

    def _round_to_e2m1(self) -> torch.Tensor:
        """Round the quotients to E2M1 and return their codes, two in a byte, low half first.

        Adding and subtracting a large number rounds to a multiple of its step, with ties to even.
        """
        import torch

        values = self._clamp(FP4_MAX).add_(0.0)  # no -0
        steps = self._allocate("steps", "float32")
        torch.bitwise_and(values.view(torch.int32), EXPONENT_MASK, out=steps.view(torch.int32))
        steps.clamp_min_(1.0).mul_(E2M1_STEP)
        rounded = self._allocate("rounded", "float32")
        torch.add(values, steps, out=rounded).sub_(steps)
        values = torch.copysign(rounded, values, out=values)
        halves = self._allocate("moved", "float16").copy_(steps.copy_(values).mul_(E2M1_OF_HALVES))
        pairs = self._as_matrix(halves).view(torch.int32)
        buffers = (self._allocate(use, "int32").view(-1) for use in ("bits", "pairs"))
        bits, codes = (buffer[: pairs.numel()].view(pairs.shape) for buffer in buffers)
        codes.zero_()
        for shift, mask in CODE_BITS:
            codes |= torch.bitwise_right_shift(pairs, shift, out=bits).bitwise_and_(mask)
        return codes

    def _clamp(self, limit: float) -> torch.Tensor:
        return self._values if self._scheme.has_power_scales else self._values.clamp_(-limit, limit)

    def _allocate(self, use: str, dtype: str) -> torch.Tensor:
        return self._out.get_scratch(f"quantize {use}", dtype, self._size).view(self._shape)

    def _as_matrix(self, blocks: torch.Tensor) -> torch.Tensor:
        rows, block_rows, columns, _ = self._shape
        return blocks.view(rows * block_rows, columns * blocks.shape[-1])


def _sum_squares(matrix: torch.Tensor) -> float:
    """Return the sum of squares, in float32 for each row unless that could overflow or vanish."""
    import torch

    norms = torch.linalg.vector_norm(matrix, dim=1)
    total = float(torch.linalg.vector_norm(norms, dtype=torch.float64)) ** 2
    if MIN_FLOAT32_SQUARES < total < MAX_FLOAT32_SQUARES:
        return total
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2


def _require_finite(weight: InputTensor, values: torch.Tensor) -> torch.Tensor:
    """Return nonnegative *values*, or raise if one of them is infinite or NaN."""
    if not float(values.amax()) < math.inf:
        raise RefusedError(
            "a weight to be quantized contains infinity, NaN or values near the dtype's maximum",
            where=f"tensor `{weight.entry.name.removeprefix(VIRTUAL_PREFIX)}`",
            why="no scale can represent them",
            hint=f"pass {format_option('--quantize-not GLOB')} to skip it",
        )
    return values


# ------------------------------------------------------------------------------------- scales


def _compute_inverse_scales(largest: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    is_nonzero = largest > 0
    return (FP8_MAX / largest.where(is_nonzero, 1.0)).where(is_nonzero, 1.0)


def _compute_fp8_scales(largest: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    import torch

    scales = _divide(largest, FP8_MAX)
    return scales.where(scales != 0, torch.finfo(scales.dtype).eps)


def _compute_integer_scales(
    largest: torch.Tensor, _: torch.Tensor | None, *, bits: int
) -> torch.Tensor:
    import torch

    scales = _divide(largest, ((1 << bits) - 1) / 2)
    return scales.where(scales != 0, torch.finfo(scales.dtype).eps)


def _compute_power_scales(
    largest: torch.Tensor, _: torch.Tensor | None, *, offset: int
) -> torch.Tensor:
    """Compute power-of-two scales from the *largest* absolute value of each block.

    A scale is rounded up where the largest value would overflow. A scale that is zero in float16 is
    replaced by 1.
    """
    import torch

    kinds = {torch.float32: (torch.int32, 23), torch.float16: (torch.int16, 10)}
    integer_dtype, mantissa = kinds.get(largest.dtype, (torch.int16, 7))
    bits = largest.view(integer_dtype) + (1 << (mantissa - 2))
    rounded = bits.bitwise_and_(-(1 << mantissa)).view(largest.dtype)
    scales = (rounded.float() * 2.0**-offset).clamp_min_(2.0**-EXPONENT_BIAS).to(largest.dtype)
    return scales if largest.dtype != torch.float16 else scales.where(scales != 0, 1.0)


def _to_e8m0(scales: torch.Tensor) -> torch.Tensor:
    import torch

    return (scales.float().view(torch.int32) >> FLOAT32_MANTISSA_BITS).to(torch.uint8)


def _divide(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide *values* as the CPU does.

    CUDA multiplies by the inverse of a number, which rounds differently than a division by a
    tensor.
    """
    return values / values.new_tensor(divisor)


def _compute_nvfp4_scales(largest: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    import torch

    assert shared is not None
    scales = (
        (shared * _divide(largest, FP4_MAX))
        .clamp(-FP8_MAX, FP8_MAX)
        .to(torch.float8_e4m3fn)
        .float()
    )
    return scales.where(scales != 0, 0.125).to(largest.dtype)


def _keep_scales(scales: torch.Tensor) -> torch.Tensor:
    return scales


# ----------------------------------------------------------------------------- global scale


_LARGEST_VALUES = SharedResults["torch.Tensor"]()


def _compute_largest(out: OutputRectangle) -> None:
    weight, (height, width), _ = _parse_inputs(out)

    def find_largest() -> torch.Tensor:
        import torch

        rows = _split_into_blocks(
            range(height), height, 1, _get_chunk_elements(out) // max(width, 1)
        )
        parts = (_require_finite(weight, weight.read(part).abs().amax()) for part in rows)
        return torch.stack(list(parts)).amax().cpu()  # other threads may use other devices

    out.elements.copy_(
        _LARGEST_VALUES.get_or_compute(weight.files, weight.entry.name, find_largest)
    )


def _compute_global_scale(out: OutputRectangle) -> None:
    import torch

    all_largest = torch.stack([tensor.read_all() for tensor in out.inputs])
    largest = all_largest.amax().clamp(min=torch.finfo(all_largest.dtype).tiny).reshape(1)
    out.elements.copy_(
        torch.nan_to_num(FP8_MAX * FP4_MAX / largest, nan=1.0, posinf=1.0, neginf=1.0)
    )


MXFP8 = _BlockScheme(
    1, 32, partial(_compute_power_scales, offset=8), _to_e8m0, has_power_scales=True
)
MXFP4 = _BlockScheme(
    1,
    32,
    partial(_compute_power_scales, offset=2),
    _to_e8m0,
    has_power_scales=True,
    is_packed=True,
    columns_per_element=2,
)
NVFP4 = _BlockScheme(
    1, 16, _compute_nvfp4_scales, _keep_scales, is_packed=True, columns_per_element=2
)
FP8_CHANNEL = _BlockScheme(1, 0, _compute_fp8_scales, _keep_scales)
FP8_BLOCK = _BlockScheme(
    128, 128, _compute_inverse_scales, lambda scales: 1.0 / scales, is_float32=True, is_inverse=True
)


def _build_integer_scheme(bits: int, columns: int, columns_per_element: int) -> _BlockScheme:
    return _BlockScheme(
        1,
        columns,
        partial(_compute_integer_scales, bits=bits),
        _keep_scales,
        integer_bits=bits,
        columns_per_element=columns_per_element,
    )


def _write_weight_shape(out: OutputRectangle) -> None:
    import torch

    shape = out.inputs[0].entry.shape if out.inputs else out.arguments
    out.write(torch.tensor(shape))


def _build_kinds(name: str, scheme: _BlockScheme) -> dict[str, Kind]:
    return {
        f"to_{name}": Kind(partial(_quantize_elements, scheme), rows_per_group=scheme.rows),
        f"to_{name}_scales": Kind(partial(_write_scales, scheme)),
    }


KINDS = {
    **_build_kinds("fp8_block", FP8_BLOCK),
    **_build_kinds("fp8_channel", FP8_CHANNEL),
    **_build_kinds("mxfp8", MXFP8),
    **_build_kinds("mxfp4", MXFP4),
    **_build_kinds("nvfp4", NVFP4),
    **_build_kinds("int4", _build_integer_scheme(4, 128, 8)),
    **_build_kinds("int8", _build_integer_scheme(8, 128, 4)),
    **_build_kinds("int8_channel", _build_integer_scheme(8, 0, 1)),
    "to_weight_shape": Kind(_write_weight_shape),
    "to_nvfp4_global": Kind(_compute_global_scale),
    "largest": Kind(_compute_largest),
}
