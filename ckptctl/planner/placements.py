"""Shards of a global tensor on the ranks of a device mesh.

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
from ckptctl.units import counted

MAX_PARTS = 1 << 12
Ints = tuple[int, ...]
Run = tuple[int, int]


class Shard(NamedTuple):
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
        start: Its first indices in the local tensor.
    """

    box: Box
    start: Ints


class Local(NamedTuple):
    """The local shard of one rank.

    Attributes:
        shape: Shape of the local tensor.
        parts: The boxes that tile it, one unless it is strided, none if it is empty.
    """

    shape: Ints
    parts: tuple[LocalBox, ...]


def local_part(
    shape: Ints,
    mesh: Ints,
    coordinate: Ints,
    placements: Sequence[Shard | None],
    order: Mapping[int, Ints] | None = None,
) -> Local:
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
    _check(shape, mesh, coordinate, placements)
    spans: list[list[Run]] = []
    for dim, size in enumerate(shape):
        cutting = [m for m, one in enumerate(placements) if one is not None and one.dim == dim]
        runs = [(0, size)] if size else []
        for axis in _ordered(cutting, (order or {}).get(dim)):
            placed = placements[axis]
            factor = placed.split_factor if placed else 1
            runs = shard(runs, factor, mesh[axis], coordinate[axis])
        spans.append(runs)
    if math.prod(map(len, spans)) > MAX_PARTS:
        raise UnsupportedError("a shard has too many parts", why=f"more than {MAX_PARTS:,}")
    return Local(tuple(sum(n for _, n in runs) for runs in spans), tuple(_parts(spans)))


def shard(runs: Sequence[Run], split_factor: int, count: int, index: int) -> list[Run]:
    """Shard the indices in *runs*, and return those of rank *index* of *count*.

    Raises:
        UnsupportedError: There are more than :data:`MAX_PARTS` runs.
    """
    total = sum(length for _, length in runs)
    pieces = _chunks(total, split_factor)
    if pieces * max(len(runs), 1) > MAX_PARTS:
        raise UnsupportedError(
            "a strided shard has too many parts", why=f"split factor {split_factor}"
        )
    width = -(-total // split_factor)
    found: list[Run] = []
    for piece in range(pieces):
        first, last = piece * width, min((piece + 1) * width, total)
        step = -(-(last - first) // count)
        _extend(found, runs, first + step * index, min(first + step * (index + 1), last))
    return found


def _chunks(total: int, count: int) -> int:
    """Return the number of non-empty chunks of ``torch.chunk``."""
    width = -(-total // count)
    return -(-total // width) if width else 0


def _extend(found: list[Run], runs: Sequence[Run], first: int, last: int) -> None:
    """Append the local positions ``[first, last)`` of *runs*, merging adjacent runs."""
    at = 0
    for start, length in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            begin = start + low - at
            if found and sum(found[-1]) == begin:
                found[-1] = (found[-1][0], found[-1][1] + high - low)
            else:
                found.append((begin, high - low))
        at += length


def _parts(spans: Sequence[Sequence[Run]]) -> Iterator[LocalBox]:
    placed = [list(_positions(runs)) for runs in spans]
    for chosen in product(*placed):
        yield LocalBox(
            Box(tuple(run[0] for run, _ in chosen), tuple(run[1] for run, _ in chosen)),
            tuple(at for _, at in chosen),
        )


def _positions(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    at = 0
    for run in runs:
        yield run, at
        at += run[1]


def _ordered(cutting: Sequence[int], order: Ints | None) -> Sequence[int]:
    if order is None:
        return cutting
    if sorted(order) != sorted(cutting):
        raise UnsupportedError(
            "the order of shards does not match the placements",
            why=f"mesh dimensions {list(order)} instead of {list(cutting)}",
        )
    return order


def _check(shape: Ints, mesh: Ints, coordinate: Ints, placements: Sequence[Shard | None]) -> None:
    if not len(mesh) == len(coordinate) == len(placements):
        raise UnsupportedError(
            "placements do not fit the device mesh",
            why=f"mesh {list(mesh)}, coordinate {list(coordinate)}, "
            f"{counted(len(placements), 'placement')}",
        )
    if any(not 0 <= at < size for at, size in zip(coordinate, mesh, strict=True)):
        raise UnsupportedError(
            "a rank is outside its device mesh",
            why=f"coordinate {list(coordinate)} in mesh {list(mesh)}",
        )
    for one in placements:
        if one is not None and not (0 <= one.dim < len(shape) and one.split_factor >= 1):
            raise UnsupportedError(
                "a placement does not fit its tensor", why=f"{one} of shape {list(shape)}"
            )
