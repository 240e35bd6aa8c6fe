"""A kind that stacks the B of experts as PEFT's ``ParamWrapper`` keeps them.

``experts_b``: ``[out, R E]`` of E experts and rank R, whose every E-th column from the e-th on is
expert e's. It consists of parts, each with rows and a part of the rank of its own: what is neither
is zero. The arguments are the first rows of the parts; the inputs, ``[rows, rank]``, are the parts
of one expert after the other.
"""

from __future__ import annotations

from ckptctl.storage.computed import Kind, Output


def _stacked(out: Output) -> None:
    starts: tuple[int, ...] = out.arguments
    experts, rows = len(out.inputs) // len(starts), out.rows
    values = out.elements.new_zeros(len(rows), out.computed.shape[-1] // experts, experts)
    first_rank = 0
    for number, start in enumerate(starts):
        own = out.inputs[number :: len(starts)]
        height, rank = own[0].entry.shape
        first, last = max(start, rows.start), min(start + height, rows.stop)
        for expert, factor in enumerate(own) if first < last else ():
            part = factor.read(range(first - start, last - start))
            ranks = slice(first_rank, first_rank + rank)
            values[first - rows.start : last - rows.start, ranks, expert] = part
        first_rank += rank
    out.write(values)


KINDS = {"experts_b": Kind(_stacked)}
