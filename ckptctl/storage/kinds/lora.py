"""Kinds that merge low-rank changes into rows of a weight: in float32, rounded once.

LoRA (Hu et al., arXiv:2106.09685): ``W + scale · B A``. DoRA (Liu et al., arXiv:2402.09353): the
rows of that, scaled to given lengths. Sources: peft's ``tuners/lora`` (``merge_and_unload``),
torchtune's ``get_merged_lora_ckpt``. The arguments are :class:`Change`, of which the n-th, counted
from 0, has inputs of its own. A and the magnitudes are small by nature and are kept.

Inputs:
    base: Floating ``[rows, columns]``.
    a{n}: ``[rank, columns]``.
    b{n}: ``[rows of the change, rank]``.
    magnitude{n}: One length for each row of B; optional.

``dora_bias`` is a bias that torchtune's DoRA scales as the rows of its weight: a layer computes
``length / |W + scale · B A|`` times ``(W + scale · B A) x + bias`` (``modules/peft/dora.py``). PEFT
leaves the bias as it is. Its inputs are ``bias``, floating ``[rows]``, and ``weight{n}``, floating
``[rows, columns]``, W, instead of ``base``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind, last_of

if TYPE_CHECKING:
    import torch

BLOCK = 64
LIMIT = 4 << 20
"""Bytes of W in float32 at a time, where a bias is scaled."""


class Change(NamedTuple):
    """What is added to some rows of a weight.

    Attributes:
        rows: The rows.
        scale: What B A is multiplied by.
        has_magnitude: Whether they are scaled to given lengths then.
        bias_start: Where the elements for the rows begin in a bias that is scaled as they are.
    """

    rows: range
    scale: float
    has_magnitude: bool = False
    bias_start: int = 0


def _changes(computed: Computed) -> Iterator[tuple[int, Change]]:
    """Yield the changes, numbered."""
    return enumerate(typed(tuple[Change, ...], computed.arguments))


def _weight(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    base = inputs.tensor("base", rows).to(torch.float32)
    for number, change in _changes(computed):
        start = change.rows.start
        first, last = max(start, rows.start), min(change.rows.stop, rows.stop)
        if first < last:
            part = base[first - rows.start : last - rows.start]
            changed = range(first - start, last - start)
            _add(inputs, number, change.scale, changed, part)
            if change.has_magnitude:
                part.mul_(_scales(inputs, number, changed, part))
    target = elements(out, computed.dtype, len(columns))
    target.copy_(base[:, columns.start : columns.stop])


def _add(inputs: Inputs, number: int, scale: float, rows: range, part: torch.Tensor) -> None:
    """Add scale · B A to *part*, which is *rows* of those that the change applies to."""
    import torch

    a = inputs.whole(f"a{number}").to(torch.float32)
    b = inputs.tensor(f"b{number}", rows).to(torch.float32)
    _add_product(part, b, a, scale)


def _scales(inputs: Inputs, number: int, rows: range, part: torch.Tensor) -> torch.Tensor:
    """Return DoRA's factors of *part*, to which B A is added already: ``[rows, 1]``."""
    import torch

    length = inputs.whole(f"magnitude{number}")[rows.start : rows.stop].view(-1, 1)
    norms: torch.Tensor = torch.linalg.norm(part, dim=1, keepdim=True)
    return length.to(torch.float32) / norms


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


def _bias(
    inputs: Inputs, computed: Computed, _rows: range, columns: range, out: memoryview
) -> None:
    import torch

    bias = inputs.tensor("bias", range(1)).to(torch.float32).view(-1)[columns.start : columns.stop]
    for number, change in _changes(computed):
        at = change.bias_start
        first = max(at, columns.start)
        last = min(at + len(change.rows), columns.stop)
        step = max(LIMIT // (4 * last_of(inputs.entry(f"weight{number}").shape)), 1)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            factors = _factors(inputs, number, change, range(begin - at, end - at))
            bias[begin - columns.start : end - columns.start].mul_(factors)
    elements(out, computed.dtype, len(columns)).copy_(bias.view(1, -1))


def _factors(inputs: Inputs, number: int, change: Change, rows: range) -> torch.Tensor:
    """Return the factors of *rows* of those that the change applies to, ``[rows]``."""
    import torch

    held = change.rows[rows.start : rows.stop]
    weight = inputs.tensor(f"weight{number}", held).to(torch.float32)
    _add(inputs, number, change.scale, rows, weight)
    return _scales(inputs, number, rows, weight).view(-1)


# The model's own elements are what may be infinite or NaN; what an adapter makes of them is not.
KINDS = {
    "lora": Kind(_weight, lambda inputs, rows: inputs.given("base", rows), rows=BLOCK),
    "dora_bias": Kind(_bias, lambda inputs, _rows: inputs.given("bias", range(1))),
}
