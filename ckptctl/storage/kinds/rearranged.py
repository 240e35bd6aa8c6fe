"""A kind that puts elements in another order and dtype than the source's.

``rearranged``: the argument is a :class:`~ckptctl.planner.copying.blocks.BlockReader` of a tensor,
seen as a matrix, that consists of elements of the inputs, all of them below one root.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl import dtypes
from ckptctl.catalog import Computed
from ckptctl.planner.copying.blocks import MIB, BlockReader, dense_strides
from ckptctl.planner.copying.copies import tiles
from ckptctl.planner.copying.tile import Limits
from ckptctl.planner.plan import Record, TargetBox
from ckptctl.storage.byte_files import HostMemory
from ckptctl.storage.execution.tile_engine import TileEngine
from ckptctl.storage.kinds import Inputs, Kind, rectangle

LIMITS = Limits(tile=MIB, widest=MIB, flat=MIB, arithmetic=4 * MIB, check=False)
RECORDS = (Record("", "", 0, 0),)
"""What the targets are said to be part of."""


def _rearranged(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    reader, box = _reader(computed), rectangle(rows, columns)
    strides = dense_strides(box.sizes, dtypes.itemsize(computed.dtype))
    target = TargetBox("", 0, box.offsets, box.sizes, strides, record=0)
    sink, unchecked = HostMemory(out), list[int]()
    engine = TileEngine(inputs.opened, lambda _: sink, inputs.opened.buffers, checksum=False)
    kinds = reader.tensor.stored_dtype, computed.dtype
    for tile in tiles(reader, (target,), RECORDS, LIMITS):
        engine.copy(inputs.files("0"), tile, 0, kinds, unchecked, unchecked)


def _plain(computed: Computed) -> bool:
    """Return whether bytes are only moved, in runs."""
    reader = _reader(computed)
    return reader.tensor.stored_dtype == computed.dtype and not reader.permuted


def _reader(computed: Computed) -> BlockReader:
    return typed(BlockReader, computed.arguments)


KINDS = {"rearranged": Kind(_rearranged, plain=_plain)}
