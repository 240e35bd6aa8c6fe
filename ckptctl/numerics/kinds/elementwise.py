"""Kinds that need no scales: constants, sums, and views that are conjugate or negative.

``constant``: elements that are all the same, what a model type adds and no file holds; the argument
is the element, None for 0. ``added``: elements as another tensor has them, each plus the number
that the argument is, rounded once to the dtype. ``mirrored``: elements of a view that is lazily
conjugate or negative, as torch saves it; the arguments are ``conj``, ``neg`` or both. The last two
have one input, of the same dtype and shape.
"""

from __future__ import annotations

import math
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.storage.computed import Kind, Output


def _constant(out: Output) -> None:
    if _is_zero(out.computed):
        out.memory[:] = bytes(len(out.memory))
    else:
        out.elements.fill_(_value(out.computed))


def _is_zero(computed: Computed) -> bool:
    """Return whether no arithmetic is needed: zero is zero bytes in every dtype that has one."""
    value = _value(computed)
    return value == 0 and math.copysign(1, value) > 0


def _value(computed: Computed) -> float:
    return 0.0 if computed.arguments is None else float(typed(float, computed.arguments))


def _mirrored(out: Output) -> None:
    values = out.inputs[0].read(out.rows, out.columns)
    if "conj" in out.arguments:
        values = values.conj()
    if "neg" in out.arguments:
        values = values.neg()
    out.elements.copy_(values)


def _added(out: Output) -> None:
    # torch adds narrow elements in float32 and rounds the sum.
    out.elements.copy_(out.inputs[0].read(out.rows, out.columns) + _value(out.computed))


KINDS = {
    "added": Kind(_added),
    "constant": Kind(_constant, needs_torch=lambda computed: not _is_zero(computed)),
    "mirrored": Kind(_mirrored),
}
