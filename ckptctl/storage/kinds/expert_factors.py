"""A kind that stacks the B of experts as PEFT's ``ParamWrapper`` keeps them.

``experts_b``: ``[out, R E]`` of E experts and rank R, whose every E-th column from the e-th on is
expert e's. It consists of parts, each with rows and a part of the rank of its own: what is neither
is zero. The inputs ``b{n}.{e}``, ``[rows, rank]``, are part n of expert e; the parameters are
``experts``, ``parts``, and for each part ``start{n}``, its first row, ``rank{n}``, and ``at{n}``,
where that begins in R.
"""

from __future__ import annotations

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind


def _stacked(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    experts, parts = (int(computed.parameters[name]) for name in ("experts", "parts"))
    target = elements(out, computed.dtype, len(columns))
    target.zero_()
    whole = target.new_zeros(len(rows), computed.shape[-1] // experts, experts)
    for number in range(parts):
        start, rank, at = (
            int(computed.parameters[f"{name}{number}"]) for name in ("start", "rank", "at")
        )
        held = inputs.entry(f"b{number}.0").shape[0]
        first, last = max(start, rows.start), min(start + held, rows.stop)
        if first >= last:
            continue
        place = slice(first - rows.start, last - rows.start)
        wanted = range(first - start, last - start)
        for expert in range(experts):
            found = inputs.tensor(f"b{number}.{expert}", wanted)
            whole[place, at : at + rank, expert] = found
    target.copy_(whole.flatten(1)[:, columns.start : columns.stop])


KINDS = {"experts_b": Kind(_stacked)}
