"""Kinds that merge low-rank changes into rows of a weight: in float32, rounded once.

LoRA (Hu et al., arXiv:2106.09685): ``W + scale · B A``. DoRA (Liu et al., arXiv:2402.09353): the
rows of that, scaled to given lengths. Sources: peft's ``tuners/lora`` (``merge_and_unload``),
torchtune's ``get_merged_lora_ckpt``. The arguments are :class:`Change`, of which the n-th, counted
from 0, has inputs of its own. A and the magnitudes are small by nature and are kept.

Inputs:
    base: Floating ``[rows, columns]``.
    a{n}: ``[rank, columns]``.
    b{n}: ``[rows, rank]``, at least those of the change.
    magnitude{n}: One length for each row of B; optional.

``dora_bias`` is a bias that torchtune's DoRA scales as the rows of its weight: a layer computes
``length / |W + scale · B A|`` times ``(W + scale · B A) x + bias`` (``modules/peft/dora.py``). PEFT
leaves the bias as it is. Its inputs are ``bias``, floating ``[rows]``, and ``weight{n}``, floating
``[rows, columns]``, W, instead of ``base``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind, last_of

if TYPE_CHECKING:
    import torch

    from ckptctl.planner.mapping.deltas import Delta, Factor

BLOCK = 64
LIMIT = 4 << 20
"""Bytes of W in float32 at a time, where a bias is scaled."""


class Change(NamedTuple):
    """What is added to some rows of a weight.

    Attributes:
        delta: The rows, and the parts of the factors that are for them.
        scale: What B A is multiplied by.
    """

    delta: Delta
    scale: float


def _changes(computed: Computed) -> Iterator[tuple[int, Change]]:
    """Yield the changes, numbered."""
    return enumerate(typed(tuple[Change, ...], computed.arguments))


def _unit(factor: Factor) -> tuple[int, int]:
    """Return how many rows of *factor* change places among themselves, and the axes outside."""
    moved = (place for place, axis in enumerate(factor.order) if place != axis)
    outer = next(moved, len(factor.order))
    return prod(factor.axes[outer:]), outer


def _in_order(factor: Factor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of whole units, ``[units * unit, width]``, in the order that is wanted."""
    _, outer = _unit(factor)
    inner = [axis - outer + 1 for axis in factor.order[outer:]]
    split = rows.view(-1, *factor.axes[outer:], rows.shape[-1])
    return split.permute(0, *inner, len(inner) + 1).reshape(rows.shape)


def _weight(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    base = inputs.tensor("base", rows).to(torch.float32)
    for number, (delta, scale) in _changes(computed):
        first, last = max(delta.start, rows.start), min(delta.stop, rows.stop)
        if first < last:
            part = base[first - rows.start : last - rows.start]
            changed = range(first - delta.start, last - delta.start)
            _add(inputs, number, delta, scale, changed, part)
            if delta.magnitude:
                part.mul_(_scales(inputs, number, delta, changed, part))
    target = elements(out, computed.dtype, len(columns))
    target.copy_(base[:, columns.start : columns.stop])


def _add(
    inputs: Inputs, number: int, delta: Delta, scale: float, rows: range, part: torch.Tensor
) -> None:
    """Add scale · B A to *part*, which is *rows* of those that the change applies to."""
    import torch

    a = inputs.whole(f"a{number}").to(torch.float32)
    if delta.a.axes:
        a = _in_order(delta.a, a.t().contiguous()).t().contiguous()
    held, first = _stored(delta.b, rows)
    b = inputs.tensor(f"b{number}", held).to(torch.float32)
    _add_product(part, _wanted(delta.b, b, first, rows), a, scale)


def _scales(
    inputs: Inputs, number: int, delta: Delta, rows: range, part: torch.Tensor
) -> torch.Tensor:
    """Return DoRA's factors of *part*, to which B A is added already: ``[rows, 1]``."""
    import torch

    assert delta.magnitude
    held, first = _stored(delta.magnitude, rows)
    stored = inputs.whole(f"magnitude{number}")[held.start : held.stop].view(-1, 1)
    length = _wanted(delta.magnitude, stored.to(torch.float32), first, rows)
    norms: torch.Tensor = torch.linalg.norm(part, dim=1, keepdim=True)
    return length / norms


def _add_product(part: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float) -> None:
    """Add ``scale * b @ a``, with every element independent of how many rows *b* has.

    Whole blocks of rows take the same way through the matrix multiplication, whatever part of a
    weight is computed at once: equal inputs give equal bits.
    """
    whole = len(b) - len(b) % BLOCK
    for start in range(0, whole, BLOCK):
        rows = slice(start, start + BLOCK)
        part[rows].addmm_(b[rows], a, alpha=scale)
    if whole < len(b):
        rest, factors = (one.new_zeros(BLOCK, one.shape[1]) for one in (part, b))
        rest[: len(b) - whole], factors[: len(b) - whole] = part[whole:], b[whole:]
        part[whole:] = rest.addmm_(factors, a, alpha=scale)[: len(b) - whole]


def _stored(factor: Factor, rows: range) -> tuple[range, int]:
    """Return the stored rows of whole units that have *rows* of a change, and the first of these.

    The first is counted as those of the change are.
    """
    unit, _ = _unit(factor)
    first, last = rows.start // unit * unit, -(-rows.stop // unit) * unit
    return range(factor.start + first, factor.start + last), first


def _wanted(factor: Factor, units: torch.Tensor, first: int, rows: range) -> torch.Tensor:
    """Return *rows* of a change, in order, of units from *first* on."""
    units = _in_order(factor, units) if factor.axes else units
    return units[rows.start - first : rows.stop - first]


def _bias(
    inputs: Inputs, computed: Computed, _rows: range, columns: range, out: memoryview
) -> None:
    import torch

    bias = inputs.tensor("bias", range(1)).to(torch.float32).view(-1)[columns.start : columns.stop]
    for number, change in _changes(computed):
        delta = change.delta
        assert delta.bias
        at = delta.bias.start
        first = max(at, columns.start)
        last = min(at + delta.stop - delta.start, columns.stop)
        step = max(LIMIT // (4 * last_of(inputs.entry(f"weight{number}").shape)), 1)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            factors = _factors(inputs, number, change, range(begin - at, end - at))
            bias[begin - columns.start : end - columns.start].mul_(factors)
    elements(out, computed.dtype, len(columns)).copy_(bias.view(1, -1))


def _factors(inputs: Inputs, number: int, change: Change, rows: range) -> torch.Tensor:
    """Return the factors of *rows* of those that the change applies to, ``[rows]``."""
    import torch

    delta, scale = change
    held = range(delta.start + rows.start, delta.start + rows.stop)
    weight = inputs.tensor(f"weight{number}", held).to(torch.float32)
    _add(inputs, number, delta, scale, rows, weight)
    return _scales(inputs, number, delta, rows, weight).view(-1)


# The model's own elements are what may be infinite or NaN; what an adapter makes of them is not.
KINDS = {
    "lora": Kind(_weight, lambda inputs, rows: inputs.given("base", rows), rows=BLOCK),
    "dora_bias": Kind(_bias, lambda inputs, _rows: inputs.given("bias", range(1))),
}
