"""Kinds that store packed integers in the format of compressed-tensors, without arithmetic.

AWQ and GPTQ store the transposed weight; compressed-tensors packs the columns of the weight, and
its zero points along the rows. All use the same unsigned codes, so every code, scale and zero point
keeps its bits and only changes its place.

``repacked_gptq``: GPTQ's words, transposed. The optional second input is the group of each column,
which must be consecutive. ``repacked_awq``: AWQ's words, unpacked, transposed and packed again.
``repacked_scales``: scales, transposed. The optional second input is the zero points of a symmetric
weight, which must be the middle of the codes. ``repacked_zeros``: packed zero points ``[groups,
words]`` of columns as words of rows, ``[words, groups]``. The arguments of these four are
:class:`~ckptctl.numerics.quantization.formulas.IntegerGroups`.

``reciprocal``: the inverse of a float32, as in compressed-tensors' ``ModelOptNvfp4Converter``.

``checked_powers``: E8M0 scales as uint8, none of which may be 255. It is NaN in OCP Microscaling
Formats v1.0, 2 to the power of 128 in transformers, and infinite in compressed-tensors.

Sources: ``AutoAWQConverter`` in ``entrypoints/convert/converters/autoawq.py`` and ``pack_to_int32``
of compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

from ckptctl.errors import UnsupportedError, format_option
from ckptctl.numerics.kinds.packed_integers import (
    FOUR_BITS,
    NIBBLES_PER_WORD,
    WORD_BITS,
    restore_awq_order,
    unpack_integers,
)
from ckptctl.numerics.quantization.formulas import IntegerGroups
from ckptctl.storage.computed import InputTensor, Kind, OutputRectangle

if TYPE_CHECKING:
    import torch

E8M0_NAN = 255
CHUNK_NUMEL = 1 << 20
"""Number of elements, of at most 4 bytes each, in the chunks in which a matrix is transposed."""


def _read_transposed(
    tensor: InputTensor, rows: range, dtype: str
) -> Iterator[tuple[range, torch.Tensor]]:
    """Yield parts of *rows* of the transposed matrix, from chunks that further reads share."""
    height, width = tensor.entry.shape
    size = max(CHUNK_NUMEL // max(height, 1), 1)
    start = rows.start
    while start < rows.stop:
        first = start // size * size
        chunk = range(first, min(first + size, width))
        part = range(start, min(chunk.stop, rows.stop))
        matrix = tensor.read_transposed(chunk, dtype, lambda values: values)
        yield part, matrix[part.start - chunk.start : part.stop - chunk.start]
        start = part.stop


def _select_columns(out: OutputRectangle, matrix: torch.Tensor) -> torch.Tensor:
    return matrix[:, out.columns.start : out.columns.stop]


def _repack_gptq(out: OutputRectangle) -> None:
    words, *order = out.inputs
    if order:
        _require_consecutive_groups(order[0], out.arguments.group)
    _transpose(out, words)


def _transpose(out: OutputRectangle, tensor: InputTensor) -> None:
    for part, matrix in _read_transposed(tensor, out.rows, tensor.entry.dtype):
        target = out.elements[part.start - out.rows.start :][: len(part)]
        target.copy_(_select_columns(out, matrix))


def _require_consecutive_groups(order: InputTensor, group: int) -> None:
    import torch

    group_of_column = order.read_all().view(-1)
    expected = torch.arange(len(group_of_column), dtype=group_of_column.dtype)
    if not torch.equal(group_of_column, expected.div_(group, rounding_mode="floor")):
        name = order.entry.name
        raise UnsupportedError(
            f"`{name}` orders columns by activation",
            where=name,
            why="compressed-tensors has no groups of columns that are not consecutive",
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )


def _repack_awq(out: OutputRectangle) -> None:
    import torch

    (words,) = out.inputs
    rows = range(out.rows.start // NIBBLES_PER_WORD, -(-out.rows.stop // NIBBLES_PER_WORD))
    shifts = torch.arange(0, WORD_BITS, FOUR_BITS, dtype=torch.int32)[None, :, None]
    for part, packed in _read_transposed(words, rows, "int32"):
        columns = packed[
            :, out.columns.start * NIBBLES_PER_WORD : out.columns.stop * NIBBLES_PER_WORD
        ]
        sorted_words = restore_awq_order(columns.clone())
        codes = (sorted_words[:, None] >> shifts).bitwise_and_(0xF).to(torch.uint8)
        pairs = codes.view(-1, columns.shape[1]).view(torch.int16)
        matrix = (pairs >> FOUR_BITS).bitwise_or_(pairs).to(torch.uint8).view(torch.int32)
        first = part.start * NIBBLES_PER_WORD
        start, stop = max(first, out.rows.start), min(part.stop * NIBBLES_PER_WORD, out.rows.stop)
        target = out.elements[start - out.rows.start : stop - out.rows.start]
        target.copy_(matrix[start - first : stop - first])


def _repack_scales(out: OutputRectangle) -> None:
    scales, *zeros = out.inputs
    form: IntegerGroups = out.arguments
    for tensor in zeros:
        middle = 1 << (form.bits - 1)
        zero_points = _read_zero_points(tensor, form, scales.entry.shape[1])
        wrong = zero_points[zero_points != middle]
        if wrong.numel():
            raise UnsupportedError(
                f"`{tensor.entry.name}` contradicts the configuration",
                where=tensor.entry.name,
                why=f"symmetric weights have zero points of {middle}, but one is {int(wrong[0])}",
                hint="correct `quantization_config`, or use the tensors that belong to it",
            )
    _transpose(out, scales)


def _read_zero_points(zeros: InputTensor, form: IntegerGroups, columns: int) -> torch.Tensor:
    """Read the zero points of all groups as uint8 ``[groups, columns]``."""
    words = zeros.read_all()
    words = words.clone() if form.transposed else restore_awq_order(words.clone())
    codes = unpack_integers(words, form.bits, 1)[:, :columns]
    return codes.add(form.offset).bitwise_and_((1 << form.bits) - 1)


def _repack_zeros(out: OutputRectangle) -> None:
    zeros, scales = out.inputs
    form: IntegerGroups = out.arguments
    codes = _read_zero_points(zeros, form, scales.entry.shape[1])
    words = _pack_integers(codes, form.bits).t()
    out.elements.copy_(_select_columns(out, words[out.rows.start : out.rows.stop]))


def _pack_integers(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes into int32 words along the columns, the first in the lowest bits."""
    import torch

    period = lcm(bits, WORD_BITS)
    fields, words_per_period = period // bits, period // WORD_BITS
    rows, columns = codes.shape
    count = -(-columns // fields)
    padded = torch.nn.functional.pad(codes, (0, count * fields - columns))
    values = padded.to(torch.int64).view(rows, count, fields)
    words = torch.zeros((rows, count, words_per_period), dtype=torch.int64)
    for field in range(fields):
        word, offset = divmod(field * bits, WORD_BITS)
        words[..., word] |= values[..., field] << offset
        if offset + bits > WORD_BITS:
            words[..., word + 1] |= values[..., field] >> (WORD_BITS - offset)
    return words.to(torch.int32).view(rows, -1)[:, : -(-columns * bits // WORD_BITS)]


def _write_reciprocal(out: OutputRectangle) -> None:
    (value,) = out.inputs
    out.write(1 / value.read_all())


def _copy_powers(out: OutputRectangle) -> None:
    import torch

    (scales,) = out.inputs
    powers = scales.read(out.rows, out.columns).view(torch.uint8)
    if bool((powers == E8M0_NAN).any()):
        raise UnsupportedError(
            f"`{scales.entry.name}` contains the scale {E8M0_NAN}",
            where=scales.entry.name,
            why="formats disagree on its value, which is NaN, infinite or 2 to the power of 128",
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )
    out.elements.copy_(powers)


KINDS = {
    "repacked_gptq": Kind(_repack_gptq, host_only=True),
    "repacked_awq": Kind(_repack_awq, host_only=True),
    "repacked_scales": Kind(_repack_scales, host_only=True),
    "repacked_zeros": Kind(_repack_zeros, host_only=True),
    "reciprocal": Kind(_write_reciprocal, host_only=True),
    "checked_powers": Kind(_copy_powers, host_only=True),
}
