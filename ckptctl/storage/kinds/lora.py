"""Kinds that merge low-rank changes into rows of a weight: in float32, rounded once.

LoRA (Hu et al., arXiv:2106.09685): ``W + scale · B A``. DoRA (Liu et al., arXiv:2402.09353): the
rows of that, scaled to given lengths. Sources: peft's ``tuners/lora`` (``merge_and_unload``),
torchtune's ``get_merged_lora_ckpt``. The n-th change, counted from 0, applies to the rows from
``start{n}`` to ``stop{n}``. A and the magnitudes are small by nature and are kept.

Inputs:
    base: Floating ``[rows, columns]``.
    a{n}: ``[rank, columns]``.
    b{n}: ``[at least from{n} + stop{n} - start{n}, rank]``.
    magnitude{n}: One length for each row of B; optional.

Parameters:
    changes: How many there are.
    start{n}, stop{n}: Rows that are changed.
    scale{n}: The factor.
    from{n}, length{n}: First row in B, and first element in the magnitude.
    rows{n}, columns{n}: For B and the magnitude, and for A, the axes that their rows or columns
        consist of and the order in which these are wanted, as in ``4,2,8:0,2,1``; optional.

``dora_bias`` is a bias that torchtune's DoRA scales as the rows of its weight: a layer computes
``length / |W + scale · B A|`` times ``(W + scale · B A) x + bias`` (``modules/peft/dora.py``). PEFT
leaves the bias as it is. The n-th change applies to the elements from ``at{n}`` on. Its inputs are
``bias``, floating ``[rows]``, and ``weight{n}``, floating ``[rows, columns]``, W, instead of
``base``.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind, last_of

if TYPE_CHECKING:
    import torch

BLOCK = 64
LIMIT = 4 << 20
"""Bytes of W in float32 at a time, where a bias is scaled."""


class _Order(NamedTuple):
    """Axes of stored rows, and in which order they are wanted.

    Attributes:
        sizes: Of the axes as they are stored.
        order: The axes that are wanted.
        unit: Rows that change places among themselves only.
        outer: How many axes number these.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    unit: int
    outer: int

    @classmethod
    def parse(cls, text: str) -> _Order:
        sizes, order = (tuple(map(int, part.split(","))) for part in text.split(":"))
        moved = (place for place, axis in enumerate(order) if place != axis)
        outer = next(moved, len(order))
        return cls(sizes, order, prod(sizes[outer:]), outer)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[units * unit, width]`` in the order that is wanted."""
        inner = [axis - self.outer + 1 for axis in self.order[self.outer :]]
        split = rows.view(-1, *self.sizes[self.outer :], rows.shape[-1])
        return split.permute(0, *inner, len(inner) + 1).reshape(rows.shape)


def _weight(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    base = inputs.tensor("base", rows).to(torch.float32)
    for number in range(int(computed.parameters.get("changes", 0))):
        start, stop = (int(computed.parameters[f"{name}{number}"]) for name in ("start", "stop"))
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            part = base[first - rows.start : last - rows.start]
            changed = range(first - start, last - start)
            _add(inputs, computed, number, changed, part)
            if f"magnitude{number}" in computed.inputs:
                part.mul_(_scales(inputs, computed, number, changed, part))
    target = elements(out, computed.dtype, len(columns))
    target.copy_(base[:, columns.start : columns.stop])


def _add(inputs: Inputs, computed: Computed, number: int, rows: range, part: torch.Tensor) -> None:
    """Add scale · B A to *part*, which is *rows* of those that the change applies to."""
    import torch

    a = inputs.whole(f"a{number}").to(torch.float32)
    if f"columns{number}" in computed.parameters:
        columns = _Order.parse(str(computed.parameters[f"columns{number}"]))
        a = columns.apply(a.t().contiguous()).t().contiguous()
    b = _rows(inputs, computed, f"b{number}", number, rows)
    _add_product(part, b, a, float(computed.parameters[f"scale{number}"]))


def _scales(
    inputs: Inputs, computed: Computed, number: int, rows: range, part: torch.Tensor
) -> torch.Tensor:
    """Return DoRA's factors of *part*, to which B A is added already: ``[rows, 1]``."""
    import torch

    length = _rows(inputs, computed, f"magnitude{number}", number, rows)
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


def _rows(inputs: Inputs, computed: Computed, key: str, number: int, rows: range) -> torch.Tensor:
    """Return *rows* of B, ``[rows, rank]``, or of the magnitude, ``[rows, 1]``, in order."""
    import torch

    text = computed.parameters.get(f"rows{number}")
    order = _Order.parse(str(text)) if text else _Order((), (), 1, 0)
    first, last = rows.start // order.unit, -(-rows.stop // order.unit)
    held = range(first * order.unit, last * order.unit)
    if key.startswith("b"):
        begin = int(computed.parameters[f"from{number}"])
        found = inputs.tensor(key, range(begin + held.start, begin + held.stop))
    else:
        begin = int(computed.parameters[f"length{number}"])
        found = inputs.whole(key)[begin + held.start : begin + held.stop].view(-1, 1)
    found = found.to(torch.float32)
    if text:
        found = order.apply(found)
    return found[rows.start - held.start : rows.stop - held.start]


def _bias(
    inputs: Inputs, computed: Computed, _rows: range, columns: range, out: memoryview
) -> None:
    import torch

    bias = inputs.tensor("bias", range(1)).to(torch.float32).view(-1)[columns.start : columns.stop]
    for number in range(int(computed.parameters["changes"])):
        names = (f"{name}{number}" for name in ("at", "start", "stop"))
        at, start, stop = (int(computed.parameters[name]) for name in names)
        first, last = max(at, columns.start), min(at + stop - start, columns.stop)
        step = max(LIMIT // (4 * last_of(inputs.entry(f"weight{number}").shape)), 1)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            factors = _factors(inputs, computed, number, range(begin - at, end - at), start)
            bias[begin - columns.start : end - columns.start].mul_(factors)
    elements(out, computed.dtype, len(columns)).copy_(bias.view(1, -1))


def _factors(
    inputs: Inputs, computed: Computed, number: int, rows: range, start: int
) -> torch.Tensor:
    """Return the factors of *rows* of those that the change applies to, ``[rows]``."""
    import torch

    held = range(start + rows.start, start + rows.stop)
    weight = inputs.tensor(f"weight{number}", held).to(torch.float32)
    _add(inputs, computed, number, rows, weight)
    return _scales(inputs, computed, number, rows, weight).view(-1)


# The model's own elements are what may be infinite or NaN; what an adapter makes of them is not.
KINDS = {
    "lora": Kind(_weight, lambda inputs, rows: inputs.given("base", rows), rows=BLOCK),
    "dora_bias": Kind(_bias, lambda inputs, _rows: inputs.given("bias", range(1))),
}
