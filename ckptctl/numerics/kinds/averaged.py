"""Kinds for averages of checkpoints.

``average``: the weighted sum of the inputs, divided by the sum of the weights. Sums are computed in
float64, in the order of the inputs, and rounded once. The arguments are the weights, as floats.

``equal``: the first input, if all inputs have the same bytes.

All inputs have the shape of the file.
"""

from __future__ import annotations

import math

from ckptctl.errors import MappingError
from ckptctl.storage.computed import Kind, OutputRectangle


def _average(out: OutputRectangle) -> None:
    weights: tuple[float, ...] = out.arguments
    count = len(out.rows) * len(out.columns)
    total = out.get_scratch("sum", "float64", count).zero_()
    term = out.get_scratch("term", "float64", count)
    for weight, tensor in zip(weights, out.inputs, strict=True):
        term.view(len(out.rows), -1).copy_(tensor.read(out.rows, out.columns))
        if weight != 1:
            term.mul_(weight)
        # Unlike add_(..., alpha=weight), this rounds each product, so that no bit depends on how
        # torch vectorizes the loop.
        total.add_(term)
    if (sum_of_weights := math.fsum(weights)) != 1:
        total.div_(sum_of_weights)
    out.write(total)


def _copy_equal(out: OutputRectangle) -> None:
    first, *others = out.inputs
    out.elements.copy_(first.read(out.rows, out.columns))
    content = bytes(out.memory)
    for tensor in others:
        out.elements.copy_(tensor.read(out.rows, out.columns))
        if out.memory != content:
            raise MappingError(
                f"`{tensor.entry.name}` differs between the checkpoints",
                where=f"{first.files.root} and {tensor.files.root}",
                why=f"tensors of dtype {tensor.entry.dtype} cannot be averaged, so they must be "
                "equal",
            )


KINDS = {
    "average": Kind(_average, overflows=True, reads_in_turn=True),
    "equal": Kind(_copy_equal, reads_in_turn=True, host_only=True),
}
