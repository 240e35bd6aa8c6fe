"""Elements as another tensor has them: one of another checkpoint.

Inputs:
    base: Of the same dtype and shape.
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
    elements(out, computed.dtype, len(columns)).copy_(found)
