"""Kinds that merge LoRA and DoRA updates into rows of a weight in float32, rounded once.

LoRA (Hu et al., arXiv:2106.09685): ``W + scale · B A``. DoRA (Liu et al., arXiv:2402.09353): the
rows of that, rescaled to given magnitudes. Sources: peft's ``tuners/lora`` (``merge_and_unload``),
torchtune's ``get_merged_lora_ckpt``. The arguments are :class:`LoraUpdate`. A and the magnitudes
are small and stay in memory.

``lora``: the inputs are W, floating-point ``[rows, columns]``, then for each update A, ``[rank,
columns]``, B, ``[rows of the update, rank]``, and with DoRA the magnitudes, one for each row of B.

``dora_bias``: a bias that torchtune's DoRA scales like the rows of its weight. A layer computes
``length / |W + scale · B A|`` times ``(W + scale · B A) x + bias`` (``modules/peft/dora.py``). PEFT
does not change the bias. The inputs are the bias, floating-point ``[rows]``, then for each update
W, A, B and the magnitudes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.storage.computed import InputTensor, Kind, Output, last_dimension

if TYPE_CHECKING:
    import torch

BLOCK = 64
LIMIT = 4 << 20
"""Bytes of W in float32 that are read at a time to scale a bias."""


class LoraUpdate(NamedTuple):
    """Low-rank update of some rows of a weight, whose ``repr`` is part of plan digests.

    Attributes:
        rows: The updated rows.
        scale: Factor of B A.
        has_magnitude: Whether the rows are then rescaled to DoRA magnitudes.
        bias_start: Index of the first row's element in a bias that is scaled too.
    """

    rows: range
    scale: float
    has_magnitude: bool = False
    bias_start: int = 0


def _weight(out: Output) -> None:
    import torch

    rows, others = out.rows, iter(out.inputs[1:])
    merged = out.inputs[0].read(rows).to(torch.float32)
    changes: tuple[LoraUpdate, ...] = out.arguments
    for change in changes:
        factors = _Factors(change, others)
        start = change.rows.start
        first, last = max(start, rows.start), min(change.rows.stop, rows.stop)
        if first < last:
            part = merged[first - rows.start : last - rows.start]
            changed = range(first - start, last - start)
            factors.add_to(part, changed)
            if change.has_magnitude:
                part.mul_(factors.scales(part, changed))
    out.write(merged)


class _Factors:
    """Factors of one update, read from the next inputs.

    Rows are relative to the first updated row.
    """

    def __init__(self, change: LoraUpdate, inputs: Iterator[InputTensor]) -> None:
        self._scale = change.scale
        self._a, self._b = next(inputs), next(inputs)
        self._magnitude = next(inputs) if change.has_magnitude else None

    def add_to(self, part: torch.Tensor, rows: range) -> None:
        """Add scale · B A to *part*, the rows *rows* of the weight."""
        import torch

        a = self._a.read_all().to(torch.float32)
        b = self._b.read(rows).to(torch.float32)
        _add_product(part, b, a, self._scale)

    def scales(self, part: torch.Tensor, rows: range) -> torch.Tensor:
        """Return DoRA's row scales ``[rows, 1]`` of *part*, which already includes B A."""
        import torch

        assert self._magnitude
        length = self._magnitude.read_all()[rows.start : rows.stop].view(-1, 1)
        norms: torch.Tensor = torch.linalg.norm(part, dim=1, keepdim=True)
        return length.to(torch.float32) / norms


def _add_product(part: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float) -> None:
    """Add ``scale * b @ a`` so that elements do not depend on the number of rows of *b*.

    Rows are multiplied in blocks of fixed size, so equal inputs give equal bits no matter which
    rows are computed together.
    """
    whole = len(b) - len(b) % BLOCK
    for start in range(0, whole, BLOCK):
        rows = slice(start, start + BLOCK)
        part[rows].addmm_(b[rows], a, alpha=scale)
    if whole < len(b):
        rest, factors = (one.new_zeros(BLOCK, one.shape[1]) for one in (part, b))
        rest[: len(b) - whole], factors[: len(b) - whole] = part[whole:], b[whole:]
        part[whole:] = rest.addmm_(factors, a, alpha=scale)[: len(b) - whole]


def _bias(out: Output) -> None:
    import torch

    columns, others = out.columns, iter(out.inputs[1:])
    scaled = out.inputs[0].read(range(1), columns).to(torch.float32).view(-1)
    changes: tuple[LoraUpdate, ...] = out.arguments
    for change in changes:
        weight, factors = next(others), _Factors(change, others)
        at = change.bias_start
        first, last = max(at, columns.start), min(at + len(change.rows), columns.stop)
        step = max(LIMIT // (4 * last_dimension(weight.entry.shape)), 1)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            rows = range(begin - at, end - at)
            part = weight.read(change.rows[rows.start : rows.stop]).to(torch.float32)
            factors.add_to(part, rows)
            scaled[begin - columns.start : end - columns.start].mul_(
                factors.scales(part, rows).view(-1)
            )
    out.elements.copy_(scaled.view(1, -1))


# Elements of the model may be infinite or NaN; an overflow caused by the adapter is an error.
KINDS = {
    "lora": Kind(_weight, overflows=True, keeps_infinite=True, rows=BLOCK),
    "dora_bias": Kind(_bias, overflows=True, keeps_infinite=True),
}
