"""A bias that torchtune's DoRA scales as the rows of its weight: in float32, rounded once.

A layer computes ``length / |W + scale · B A|`` times ``(W + scale · B A) x + bias``. Source:
torchtune's ``modules/peft/dora.py``. PEFT leaves the bias as it is. The n-th change, counted from
0, applies to the elements from ``at{n}`` on.

Inputs:
    bias: Floating ``[rows]``.
    weight{n}: Floating ``[rows, columns]``: W.
    a{n}, b{n}, magnitude{n}: See :mod:`ckptctl.storage.kinds.lora`.

Parameters:
    at{n}: The first element that is changed.
    changes, start{n}, stop{n}, scale{n}, from{n}, length{n}, rows{n}, columns{n}: See there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.computed_inputs import Inputs, last_of
from ckptctl.storage.kinds.lora import add, scales

if TYPE_CHECKING:
    import torch

LIMIT = 4 << 20
"""Bytes of W in float32 at a time."""


def compute(
    inputs: Inputs, computed: Computed, _rows: range, columns: range, out: memoryview
) -> None:
    """Fill *out*; see :class:`ckptctl.storage.kinds.Kind`."""
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


def given(inputs: Inputs, _rows: range) -> torch.Tensor | None:
    """Return the model's own elements."""
    return inputs.given("bias", range(1))


def _factors(
    inputs: Inputs, computed: Computed, number: int, rows: range, start: int
) -> torch.Tensor:
    """Return what *rows* of those that the change applies to are multiplied by, ``[rows]``."""
    import torch

    held = range(start + rows.start, start + rows.stop)
    weight = inputs.tensor(f"weight{number}", held).to(torch.float32)
    add(inputs, computed, number, rows, weight)
    return scales(inputs, computed, number, rows, weight).view(-1)
