"""Elements that are all the same: what a model type adds and no file holds.

Parameters:
    value: The element; 0 where it is not given.
"""

from __future__ import annotations

import math

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.computed_inputs import Inputs


def compute(
    _inputs: Inputs, computed: Computed, _rows: range, columns: range, out: memoryview
) -> None:
    """Fill *out*; see :class:`ckptctl.storage.kinds.Kind`."""
    if plain(computed):
        out[:] = bytes(len(out))
        return
    elements(out, computed.dtype, len(columns)).fill_(float(computed.parameters.get("value", 0)))


def plain(computed: Computed) -> bool:
    """Return whether no arithmetic is needed: zero is zero bytes in every dtype that has one."""
    value = computed.parameters.get("value", 0)
    return value == 0 and math.copysign(1, float(value)) > 0
