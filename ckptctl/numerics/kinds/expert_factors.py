"""A kind that stacks LoRA B factors of experts as PEFT's ``ParamWrapper`` stores them.

``experts_b``: ``[out, R E]`` for E experts of rank R. Columns e, e + E, e + 2 E, ... belong to
expert e. B is block diagonal: each part (such as gate or up) has its own rows and ranks, and all
other elements are zero. The arguments are the first rows of the parts. The inputs have the shape
``[rows, rank]``: all parts of the first expert, then all parts of the next one.
"""

from __future__ import annotations

from ckptctl.storage.computed import Kind, OutputRectangle


def _stack_factors(out: OutputRectangle) -> None:
    starts: tuple[int, ...] = out.arguments
    experts, rows = len(out.inputs) // len(starts), out.rows
    values = out.elements.new_zeros(len(rows), out.computed.shape[-1] // experts, experts)
    first_rank = 0
    for part_number, start in enumerate(starts):
        part_inputs = out.inputs[part_number :: len(starts)]
        height, rank = part_inputs[0].entry.shape
        first_row, last_row = max(start, rows.start), min(start + height, rows.stop)
        for expert, factor in enumerate(part_inputs) if first_row < last_row else ():
            part = factor.read(range(first_row - start, last_row - start))
            ranks = slice(first_rank, first_rank + rank)
            values[first_row - rows.start : last_row - rows.start, ranks, expert] = part
        first_rank += rank
    out.write(values)


KINDS = {"experts_b": Kind(_stack_factors)}
