"""Computation of the shards of a global tensor on the ranks of a device mesh.

The rules are those of ``torch/distributed/tensor/placement_types.py``. ``Shard`` splits like
``torch.chunk``, so that the last ranks may have smaller or empty shards. ``_StridedShard`` first
splits into ``split_factor`` pieces, and then each piece across the ranks. Shards of one dimension
over several mesh dimensions are applied in order, each to the result of the previous one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import UnsupportedError
from ckptctl.units import pluralize

MAX_PARTS = 1 << 12
Ints = tuple[int, ...]
IndexRun = tuple[int, int]
"""First index and length of a run of consecutive indices."""


class ShardPlacement(NamedTuple):
    """The placement of a mesh dimension that shards a tensor dimension.

    A mesh dimension that replicates has None instead.

    Attributes:
        dim: The tensor dimension.
        split_factor: Number of pieces to split into first, 1 except for ``_StridedShard``.
    """

    dim: int
    split_factor: int = 1


class LocalBox(NamedTuple):
    """A box of the global tensor that is one box of the local tensor.

    Attributes:
        box: The box in the global tensor.
        start: First indices of the box in the local tensor.
    """

    box: Box
    start: Ints


class MeshShard(NamedTuple):
    """The local shard of one rank.

    Attributes:
        shape: Shape of the local tensor.
        boxes: Boxes that tile the local tensor. A strided shard may have several boxes. An empty
            shard has none.
    """

    shape: Ints
    boxes: tuple[LocalBox, ...]


def compute_local_shard(
    shape: Ints,
    mesh: Ints,
    coordinate: Ints,
    placements: Sequence[ShardPlacement | None],
    order: Mapping[int, Ints] | None = None,
) -> MeshShard:
    """Compute the shard of a tensor of *shape* on the rank at *coordinate*.

    Args:
        shape: Global shape.
        mesh: Size of each mesh dimension.
        coordinate: The rank's index along each mesh dimension.
        placements: A placement for each mesh dimension.
        order: For a tensor dimension, the mesh dimensions that shard it, in order. The default is
            from left to right.

    Raises:
        UnsupportedError: Placements do not fit the mesh or the tensor, or a shard has too many
            parts.
    """
    _check_placements(shape, mesh, coordinate, placements)
    spans: list[list[IndexRun]] = []
    for dim, size in enumerate(shape):
        mesh_dims = [
            m
            for m, placement in enumerate(placements)
            if placement is not None and placement.dim == dim
        ]
        runs = [(0, size)] if size else []
        for axis in _order_mesh_dims(mesh_dims, (order or {}).get(dim)):
            placed = placements[axis]
            factor = placed.split_factor if placed else 1
            runs = shard_runs(runs, factor, mesh[axis], coordinate[axis])
        spans.append(runs)
    if math.prod(map(len, spans)) > MAX_PARTS:
        raise UnsupportedError("a shard has too many parts", why=f"more than {MAX_PARTS:,}")
    return MeshShard(tuple(sum(n for _, n in runs) for runs in spans), tuple(_iterate_boxes(spans)))


def shard_runs(
    runs: Sequence[IndexRun], split_factor: int, count: int, index: int
) -> list[IndexRun]:
    """Shard the indices in *runs* across *count* ranks, and return the runs of rank *index*.

    Raises:
        UnsupportedError: There are more than :data:`MAX_PARTS` runs.
    """
    total = sum(length for _, length in runs)
    pieces = _count_chunks(total, split_factor)
    if pieces * max(len(runs), 1) > MAX_PARTS:
        raise UnsupportedError(
            "a strided shard has too many parts", why=f"split factor {split_factor}"
        )
    width = -(-total // split_factor)
    shard_indices: list[IndexRun] = []
    for piece in range(pieces):
        first, last = piece * width, min((piece + 1) * width, total)
        step = -(-(last - first) // count)
        _append_runs(
            shard_indices, runs, first + step * index, min(first + step * (index + 1), last)
        )
    return shard_indices


def _count_chunks(total: int, count: int) -> int:
    """Return the number of non-empty chunks of ``torch.chunk``."""
    width = -(-total // count)
    return -(-total // width) if width else 0


def _append_runs(
    merged_runs: list[IndexRun], runs: Sequence[IndexRun], first: int, last: int
) -> None:
    """Append positions ``[first, last)`` of the concatenated *runs*, and merge adjacent runs."""
    position = 0
    for start, length in runs:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            begin = start + low - position
            if merged_runs and sum(merged_runs[-1]) == begin:
                merged_runs[-1] = (merged_runs[-1][0], merged_runs[-1][1] + high - low)
            else:
                merged_runs.append((begin, high - low))
        position += length


def _iterate_boxes(spans: Sequence[Sequence[IndexRun]]) -> Iterator[LocalBox]:
    placed = [list(_iterate_local_offsets(runs)) for runs in spans]
    for chosen in product(*placed):
        yield LocalBox(
            Box(tuple(run[0] for run, _ in chosen), tuple(run[1] for run, _ in chosen)),
            tuple(position for _, position in chosen),
        )


def _iterate_local_offsets(runs: Sequence[IndexRun]) -> Iterator[tuple[IndexRun, int]]:
    position = 0
    for run in runs:
        yield run, position
        position += run[1]


def _order_mesh_dims(mesh_dims: Sequence[int], order: Ints | None) -> Sequence[int]:
    if order is None:
        return mesh_dims
    if sorted(order) != sorted(mesh_dims):
        raise UnsupportedError(
            "the order of shards does not match the placements",
            why=f"mesh dimensions {list(order)} instead of {list(mesh_dims)}",
        )
    return order


def _check_placements(
    shape: Ints, mesh: Ints, coordinate: Ints, placements: Sequence[ShardPlacement | None]
) -> None:
    if not len(mesh) == len(coordinate) == len(placements):
        raise UnsupportedError(
            "placements do not fit the device mesh",
            why=f"mesh {list(mesh)}, coordinate {list(coordinate)}, "
            f"{pluralize(len(placements), 'placement')}",
        )
    if any(not 0 <= index < size for index, size in zip(coordinate, mesh, strict=True)):
        raise UnsupportedError(
            "a rank is outside its device mesh",
            why=f"coordinate {list(coordinate)} in mesh {list(mesh)}",
        )
    for placement in placements:
        if placement is not None and not (
            0 <= placement.dim < len(shape) and placement.split_factor >= 1
        ):
            raise UnsupportedError(
                "a placement does not fit its tensor", why=f"{placement} of shape {list(shape)}"
            )
