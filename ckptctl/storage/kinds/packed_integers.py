"""Kinds that multiply integers, less their zero points, by the scale of their group, in float32.

Packed integers fill the bits of int32 words without gaps, the earlier ones the lower bits. What is
stored less 2 to the power of (bits - 1) is said below to be centred. All are rounded once.

``int_groups``: groups of consecutive columns, as compressed-tensors has them. Sources:
``pack_quantized`` and ``naive_quantized`` in its ``compressors``, and ``_dequantize`` in its
``quantization/lifecycle/forward_helpers.py``. Inputs: ``weight``, int8 ``[..., rows,
columns]`` or centred and packed along the columns, int32 ``[..., rows, words]``; ``scale``,
floating ``[..., rows, groups]``, where there is one group or one scale anything that has as many
elements; ``zero``, likewise int8, or centred and packed along the rows, int32
``[..., words, groups]``; ``order``, the group of each column, ``[columns]``; ``shape``, the sizes
that the weight has to have. The last three are optional. Parameters: ``bits``, of packed integers;
``group``, columns of a group.

``int_rows``: groups of consecutive rows, as GPTQ and AWQ have them; the matrix is the weight
transposed. Sources: ``convert_gptq_file`` and ``convert_awq_file`` in GPTQModel's
``utils/model_dequant.py``. Inputs: ``weight``, packed: for GPTQ along the rows, int32 ``[words,
columns]``, for AWQ along the columns, int32 ``[rows, words]``; ``scale``, floating ``[groups,
columns]``; ``zero``, packed along the columns, int32 ``[groups, words]``; ``order``, the group of
each row, int32 ``[rows]``, optional. Parameters: ``bits``; ``group``, rows of a group; ``plus``,
what is added to zero points, modulo the number of codes; ``interleaved``, 1 where 8 columns are
packed in the order of AWQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from math import lcm, prod
from typing import TYPE_CHECKING

from ckptctl.catalog import Computed
from ckptctl.errors import UnsupportedError
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind
from ckptctl.storage.kinds.fp4 import nibbles

if TYPE_CHECKING:
    import torch

WORD = 32
"""Bits of a word; as many integers of any width fill whole words."""
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of 8 columns is."""
AWQ_BLOCK = len(AWQ)
FOUR, BYTE = 4, 8
FEW = 16
"""Groups of consecutive rows that are computed one after the other."""


Room = Callable[[str, str, int], "torch.Tensor"]
"""Returns room for a use: its dtype, and how many elements; as :meth:`Inputs.scratch`."""


def _new(_use: str, dtype: str, count: int) -> torch.Tensor:
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype))


def unpacked(words: torch.Tensor, bits: int, dim: int, room: Room = _new) -> torch.Tensor:
    """Return the integers, uint8, that fill int32 words along a dimension, the first or last."""
    import torch

    if bits == BYTE and dim:
        return words.contiguous().view(torch.uint8)
    period = lcm(bits, WORD)
    each, fields = period // WORD, period // bits
    words = _padded(words, each, dim)
    count, mask = words.shape[dim] // each, (1 << bits) - 1
    split = (count, each, -1) if dim == 0 else (len(words), count, each)
    shape = (count, fields, words.shape[1]) if dim == 0 else (len(words), count, fields)
    groups, axis = words.reshape(split), 1 if dim == 0 else 2
    found = room("unpacked", "uint8", prod(shape)).view(shape)
    value = room("field", "int32", words.numel() // each).view(groups.select(axis, 0).shape)
    for field in range(fields):
        word, offset = divmod(field * bits, WORD)
        # An arithmetic shift brings in copies of the sign, above what is kept.
        torch.bitwise_right_shift(groups.select(axis, word), offset, out=value)
        if (over := offset + bits - WORD) > 0:
            value.bitwise_and_((1 << (bits - over)) - 1)
            value.bitwise_or_(groups.select(axis, word + 1).bitwise_left_shift(bits - over))
        found.select(axis, field).copy_(value.bitwise_and_(mask))
    return found.flatten(0, 1) if dim == 0 else found.flatten(1, 2)


def _padded(words: torch.Tensor, each: int, dim: int) -> torch.Tensor:
    import torch

    lacking = -words.shape[dim] % each
    if not lacking:
        return words
    shape = (lacking, words.shape[1]) if dim == 0 else (words.shape[0], lacking)
    return torch.cat((words, torch.zeros(shape, dtype=words.dtype)), dim=dim)


def _int_groups(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    _require_shape(inputs, computed)
    width, group = computed.shape[-1], int(computed.parameters["group"])
    ordered = "order" in computed.inputs
    unit = width if ordered else lcm(group, WORD)
    place = range(columns.start // unit * unit, min(-(-columns.stop // unit) * unit, width))
    scale = per_group(inputs, "scale", computed, rows)
    target = elements(out, computed.dtype, len(columns))
    narrow = scale.dtype == target.dtype == torch.bfloat16
    dtype = "bfloat16" if narrow else "float32"
    straight = len(place) == len(columns) and dtype == computed.dtype
    count = len(rows) * len(place)
    into = target.view(-1) if straight else inputs.scratch("numbers", dtype, count)
    numbers = into.view(len(rows), len(place))
    _integers(inputs, computed, rows, place, numbers)
    factors, zeros = scale.to(numbers.dtype), None
    if "zero" in computed.inputs:
        zeros = _zeros(inputs, computed, rows).to(numbers.dtype)
    if ordered:
        which = _order(inputs, range(width), factors.shape[1])
        factors = factors.index_select(1, which)
        zeros = None if zeros is None else zeros.index_select(1, which)
    elif group < width:
        numbers = numbers.view(len(rows), -1, group)
        some = slice(place.start // group, place.stop // group)
        factors = factors[:, some, None]
        zeros = None if zeros is None else zeros[:, some, None]
    if zeros is not None:
        numbers.sub_(zeros)
    numbers = numbers.mul_(factors).view(len(rows), len(place))
    if not straight:
        target.copy_(numbers[:, columns.start - place.start : columns.stop - place.start])


def _require_shape(inputs: Inputs, computed: Computed) -> None:
    """Refuse a weight of another shape than its scales tell."""
    if "shape" not in computed.inputs:
        return
    said, name = inputs.whole("shape").view(-1).tolist(), inputs.entry("shape").name
    if tuple(said) != computed.shape:
        why = f"it says {said}, and the scales fit {list(computed.shape)}"
        raise UnsupportedError(f"`{name}` does not fit the scales", where=name, why=why)


def per_group(inputs: Inputs, key: str, computed: Computed, rows: range) -> torch.Tensor:
    """Return what each group of consecutive columns has one of, ``[rows, groups]``.

    Of what each row, each matrix or the whole tensor has one of: ``[rows, 1]`` or ``[1, 1]``.
    """
    import torch

    width, group = computed.shape[-1], int(computed.parameters["group"])
    if group < width:
        return inputs.tensor(key, rows)
    found = inputs.whole(key).view(-1, 1)
    if len(found) == 1:
        return found
    each = prod(computed.shape[:-1]) // len(found)
    which = torch.arange(rows.start, rows.stop).div_(each, rounding_mode="floor")
    return found.index_select(0, which)


def _integers(
    inputs: Inputs, computed: Computed, rows: range, place: range, into: torch.Tensor
) -> None:
    """Put the integers of some columns, from one on that begins a word, into floats."""
    import torch

    bits = int(computed.parameters.get("bits", 0))
    if not bits:
        into.copy_(inputs.tensor("weight", rows)[:, place.start : place.stop])
        return
    words = _words(place, bits)
    packed = inputs.tensor("weight", rows)[:, words.start : words.stop]
    half = 1 << (bits - 1)
    if bits == FOUR and len(words) * WORD == len(place) * bits:
        codes = tuple(float(code - half) for code in range(1 << bits))
        nibbles(inputs, packed.contiguous().view(torch.uint8), codes, into.view(-1))
        return
    found = unpacked(packed, bits, 1, inputs.scratch)
    into.copy_(found[:, : len(place)]).sub_(half)


def _zeros(inputs: Inputs, computed: Computed, rows: range) -> torch.Tensor:
    """Return the zero points of rows, ``[rows, groups]``."""
    import torch

    entry, bits = inputs.entry("zero"), int(computed.parameters.get("bits", 0))
    if entry.dtype != "int32":
        return per_group(inputs, "zero", computed, rows)
    words, parts = entry.shape[-2], []
    for matrix, part in _matrices(rows, computed.shape[-2]):
        first = part.start // WORD * WORD
        last = min(-(-part.stop // WORD) * bits, words)
        held = range(matrix * words + first * bits // WORD, matrix * words + last)
        found = unpacked(inputs.tensor("zero", held), bits, 0)
        parts.append(found[part.start - first : part.stop - first].to(torch.int16))
    return torch.cat(parts).sub_(1 << (bits - 1))


def _matrices(rows: range, height: int) -> Iterator[tuple[int, range]]:
    """Yield the matrices that consecutive rows are of, and which of its rows."""
    start = rows.start
    while start < rows.stop:
        matrix, row = divmod(start, height)
        stop = min(rows.stop, (matrix + 1) * height)
        yield matrix, range(row, row + stop - start)
        start = stop


def _order(inputs: Inputs, some: range, groups: int) -> torch.Tensor:
    """Return which group each row, or column, is of."""
    found = inputs.whole("order").view(-1)[some.start : some.stop].int()
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < groups:
        name = inputs.entry("order").name
        raise UnsupportedError(
            f"`{name}` names groups that are not there",
            where=name,
            why=f"{int(found.min())} to {int(found.max())}, and there are {groups}",
        )
    return found


def _int_rows(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    block = AWQ_BLOCK if "interleaved" in computed.parameters else WORD
    place = range(columns.start // block * block, -(-columns.stop // block) * block)
    place = range(place.start, min(place.stop, computed.shape[-1]))
    codes = _codes(inputs, computed, rows, place)
    groups = inputs.entry("scale").shape[0]
    if "order" in computed.inputs:
        which = _order(inputs, rows, groups)
    else:
        which = torch.arange(rows.start, rows.stop, dtype=torch.int32)
        which.div_(int(computed.parameters["group"]), rounding_mode="floor")
    some = slice(columns.start - place.start, columns.stop - place.start)
    target = elements(out, computed.dtype, len(columns))
    numbers = inputs.scratch("numbers", "float32", codes.numel()).view(codes.shape)
    runs = [(group, len(list(members))) for group, members in groupby(which.tolist())]
    if len(runs) > FEW:
        zero, scale = _of_rows(inputs, computed, which, place)
        target.copy_(numbers.copy_(codes).sub_(zero).mul_(scale)[:, some])
        return
    start = 0
    for group, count in runs:
        zero, scale = _of_group(inputs, computed, group, place)
        part = numbers[:count].copy_(codes[start : start + count]).sub_(zero).mul_(scale)
        target[start : start + count] = part[:, some]
        start += count


def _of_rows(
    inputs: Inputs, computed: Computed, which: torch.Tensor, place: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the zero points and scales of the group that each row is of, ``[rows, columns]``."""
    import torch

    groups, index = torch.unique(which, return_inverse=True)
    parts = [_of_group(inputs, computed, group, place) for group in groups.tolist()]
    zeros, scales = (torch.cat(some).index_select(0, index) for some in zip(*parts, strict=True))
    return zeros, scales


def _codes(inputs: Inputs, computed: Computed, rows: range, place: range) -> torch.Tensor:
    """Return the integers of some rows and columns, uint8."""
    bits = int(computed.parameters["bits"])
    if "interleaved" in computed.parameters:
        words = inputs.block("weight", rows, _words(place, bits))
        return _interleaved(words, bits, inputs.scratch)
    first = rows.start // WORD * WORD
    last = min(-(-rows.stop // WORD) * bits, inputs.entry("weight").shape[0])
    words = inputs.block("weight", range(first * bits // WORD, last), place)
    found = unpacked(words, bits, 0, inputs.scratch)
    return found[rows.start - first : rows.stop - first]


def _of_group(
    inputs: Inputs, computed: Computed, group: int, place: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the zero points and scales of a group, ``[1, columns]`` each."""
    import torch

    bits = int(computed.parameters["bits"])
    one = range(group, group + 1)
    words = inputs.block("zero", one, _words(place, bits))
    if "interleaved" in computed.parameters:
        zero = _interleaved(words, bits)
    else:
        zero = unpacked(words, bits, 1)[:, : len(place)]
    zero = zero.add(int(computed.parameters.get("plus", 0))).bitwise_and_((1 << bits) - 1)
    scale = inputs.block("scale", one, place).to(torch.float32, copy=True)
    return zero.to(torch.float32), scale


def _words(place: range, bits: int) -> range:
    return range(place.start * bits // WORD, -(-place.stop * bits // WORD))


def _interleaved(words: torch.Tensor, bits: int, room: Room = _new) -> torch.Tensor:
    """Return what is packed in the order of AWQ, ``[rows, columns]``."""
    found = unpacked(words, bits, 1, room)
    return found.view(len(found), -1, AWQ_BLOCK)[:, :, _awq()].flatten(1)


@cache
def _awq() -> torch.Tensor:
    import torch

    return torch.tensor(AWQ)


KINDS = {
    "int_groups": Kind(_int_groups, lambda _inputs, _rows: None),
    "int_rows": Kind(_int_rows, lambda _inputs, _rows: None, rows=WORD),
}
