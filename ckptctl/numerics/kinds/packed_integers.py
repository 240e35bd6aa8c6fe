"""Kinds that dequantize integers with group-wise zero points and scales in float32.

Packed integers fill the bits of int32 words without gaps, from the lowest bits. *Centered* integers
are stored plus 2 to the power of (bits - 1). Results are rounded once.

``int_groups``: groups of consecutive columns, as in compressed-tensors and GPTQ. Sources:
``pack_quantized`` and ``naive_quantized`` in its ``compressors``, and ``_dequantize`` in its
``quantization/lifecycle/forward_helpers.py``; ``convert_gptq_file`` in GPTQModel's
``utils/model_dequant.py``. Inputs: the integers, int8 ``[..., rows, columns]`` or centered and
packed along the columns, int32 ``[..., rows, words]``; the scales, floating-point ``[..., rows,
groups]``, or any shape with as many elements if there is one group or one scale. Then follow the
inputs that the arguments name: ``zero``, also int8, or centered and packed along the rows, int32
``[..., words, groups]``; ``order``, the group of each column, ``[columns]``; ``shape``, the
required shape of the weight. GPTQ's are transposed and not centered: int32 ``[words, rows]``; the
scales, ``[groups, rows]``; ``zero``, ``[groups, words]``. Its groups need not divide a row.

``int_rows``: groups of consecutive rows of 4-bit integers, as in AWQ; the matrix is the transposed
weight. Source: ``convert_awq_file`` in GPTQModel's ``utils/model_dequant.py``. Inputs: the
integers, 8 columns in a word in AWQ's order, int32 ``[rows, words]``; the scales, floating-point
``[groups, columns]``; ``zero``, packed in the same way, int32 ``[groups, words]``.

The arguments of both are :class:`~ckptctl.numerics.quantization.formulas.IntegerGroups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.errors import UnsupportedError
from ckptctl.numerics.quantization.formulas import IntegerGroups
from ckptctl.storage.compute_device import cache_tables
from ckptctl.storage.computed import InputTensor, Kind, OutputRectangle

if TYPE_CHECKING:
    import torch

WORD_BITS = 32
"""Bits of a packed word; also a number of integers that fills complete words at any bit width."""
FOUR_BITS, BYTE_BITS = 4, 8
NIBBLES_PER_WORD = WORD_BITS // FOUR_BITS
GROUP_INDEX_CACHE = 8
"""Number of row widths for which the group index of each column is cached."""
TRANSPOSED_CHUNK_BYTES = 4 << 20
"""Size in bytes of the chunks in which a transposed weight is read."""

ScratchAllocator = Callable[[str, str, int], "torch.Tensor"]
"""Function of a buffer name, a dtype and an element count that returns an uninitialized tensor.

See :meth:`Output.get_scratch`.
"""


def _allocate_tensor(_use: str, dtype: str, count: int) -> torch.Tensor:
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype))


def unpack_integers(
    words: torch.Tensor, bits: int, dim: int, allocate: ScratchAllocator = _allocate_tensor
) -> torch.Tensor:
    """Unpack *bits*-wide integers from int32 words to uint8 along dimension *dim*."""
    import torch

    if bits == BYTE_BITS and dim:
        return words.contiguous().view(torch.uint8)
    if bits == FOUR_BITS and dim:
        return _split_nibbles(words.contiguous().view(torch.uint8), allocate)
    period = lcm(bits, WORD_BITS)
    period_words, fields = period // WORD_BITS, period // bits
    words = _pad_words(words, period_words, dim)
    count, mask = words.shape[dim] // period_words, (1 << bits) - 1
    split = (count, period_words, -1) if dim == 0 else (len(words), count, period_words)
    shape = (count, fields, words.shape[1]) if dim == 0 else (len(words), count, fields)
    groups, axis = words.reshape(split), 1 if dim == 0 else 2
    result = allocate("unpacked", "uint8", prod(shape)).view(shape)
    value = allocate("field", "int32", words.numel() // period_words).view(
        groups.select(axis, 0).shape
    )
    for field in range(fields):
        word, offset = divmod(field * bits, WORD_BITS)
        # An arithmetic shift adds copies of the sign above the bits that are used.
        torch.bitwise_right_shift(groups.select(axis, word), offset, out=value)
        if (overflow_bits := offset + bits - WORD_BITS) > 0:
            value.bitwise_and_((1 << (bits - overflow_bits)) - 1)
            value.bitwise_or_(
                groups.select(axis, word + 1).bitwise_left_shift(bits - overflow_bits)
            )
        result.select(axis, field).copy_(value.bitwise_and_(mask))
    return result.flatten(0, 1) if dim == 0 else result.flatten(1, 2)


def _split_nibbles(packed: torch.Tensor, allocate: ScratchAllocator) -> torch.Tensor:
    """Split each byte into two bytes, the lower 4 bits first."""
    import torch

    result, shifted = (
        allocate(use, "int16", packed.numel()).view(packed.shape) for use in ("unpacked", "field")
    )
    torch.bitwise_left_shift(result.copy_(packed), FOUR_BITS, out=shifted)
    return result.bitwise_or_(shifted).bitwise_and_(0x0F0F).view(torch.uint8)


def _pad_words(words: torch.Tensor, period_words: int, dim: int) -> torch.Tensor:
    import torch

    missing_words = -words.shape[dim] % period_words
    if not missing_words:
        return words
    shape = (missing_words, words.shape[1]) if dim == 0 else (words.shape[0], missing_words)
    return torch.cat((words, torch.zeros(shape, dtype=words.dtype)), dim=dim)


class _IntegerWeight(NamedTuple):
    """Input tensors and parameters from which a weight of packed integers is dequantized."""

    form: IntegerGroups
    integers: InputTensor
    scale: InputTensor
    zero: InputTensor | None = None
    order: InputTensor | None = None
    shape: InputTensor | None = None


def _parse_inputs(out: OutputRectangle) -> _IntegerWeight:
    form: IntegerGroups = out.arguments
    integers, scale, *optional_inputs = out.inputs
    return _IntegerWeight(
        form, integers, scale, **dict(zip(form.optional, optional_inputs, strict=True))
    )


def _dequantize_groups(out: OutputRectangle) -> None:
    weight, rows, columns = _parse_inputs(out), out.rows, out.columns
    if weight.shape:
        sizes, name = weight.shape.read_all().view(-1).tolist(), weight.shape.entry.name
        if tuple(sizes) != out.computed.shape:
            why = f"it contains {sizes}, but the scales fit {list(out.computed.shape)}"
            raise UnsupportedError(f"`{name}` does not match the scales", where=name, why=why)
    width, group, transposed = out.computed.shape[-1], weight.form.group, weight.form.transposed
    group_of_column = _read_group_order(weight, width)
    unit = lcm(group, WORD_BITS) if group_of_column is None else width
    column_range = range(columns.start // unit * unit, min(-(-columns.stop // unit) * unit, width))
    for row_range in _split_into_chunks(weight, rows) if transposed else (rows,):
        read_parts = _read_transposed if transposed else _read_row_major
        integers, factors, zeros = read_parts(out, weight, row_range, column_range)
        if zeros is not None:
            _require_symmetric_zeros(weight, zeros, is_centered=not transposed)
        writes_directly = len(column_range) == len(columns) and out.computed.dtype == "float32"
        target = out.elements[row_range.start - rows.start : row_range.stop - rows.start]
        into = (
            target if writes_directly else out.get_scratch("numbers", "float32", integers.numel())
        )
        numbers = into.view(len(row_range), len(column_range))
        numbers.copy_(integers)
        if group_of_column is not None:
            factors = factors.index_select(1, group_of_column)
            zeros = None if zeros is None else zeros.index_select(1, group_of_column)
        elif group < width:
            numbers = numbers.view(len(row_range), -1, group)
            part = slice(column_range.start // group, column_range.stop // group)
            factors = factors[:, part, None]
            zeros = None if zeros is None else zeros[:, part, None]
        if zeros is not None:
            numbers.sub_(zeros)
        numbers = numbers.mul_(factors).view(len(row_range), len(column_range))
        if not writes_directly:
            target.copy_(
                numbers[:, columns.start - column_range.start : columns.stop - column_range.start]
            )


def _read_row_major(
    out: OutputRectangle, weight: _IntegerWeight, rows: range, column_range: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Read the integers of *column_range*, and the scales and zero points of all groups in *rows*.

    Zero points are None if the weight has none.
    """
    import torch

    scale = _read_group_values(out, weight.scale, rows).to(torch.float32)
    zeros = _read_zero_points(out, weight.zero, rows).to(torch.float32) if weight.zero else None
    return _read_integers(out, weight, rows, column_range), scale, zeros


def _require_symmetric_zeros(
    weight: _IntegerWeight, zeros: torch.Tensor, *, is_centered: bool
) -> None:
    """Raise if a symmetric weight has zero points other than the middle of the codes."""
    if not weight.form.symmetric:
        return
    middle = 0 if is_centered else 1 << (weight.form.bits - 1)
    wrong_zeros = zeros[zeros != middle]
    if wrong_zeros.numel():
        assert weight.zero
        name = weight.zero.entry.name
        raise UnsupportedError(
            f"`{name}` contradicts the configuration",
            where=name,
            why=f"symmetric weights have zero points of {middle}, but one is {int(wrong_zeros[0])}",
            hint="correct `quantization_config`, or use the tensors that belong to it",
        )


def _find_transposed_chunk(weight: _IntegerWeight, row: int) -> range:
    """Return the chunk of rows around *row* that is read at once from a transposed weight."""
    height, width = weight.integers.entry.shape
    chunk_rows = max(TRANSPOSED_CHUNK_BYTES // (4 * height) // WORD_BITS, 1) * WORD_BITS
    start = row // chunk_rows * chunk_rows
    return range(start, min(start + chunk_rows, width))


def _split_into_chunks(weight: _IntegerWeight, rows: range) -> Iterator[range]:
    """Split *rows* of a transposed weight at the boundaries of the chunks in which it is read."""
    start = rows.start
    while start < rows.stop:
        stop = min(_find_transposed_chunk(weight, start).stop, rows.stop)
        yield range(start, stop)
        start = stop


def _read_transposed(
    out: OutputRectangle, weight: _IntegerWeight, rows: range, column_range: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Read and transpose integers, scales and zero points, like :func:`_read_row_major`."""
    import torch

    bits, offset = weight.form.bits, weight.form.offset
    chunk = _find_transposed_chunk(weight, rows.start)
    rows_in_chunk, words = (
        slice(rows.start - chunk.start, rows.stop - chunk.start),
        _to_word_range(column_range, bits),
    )

    def unpack_zeros(packed: torch.Tensor) -> torch.Tensor:
        result = unpack_integers(packed, bits, 1)[:, : len(chunk)].add(offset)
        return result.bitwise_and_((1 << bits) - 1).to(torch.float32)

    assert weight.zero
    packed = weight.integers.read_transposed(chunk, "int32", lambda values: values)[rows_in_chunk]
    zero = weight.zero.read_transposed(_to_word_range(chunk, bits), "float32", unpack_zeros)[
        rows_in_chunk
    ]
    scale = weight.scale.read_transposed(chunk, "float32", lambda values: values.to(torch.float32))
    integers = unpack_integers(packed[:, words.start : words.stop], bits, 1, out.get_scratch)
    return integers[:, : len(column_range)], scale[rows_in_chunk], zero


def _read_group_values(out: OutputRectangle, tensor: InputTensor, rows: range) -> torch.Tensor:
    """Read the scales or zero points of *rows* as ``[rows, groups]``.

    If a group spans all columns, the result is ``[rows, 1]``, or ``[1, 1]`` for a single value.
    """
    import torch

    form: IntegerGroups = out.arguments
    if form.group < out.computed.shape[-1]:
        return tensor.read(rows)
    values = tensor.read_all().view(-1, 1)
    if len(values) == 1:
        return values
    rows_per_value = prod(out.computed.shape[:-1]) // len(values)
    value_of_row = torch.arange(rows.start, rows.stop).div_(rows_per_value, rounding_mode="floor")
    return values.index_select(0, value_of_row)


def _read_integers(
    out: OutputRectangle, weight: _IntegerWeight, rows: range, column_range: range
) -> torch.Tensor:
    """Read a rectangle of integers as int8, where *column_range* begins at a word boundary."""
    import torch

    bits = weight.form.bits
    if not bits:
        return weight.integers.read(rows, column_range)
    packed = weight.integers.read(rows, _to_word_range(column_range, bits))
    integers = unpack_integers(packed, bits, 1, out.get_scratch).view(torch.int8)[
        :, : len(column_range)
    ]
    half = 1 << (bits - 1)
    return integers.bitwise_xor_(-half) if bits == BYTE_BITS else integers.sub_(half)


def _read_zero_points(out: OutputRectangle, zero: InputTensor, rows: range) -> torch.Tensor:
    """Read the zero points of *rows* as ``[rows, groups]``, unpacked and centered if int32."""
    import torch

    form: IntegerGroups = out.arguments
    if zero.entry.dtype != "int32":
        return _read_group_values(out, zero, rows)
    words, bits, parts = zero.entry.shape[-2], form.bits, []
    for matrix, part in _split_by_matrix(rows, out.computed.shape[-2]):
        first_row = part.start // WORD_BITS * WORD_BITS
        last_word = min(-(-part.stop // WORD_BITS) * bits, words)
        word_rows = range(
            matrix * words + first_row * bits // WORD_BITS, matrix * words + last_word
        )
        integers = unpack_integers(zero.read(word_rows), bits, 0)
        parts.append(integers[part.start - first_row : part.stop - first_row].to(torch.int16))
    return torch.cat(parts).sub_(1 << (bits - 1))


def _split_by_matrix(rows: range, height: int) -> Iterator[tuple[int, range]]:
    """Split *rows* of stacked matrices by matrix, and yield each matrix index with its rows."""
    start = rows.start
    while start < rows.stop:
        matrix, row = divmod(start, height)
        stop = min(rows.stop, (matrix + 1) * height)
        yield matrix, range(row, row + stop - start)
        start = stop


def _read_group_order(weight: _IntegerWeight, width: int) -> torch.Tensor | None:
    """Return the group index of each column, or None if all groups are consecutive and complete."""
    import torch

    group = weight.form.group
    if weight.order is None:
        return None if width % group == 0 else _build_consecutive_groups(width, group)
    group_of_column, groups = weight.order.read_all().view(-1), -(-width // group)
    if (
        len(group_of_column)
        and not 0 <= int(group_of_column.min()) <= int(group_of_column.max()) < groups
    ):
        name = weight.order.entry.name
        raise UnsupportedError(
            f"`{name}` refers to groups that do not exist",
            where=name,
            why=f"it refers to groups {int(group_of_column.min())} to "
            f"{int(group_of_column.max())} of {groups}",
        )
    group_of_column = group_of_column.int()
    return (
        None
        if width % group == 0
        and torch.equal(group_of_column, _build_consecutive_groups(width, group))
        else group_of_column
    )


@cache_tables(GROUP_INDEX_CACHE)
def _build_consecutive_groups(width: int, group: int) -> torch.Tensor:
    import torch

    columns = torch.arange(width, dtype=torch.int32)
    return columns.div_(group, rounding_mode="floor")


def _dequantize_row_groups(out: OutputRectangle) -> None:
    import torch

    weight, rows, columns = _parse_inputs(out), out.rows, out.columns
    assert weight.zero
    column_range = range(
        columns.start // NIBBLES_PER_WORD * NIBBLES_PER_WORD,
        -(-columns.stop // NIBBLES_PER_WORD) * NIBBLES_PER_WORD,
    )
    words, group = _to_word_range(column_range, FOUR_BITS), weight.form.group
    codes = _unpack_awq(weight.integers.read(rows, words), out.get_scratch)
    wanted_columns = slice(columns.start - column_range.start, columns.stop - column_range.start)
    for group_number in range(rows.start // group, -(-rows.stop // group)):
        group_rows = range(
            max(group_number * group, rows.start), min((group_number + 1) * group, rows.stop)
        )
        group_range = range(group_number, group_number + 1)
        zero = _unpack_awq(weight.zero.read(group_range, words)).to(torch.float32)
        scale = weight.scale.read(group_range, column_range).to(torch.float32)
        _require_symmetric_zeros(weight, zero, is_centered=False)
        part = slice(group_rows.start - rows.start, group_rows.stop - rows.start)
        numbers = out.get_scratch("numbers", "float32", len(group_rows) * len(column_range))
        numbers = numbers.view(len(group_rows), -1).copy_(codes[part]).sub_(zero).mul_(scale)
        out.elements[part].copy_(numbers[:, wanted_columns])


def _to_word_range(integer_range: range, bits: int) -> range:
    return range(
        integer_range.start * bits // WORD_BITS, -(-integer_range.stop * bits // WORD_BITS)
    )


def _unpack_awq(words: torch.Tensor, allocate: ScratchAllocator = _allocate_tensor) -> torch.Tensor:
    """Unpack integers in AWQ's order, ``[rows, columns]``."""
    return unpack_integers(restore_awq_order(words, allocate), FOUR_BITS, 1, allocate)


def restore_awq_order(
    words: torch.Tensor, allocate: ScratchAllocator = _allocate_tensor
) -> torch.Tensor:
    """Sort the integers of words in AWQ's order, in place if *words* are contiguous.

    Nibbles 0 to 7 of a word are columns 0, 2, 4, 6, 1, 3, 5, 7. Two exchanges restore the order.
    """
    import torch

    words = words.contiguous()
    swap = allocate("swap", "int32", words.numel()).view(words.shape)
    for bits, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        torch.bitwise_right_shift(words, bits, out=swap)
        swap.bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(swap).bitwise_xor_(swap.bitwise_left_shift_(bits))
    return words


KINDS = {
    "int_groups": Kind(_dequantize_groups, overflows=True),
    "int_rows": Kind(_dequantize_row_groups, overflows=True),
}
