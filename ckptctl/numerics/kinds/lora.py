"""Kinds that merge LoRA and DoRA updates into rows of a weight in float32, rounded once.

LoRA (Hu et al., arXiv:2106.09685): ``W + scale · B A``. DoRA (Liu et al., arXiv:2402.09353)
rescales the rows of this sum to trained magnitudes. Sources: peft's ``tuners/lora``
(``merge_and_unload``), torchtune's ``get_merged_lora_ckpt``. The arguments are :class:`LoraUpdate`.
A and the magnitudes are small and stay in memory.

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

from ckptctl.storage.computed import InputTensor, Kind, OutputRectangle, get_last_dim_size

if TYPE_CHECKING:
    import torch

ROW_BLOCK = 64
CHUNK_BYTES = 4 << 20
"""Size, in bytes of float32, of the chunks of W that are read to scale a bias."""


class LoraUpdate(NamedTuple):
    """Low-rank update of some rows of a weight, whose ``repr`` is part of plan digests.

    Attributes:
        rows: The updated rows, which may be evenly apart.
        scale: Factor of B A.
        has_magnitude: Whether the updated rows are then rescaled to DoRA magnitudes.
        bias_start: Index, in the bias that is scaled, of the element for the first updated row.
    """

    rows: range
    scale: float
    has_magnitude: bool = False
    bias_start: int = 0


def _merge_weight(out: OutputRectangle) -> None:
    import torch

    rows, factor_inputs = out.rows, iter(out.inputs[1:])
    merged = out.inputs[0].read(rows).to(torch.float32)
    updates: tuple[LoraUpdate, ...] = out.arguments
    for update in updates:
        factors = _Factors(update, factor_inputs)
        update_rows = _find_rows_within(update.rows, rows)
        if update_rows:
            selected = update.rows[update_rows.start : update_rows.stop]
            merged_part = merged[selected.start - rows.start :: selected.step][: len(selected)]
            # Rows are copied to be adjacent, so that their bits do not depend on the stride.
            sums = merged_part.contiguous()
            factors.add_product_to(sums, update_rows)
            if update.has_magnitude:
                sums.mul_(factors.compute_magnitude_scales(sums, update_rows))
            if sums is not merged_part:
                merged_part.copy_(sums)
    out.write(merged)


def _find_rows_within(updated: range, rows: range) -> range:
    """Return the indices of the elements of *updated* that are in the adjacent *rows*."""
    first, end = (-(-(row - updated.start) // updated.step) for row in (rows.start, rows.stop))
    return range(max(first, 0), min(end, len(updated)))


class _Factors:
    """LoRA factors A and B of one update, and its DoRA magnitudes if it has any.

    Row ranges passed to the methods count from the first updated row.
    """

    def __init__(self, update: LoraUpdate, inputs: Iterator[InputTensor]) -> None:
        self._scale = update.scale
        self._a, self._b = next(inputs), next(inputs)
        self._magnitude = next(inputs) if update.has_magnitude else None

    def add_product_to(self, part: torch.Tensor, rows: range) -> None:
        """Add scale · B A in place to *part*, which contains the rows *rows* of the update."""
        import torch

        a = self._a.read_all().to(torch.float32)
        b = self._b.read(rows).to(torch.float32)
        _add_product(part, b, a, self._scale)

    def compute_magnitude_scales(self, part: torch.Tensor, rows: range) -> torch.Tensor:
        """Return DoRA's row scales ``[rows, 1]`` of *part*, which already includes B A."""
        import torch

        assert self._magnitude
        magnitudes = self._magnitude.read_all()[rows.start : rows.stop].view(-1, 1)
        norms: torch.Tensor = torch.linalg.norm(part, dim=1, keepdim=True)
        return magnitudes.to(torch.float32) / norms


def _add_product(part: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float) -> None:
    """Add ``scale * b @ a`` to *part* in place, with results independent of the number of rows.

    Rows are multiplied in blocks of a fixed size, so each row has the same bits regardless of
    which rows are computed with it.
    """
    full_rows = len(b) - len(b) % ROW_BLOCK
    for start in range(0, full_rows, ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        part[rows].addmm_(b[rows], a, alpha=scale)
    if full_rows < len(b):
        padded_part, padded_b = (
            matrix.new_zeros(ROW_BLOCK, matrix.shape[1]) for matrix in (part, b)
        )
        padded_part[: len(b) - full_rows], padded_b[: len(b) - full_rows] = (
            part[full_rows:],
            b[full_rows:],
        )
        part[full_rows:] = padded_part.addmm_(padded_b, a, alpha=scale)[: len(b) - full_rows]


def _scale_bias(out: OutputRectangle) -> None:
    import torch

    columns, more_inputs = out.columns, iter(out.inputs[1:])
    scaled = out.inputs[0].read(range(1), columns).to(torch.float32).view(-1)
    updates: tuple[LoraUpdate, ...] = out.arguments
    for update in updates:
        weight, factors = next(more_inputs), _Factors(update, more_inputs)
        bias_start = update.bias_start
        first_element, last_element = (
            max(bias_start, columns.start),
            min(bias_start + len(update.rows), columns.stop),
        )
        step = max(CHUNK_BYTES // (4 * get_last_dim_size(weight.entry.shape)), 1)
        for chunk_start in range(first_element, last_element, step):
            chunk_end = min(chunk_start + step, last_element)
            rows = range(chunk_start - bias_start, chunk_end - bias_start)
            part = weight.read(update.rows[rows.start : rows.stop]).to(torch.float32)
            factors.add_product_to(part, rows)
            scaled[chunk_start - columns.start : chunk_end - columns.start].mul_(
                factors.compute_magnitude_scales(part, rows).view(-1)
            )
    out.elements.copy_(scaled.view(1, -1))


# Elements of the model may be infinite or NaN; an overflow caused by the adapter is an error.
KINDS = {
    "lora": Kind(_merge_weight, overflows=True, keeps_infinite=True, rows_per_group=ROW_BLOCK),
    "dora_bias": Kind(_scale_bias, overflows=True, keeps_infinite=True),
}
