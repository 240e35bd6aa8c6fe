"""Kinds that dequantize integers with zero points and scales of groups in float32.

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
from functools import lru_cache
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.errors import UnsupportedError
from ckptctl.numerics.quantization.formulas import IntegerGroups
from ckptctl.storage.computed import InputTensor, Kind, Output

if TYPE_CHECKING:
    import torch

WORD = 32
"""Bits of a word, and a number of integers that fill whole words at any width."""
FOUR, BYTE = 4, 8
EACH = WORD // FOUR
ORDERS = 8
"""Cached widths with the group of each column."""
STRETCH = 4 << 20
"""Bytes of a transposed weight that are read at a time."""

Room = Callable[[str, str, int], "torch.Tensor"]
"""Provides memory, given a use, a dtype and a number of elements, like :meth:`Output.scratch`."""


def _new(_use: str, dtype: str, count: int) -> torch.Tensor:
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype))


def unpacked(words: torch.Tensor, bits: int, dim: int, room: Room = _new) -> torch.Tensor:
    """Unpack uint8 integers from int32 words along the first or last dimension."""
    import torch

    if bits == BYTE and dim:
        return words.contiguous().view(torch.uint8)
    if bits == FOUR and dim:
        return _apart(words.contiguous().view(torch.uint8), room)
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
        # An arithmetic shift adds copies of the sign above the bits that are used.
        torch.bitwise_right_shift(groups.select(axis, word), offset, out=value)
        if (over := offset + bits - WORD) > 0:
            value.bitwise_and_((1 << (bits - over)) - 1)
            value.bitwise_or_(groups.select(axis, word + 1).bitwise_left_shift(bits - over))
        found.select(axis, field).copy_(value.bitwise_and_(mask))
    return found.flatten(0, 1) if dim == 0 else found.flatten(1, 2)


def _apart(packed: torch.Tensor, room: Room) -> torch.Tensor:
    """Return the lower and the upper half of each byte as two bytes."""
    import torch

    found, shifted = (
        room(use, "int16", packed.numel()).view(packed.shape) for use in ("unpacked", "field")
    )
    torch.bitwise_left_shift(found.copy_(packed), FOUR, out=shifted)
    return found.bitwise_or_(shifted).bitwise_and_(0x0F0F).view(torch.uint8)


def _padded(words: torch.Tensor, each: int, dim: int) -> torch.Tensor:
    import torch

    lacking = -words.shape[dim] % each
    if not lacking:
        return words
    shape = (lacking, words.shape[1]) if dim == 0 else (words.shape[0], lacking)
    return torch.cat((words, torch.zeros(shape, dtype=words.dtype)), dim=dim)


class _Weight(NamedTuple):
    """Inputs and arguments of a weight."""

    form: IntegerGroups
    integers: InputTensor
    scale: InputTensor
    zero: InputTensor | None = None
    order: InputTensor | None = None
    shape: InputTensor | None = None


def _weight(out: Output) -> _Weight:
    form: IntegerGroups = out.arguments
    integers, scale, *others = out.inputs
    return _Weight(form, integers, scale, **dict(zip(form.optional, others, strict=True)))


def _int_groups(out: Output) -> None:
    weight, rows, columns = _weight(out), out.rows, out.columns
    if weight.shape:
        sizes, name = weight.shape.read_all().view(-1).tolist(), weight.shape.entry.name
        if tuple(sizes) != out.computed.shape:
            why = f"it contains {sizes}, but the scales fit {list(out.computed.shape)}"
            raise UnsupportedError(f"`{name}` does not match the scales", where=name, why=why)
    width, group, transposed = out.computed.shape[-1], weight.form.group, weight.form.transposed
    which = _order(weight, width)
    unit = lcm(group, WORD) if which is None else width
    place = range(columns.start // unit * unit, min(-(-columns.stop // unit) * unit, width))
    for some in _stretches(weight, rows) if transposed else (rows,):
        read = _transposed if transposed else _straight
        integers, factors, zeros = read(out, weight, some, place)
        if zeros is not None:
            _require_middle(weight, zeros, centred=not transposed)
        straight = len(place) == len(columns) and out.computed.dtype == "float32"
        target = out.elements[some.start - rows.start : some.stop - rows.start]
        into = target if straight else out.get_scratch("numbers", "float32", integers.numel())
        numbers = into.view(len(some), len(place))
        numbers.copy_(integers)
        if which is not None:
            factors = factors.index_select(1, which)
            zeros = None if zeros is None else zeros.index_select(1, which)
        elif group < width:
            numbers = numbers.view(len(some), -1, group)
            part = slice(place.start // group, place.stop // group)
            factors = factors[:, part, None]
            zeros = None if zeros is None else zeros[:, part, None]
        if zeros is not None:
            numbers.sub_(zeros)
        numbers = numbers.mul_(factors).view(len(some), len(place))
        if not straight:
            target.copy_(numbers[:, columns.start - place.start : columns.stop - place.start])


def _straight(
    out: Output, weight: _Weight, rows: range, place: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Read the integers of some columns, and the scales and zero points of all groups."""
    import torch

    scale = _per_group(out, weight.scale, rows).to(torch.float32)
    zeros = _zeros(out, weight.zero, rows).to(torch.float32) if weight.zero else None
    return _integers(out, weight, rows, place), scale, zeros


def _require_middle(weight: _Weight, zeros: torch.Tensor, *, centred: bool) -> None:
    """Raise if a symmetric weight has zero points that change the result."""
    if not weight.form.symmetric:
        return
    middle = 0 if centred else 1 << (weight.form.bits - 1)
    other = zeros[zeros != middle]
    if other.numel():
        assert weight.zero
        name = weight.zero.entry.name
        raise UnsupportedError(
            f"`{name}` contradicts the configuration",
            where=name,
            why=f"symmetric weights have zero points of {middle}, but one is {int(other[0])}",
            hint="correct `quantization_config`, or use the tensors that belong to it",
        )


def _stretch(weight: _Weight, row: int) -> range:
    """Return the rows around *row* that are read together from a transposed weight."""
    height, width = weight.integers.entry.shape
    each = max(STRETCH // (4 * height) // WORD, 1) * WORD
    start = row // each * each
    return range(start, min(start + each, width))


def _stretches(weight: _Weight, rows: range) -> Iterator[range]:
    """Split *rows* into ranges that are read together."""
    start = rows.start
    while start < rows.stop:
        stop = min(_stretch(weight, start).stop, rows.stop)
        yield range(start, stop)
        start = stop


def _transposed(
    out: Output, weight: _Weight, rows: range, place: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Read the integers of some columns, and all scales and zero points, if transposed."""
    import torch

    bits, offset = weight.form.bits, weight.form.offset
    every = _stretch(weight, rows.start)
    own, words = slice(rows.start - every.start, rows.stop - every.start), _words(place, bits)

    def zeros(packed: torch.Tensor) -> torch.Tensor:
        found = unpacked(packed, bits, 1)[:, : len(every)].add(offset)
        return found.bitwise_and_((1 << bits) - 1).to(torch.float32)

    assert weight.zero
    packed = weight.integers.read_transposed(every, "int32", lambda found: found)[own]
    zero = weight.zero.read_transposed(_words(every, bits), "float32", zeros)[own]
    scale = weight.scale.read_transposed(every, "float32", lambda found: found.to(torch.float32))
    integers = unpacked(packed[:, words.start : words.stop], bits, 1, out.get_scratch)
    return integers[:, : len(place)], scale[own], zero


def _per_group(out: Output, tensor: InputTensor, rows: range) -> torch.Tensor:
    """Read a value for each group of columns, ``[rows, groups]``.

    Values for each row, each matrix or the whole tensor are ``[rows, 1]`` or ``[1, 1]``.
    """
    import torch

    form: IntegerGroups = out.arguments
    if form.group < out.computed.shape[-1]:
        return tensor.read(rows)
    found = tensor.read_all().view(-1, 1)
    if len(found) == 1:
        return found
    each = prod(out.computed.shape[:-1]) // len(found)
    which = torch.arange(rows.start, rows.stop).div_(each, rounding_mode="floor")
    return found.index_select(0, which)


def _integers(out: Output, weight: _Weight, rows: range, place: range) -> torch.Tensor:
    """Read the int8 integers of a range of columns that begins at a word."""
    import torch

    bits = weight.form.bits
    if not bits:
        return weight.integers.read(rows, place)
    packed = weight.integers.read(rows, _words(place, bits))
    found = unpacked(packed, bits, 1, out.get_scratch).view(torch.int8)[:, : len(place)]
    half = 1 << (bits - 1)
    return found.bitwise_xor_(-half) if bits == BYTE else found.sub_(half)


def _zeros(out: Output, zero: InputTensor, rows: range) -> torch.Tensor:
    """Read the zero points of rows, ``[rows, groups]``."""
    import torch

    form: IntegerGroups = out.arguments
    if zero.entry.dtype != "int32":
        return _per_group(out, zero, rows)
    words, bits, parts = zero.entry.shape[-2], form.bits, []
    for matrix, part in _matrices(rows, out.computed.shape[-2]):
        first = part.start // WORD * WORD
        last = min(-(-part.stop // WORD) * bits, words)
        held = range(matrix * words + first * bits // WORD, matrix * words + last)
        found = unpacked(zero.read(held), bits, 0)
        parts.append(found[part.start - first : part.stop - first].to(torch.int16))
    return torch.cat(parts).sub_(1 << (bits - 1))


def _matrices(rows: range, height: int) -> Iterator[tuple[int, range]]:
    """Yield each matrix that consecutive rows belong to, with the rows in it."""
    start = rows.start
    while start < rows.stop:
        matrix, row = divmod(start, height)
        stop = min(rows.stop, (matrix + 1) * height)
        yield matrix, range(row, row + stop - start)
        start = stop


def _order(weight: _Weight, width: int) -> torch.Tensor | None:
    """Return the group of each column, or None if groups are consecutive and complete."""
    import torch

    group = weight.form.group
    if weight.order is None:
        return None if width % group == 0 else _in_a_row(width, group)
    found, groups = weight.order.read_all().view(-1), -(-width // group)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < groups:
        name = weight.order.entry.name
        raise UnsupportedError(
            f"`{name}` refers to groups that do not exist",
            where=name,
            why=f"it refers to groups {int(found.min())} to {int(found.max())} of {groups}",
        )
    found = found.int()
    return None if width % group == 0 and torch.equal(found, _in_a_row(width, group)) else found


@lru_cache(ORDERS)
def _in_a_row(width: int, group: int) -> torch.Tensor:
    import torch

    every = torch.arange(width, dtype=torch.int32)
    return every.div_(group, rounding_mode="floor")


def _int_rows(out: Output) -> None:
    import torch

    weight, rows, columns = _weight(out), out.rows, out.columns
    assert weight.zero
    place = range(columns.start // EACH * EACH, -(-columns.stop // EACH) * EACH)
    words, group = _words(place, FOUR), weight.form.group
    codes = _interleaved(weight.integers.read(rows, words), out.get_scratch)
    some = slice(columns.start - place.start, columns.stop - place.start)
    for number in range(rows.start // group, -(-rows.stop // group)):
        own = range(max(number * group, rows.start), min((number + 1) * group, rows.stop))
        one = range(number, number + 1)
        zero = _interleaved(weight.zero.read(one, words)).to(torch.float32)
        scale = weight.scale.read(one, place).to(torch.float32)
        _require_middle(weight, zero, centred=False)
        part = slice(own.start - rows.start, own.stop - rows.start)
        numbers = out.get_scratch("numbers", "float32", len(own) * len(place))
        numbers = numbers.view(len(own), -1).copy_(codes[part]).sub_(zero).mul_(scale)
        out.elements[part].copy_(numbers[:, some])


def _words(place: range, bits: int) -> range:
    return range(place.start * bits // WORD, -(-place.stop * bits // WORD))


def _interleaved(words: torch.Tensor, room: Room = _new) -> torch.Tensor:
    """Unpack integers in AWQ's order, ``[rows, columns]``.

    Nibbles 0 to 7 of a word are columns 0, 2, 4, 6, 1, 3, 5, 7. Two exchanges restore the order.
    """
    import torch

    words = words.contiguous()
    swap = room("swap", "int32", words.numel()).view(words.shape)
    for bits, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        torch.bitwise_right_shift(words, bits, out=swap)
        swap.bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(swap).bitwise_xor_(swap.bitwise_left_shift_(bits))
    return unpacked(words, FOUR, 1, room)


KINDS = {
    "int_groups": Kind(_int_groups, overflows=True),
    "int_rows": Kind(_int_rows, overflows=True),
}
