"""A kind that stacks the B of experts as PEFT's ``ParamWrapper`` keeps them.

``experts_b``: ``[out, R E]`` of E experts and rank R, whose every E-th column from the e-th on is
expert e's. It consists of parts, each with rows and a part of the rank of its own: what is neither
is zero. The arguments are the first rows of the parts; the inputs ``b{n}.{e}``, ``[rows, rank]``,
are part n of expert e, both counted from 0.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind


def _stacked(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    starts = typed(tuple[int, ...], computed.arguments)
    experts = len(computed.inputs) // len(starts)
    target = elements(out, computed.dtype, len(columns))
    target.zero_()
    whole = target.new_zeros(len(rows), computed.shape[-1] // experts, experts)
    at = 0
    for number, start in enumerate(starts):
        held, rank = inputs.entry(f"b{number}.0").shape
        first, last = max(start, rows.start), min(start + held, rows.stop)
        place = slice(first - rows.start, last - rows.start)
        wanted = range(first - start, last - start)
        for expert in range(experts) if wanted else ():
            found = inputs.tensor(f"b{number}.{expert}", wanted)
            whole[place, at : at + rank, expert] = found
        at += rank
    target.copy_(whole.flatten(1)[:, columns.start : columns.stop])


KINDS = {"experts_b": Kind(_stacked)}
