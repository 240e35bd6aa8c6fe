"""A kind that changes the order or dtype of the source's elements.

``rearranged``: the argument is a :class:`~ckptctl.planner.copying.blocks.BlockPlanner` of a tensor,
viewed as a matrix, whose elements come from the inputs. All inputs are below one root directory.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl import dtypes
from ckptctl.catalog import ComputedTensor
from ckptctl.planner.copying.blocks import MIB, BlockPlanner, compute_dense_strides
from ckptctl.planner.copying.copies import tile_targets
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.planner.plan import Record, TargetBox
from ckptctl.storage.byte_files import HostMemory
from ckptctl.storage.computed import Kind, OutputRectangle, build_matrix_box
from ckptctl.storage.execution.worker import TileEngine

LIMITS = TileLimits(
    tile_bytes=MIB,
    max_tile_bytes=MIB,
    max_unit_bytes=MIB,
    permuted_tile_bytes=4 * MIB,
    verifies_checksums=False,
)
RECORDS = (Record("", "", 0, 0),)
"""Placeholder record that the target boxes refer to."""


def _rearrange_elements(out: OutputRectangle) -> None:
    reader, box, dtype = (
        _get_block_reader(out.computed),
        build_matrix_box(out.rows, out.columns),
        out.computed.dtype,
    )
    strides = compute_dense_strides(box.sizes, dtypes.get_itemsize(dtype))
    target = TargetBox("", 0, box.offsets, box.sizes, strides, record=0)
    sink, unchecked = HostMemory(out.memory), list[int]()
    engine = TileEngine(out.opened, lambda _: sink, out.opened.buffers, checksum=False)
    kinds = reader.tensor.stored_dtype, dtype
    for tile in tile_targets(reader, (target,), RECORDS, LIMITS):
        engine.copy_step(out.inputs[0].files, tile, 0, kinds, unchecked, unchecked)


def _needs_torch(computed: ComputedTensor) -> bool:
    """Return whether torch is needed, because elements are cast or permuted one by one."""
    reader = _get_block_reader(computed)
    return reader.tensor.stored_dtype != computed.dtype or reader.is_permuted


def _get_block_reader(computed: ComputedTensor) -> BlockPlanner:
    return typed(BlockPlanner, computed.arguments)


KINDS = {
    "rearranged": Kind(_rearrange_elements, needs_torch=_needs_torch, host_only=True),
}
