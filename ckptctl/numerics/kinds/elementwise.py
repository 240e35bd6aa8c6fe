"""Kinds of virtual files without scales: constants, sums, and conjugated or negated views.

``constant``: a tensor filled with one value, which a model needs but no file has. The argument is
the value, or None for 0. ``added``: the input tensor plus the argument, rounded once to the dtype.
``mirrored``: a lazily conjugated or negated view, as torch saves it. The arguments are ``conj``,
``neg`` or both. ``added`` and ``mirrored`` have one input of the same dtype and shape.
"""

from __future__ import annotations

import math
from typing import cast as typed

from ckptctl.catalog import ComputedTensor
from ckptctl.storage.computed import Kind, OutputRectangle


def _fill_constant(out: OutputRectangle) -> None:
    if _is_zero(out.computed):
        out.memory[:] = bytes(len(out.memory))
    else:
        out.elements.fill_(_get_constant(out.computed))


def _is_zero(computed: ComputedTensor) -> bool:
    """Return whether the constant is +0, whose bytes are all zero in every dtype."""
    value = _get_constant(computed)
    return value == 0 and math.copysign(1, value) > 0


def _get_constant(computed: ComputedTensor) -> float:
    return 0.0 if computed.arguments is None else float(typed(float, computed.arguments))


def _conjugate_or_negate(out: OutputRectangle) -> None:
    values = out.inputs[0].read(out.rows, out.columns)
    if "conj" in out.arguments:
        values = values.conj()
    if "neg" in out.arguments:
        values = values.neg()
    out.elements.copy_(values)


def _add_constant(out: OutputRectangle) -> None:
    # torch adds narrow elements in float32 and rounds the sum.
    out.elements.copy_(out.inputs[0].read(out.rows, out.columns) + _get_constant(out.computed))


KINDS = {
    "added": Kind(_add_constant),
    "constant": Kind(
        _fill_constant, needs_torch=lambda computed: not _is_zero(computed), host_only=True
    ),
    "mirrored": Kind(_conjugate_or_negate),
}
