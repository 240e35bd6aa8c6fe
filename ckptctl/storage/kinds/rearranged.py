"""A kind that fills rows of a matrix by transfers: in another layout and dtype than the source.

``rearranged``: the arguments are transfers. Their targets are in the file, row-major, from byte 0
on; they have no records. Their sources' operands lie in files, real or virtual, of the inputs, all
of them below one root. What is computed of such rows need not know how the source keeps them.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl import dtypes
from ckptctl.catalog import Computed
from ckptctl.planner.copying.copies import lower, permutes
from ckptctl.planner.copying.rows import of_rows
from ckptctl.planner.copying.tile import MIB, Limits
from ckptctl.planner.plan import Record, Transfer
from ckptctl.storage.byte_files import HostMemory
from ckptctl.storage.execution.tile_engine import TileEngine
from ckptctl.storage.kinds import Inputs, Kind, last_of

LIMITS = Limits(tile=MIB, widest=MIB, flat=MIB, arithmetic=4 * MIB, check=False)
RECORDS = (Record("", "", 0, 0),)
"""What the targets are said to be part of: operands count from it."""


def _rearranged(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    item = dtypes.itemsize(computed.dtype)
    width = last_of(computed.shape) * item
    whole = len(columns) * item == width
    matrix = out if whole else inputs.room("rows", len(rows) * width)
    sink, unchecked = HostMemory(matrix), list[int]()
    engine = TileEngine(inputs.opened, lambda _: sink, inputs.opened.buffers, checksum=False)
    for transfer in _transfers(computed):
        part = of_rows(transfer, rows, width)
        kinds = transfer.source_dtype, transfer.target_dtype
        for tile in lower(part, RECORDS, LIMITS) if part else ():
            for step in range(tile.steps):
                engine.copy(inputs.files("0"), tile, step, kinds, unchecked, unchecked)
    if not whole:
        size, begin = len(columns) * item, columns.start * item
        for number in range(len(rows)):
            start = number * width + begin
            out[number * size : (number + 1) * size] = matrix[start : start + size]


def _plain(computed: Computed) -> bool:
    """Return whether bytes are only moved, in runs."""
    return not any(
        one.source_dtype != one.target_dtype or permutes(one) for one in _transfers(computed)
    )


def _transfers(computed: Computed) -> tuple[Transfer, ...]:
    return typed(tuple[Transfer, ...], computed.arguments)


KINDS = {"rearranged": Kind(_rearranged, plain=_plain)}
