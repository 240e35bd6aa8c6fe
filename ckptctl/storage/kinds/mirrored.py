"""Elements of a view that is lazily conjugate or negative, as torch saves it: with a flag.

Inputs:
    base: The elements as they are stored, of the same dtype and shape.

Parameters:
    conj: 1: the conjugate of each.
    neg: 1: the negative of each.
"""

from __future__ import annotations

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.computed_inputs import Inputs


def compute(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    """Fill *out*; see :class:`ckptctl.storage.kinds.Kind`."""
    found = inputs.tensor("base", rows)[:, columns.start : columns.stop]
    if "conj" in computed.parameters:
        found = found.conj()
    if "neg" in computed.parameters:
        found = found.neg()
    elements(out, computed.dtype, len(columns)).copy_(found)
