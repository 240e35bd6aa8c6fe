"""A kind that stacks LoRA B factors of experts as PEFT's ``ParamWrapper`` stores them.

``experts_b``: ``[out, R E]`` for E experts of rank R, where every E-th column from the e-th is that
of expert e. It is block diagonal: each part has its own rows and ranks, and other elements are
zero. The arguments are the first rows of the parts. The inputs, ``[rows, rank]``, are the parts of
the first expert, then those of the next.
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
