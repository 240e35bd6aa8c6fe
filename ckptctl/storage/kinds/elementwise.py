"""Kinds that need no scales: constants, sums, and views that are conjugate or negative.

``constant``: elements that are all the same, what a model type adds and no file holds; the argument
is the element, None for 0. ``added``: elements as another tensor has them, each plus the number
that the argument is, rounded once to the dtype. ``mirrored``: elements of a view that is lazily
conjugate or negative, as torch saves it; the arguments are ``conj``, ``neg`` or both. The last two
have an input ``base`` of the same dtype and shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind


def _constant(
    _inputs: Inputs, computed: Computed, _rows: range, columns: range, out: memoryview
) -> None:
    if _is_zero(computed):
        out[:] = bytes(len(out))
        return
    elements(out, computed.dtype, len(columns)).fill_(_value(computed))


def _is_zero(computed: Computed) -> bool:
    """Return whether no arithmetic is needed: zero is zero bytes in every dtype that has one."""
    value = _value(computed)
    return value == 0 and math.copysign(1, value) > 0


def _value(computed: Computed) -> float:
    return 0.0 if computed.arguments is None else float(typed(float, computed.arguments))


def _mirrored(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    found = inputs.tensor("base", rows)[:, columns.start : columns.stop]
    flags = typed(Collection[str], computed.arguments)
    if "conj" in flags:
        found = found.conj()
    if "neg" in flags:
        found = found.neg()
    elements(out, computed.dtype, len(columns)).copy_(found)


def _added(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    # torch adds narrow elements in float32 and rounds the sum.
    found = inputs.tensor("base", rows)[:, columns.start : columns.stop]
    elements(out, computed.dtype, len(columns)).copy_(found + _value(computed))


KINDS = {
    "added": Kind(_added),
    "constant": Kind(_constant, plain=_is_zero),
    "mirrored": Kind(_mirrored),
}
