"""Device meshes as one rank's file describes them; no process group is needed.

Source: ``torch/distributed/device_mesh.py`` (``DeviceMesh.__getstate__``) and ``_mesh_layout.py``.
Field names are those of torch 2.2 and later: a tensor of ranks, or sizes and strides in a list of
ranks, which may be those of a larger mesh that this one was cut from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from ckptctl.errors import FormatError, UnsupportedError, listed
from ckptctl.formats.shared.inert_fields import Ints, attributes, integers
from ckptctl.storage.compare import row_major
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.zips.reader import StoredTensor

Axis = tuple[tuple[int, int], ...]
"""Sizes and strides of what makes up one dimension of a mesh, the slowest first."""


class Mesh:
    """A device mesh as one rank sees it.

    Args:
        axes: Its dimensions.
        coordinate: This rank's place; None: it is not part of the mesh.
        rank: This rank's number, if recorded.
        order: The numbers of all ranks, as the strides of *axes* count them; empty: not recorded.

    Attributes:
        sizes: Ranks along each dimension.
        coordinate: See above.
        rank: See above.
        ranks: The numbers of all ranks, if recorded.
    """

    def __init__(
        self, axes: tuple[Axis, ...], coordinate: Ints | None, rank: int | None, order: Ints
    ) -> None:
        self.sizes = tuple(math.prod(size for size, _ in axis) for axis in axes)
        self.coordinate, self.rank, self.ranks = coordinate, rank, frozenset(order)
        self._axes, self._order = axes, order

    def place(self, rank: int) -> Ints | None:
        """Return the coordinate of another rank; None: the file does not tell."""
        at = self._positions.get(rank)
        return None if at is None else _coordinate(self._axes, at)

    @cached_property
    def _positions(self) -> Mapping[int, int]:
        """Where each rank is in the list; nothing if that would contradict *coordinate*."""
        found = {rank: at for at, rank in enumerate(self._order)}
        own = None if self.rank is None else found.get(self.rank)
        if own is None or _coordinate(self._axes, own) != self.coordinate:
            return {}
        return found


def _coordinate(axes: tuple[Axis, ...], at: int) -> Ints:
    return tuple(_along(axis, at) for axis in axes)


def _along(axis: Axis, at: int) -> int:
    found = 0
    for size, stride in axis:
        found = found * size + at // max(stride, 1) % max(size, 1)
    return found


class Meshes:
    """Reads the device meshes of one file, each once: thousands of tensors share one."""

    def __init__(self) -> None:
        self._known: dict[int, Mesh] = {}

    def read(self, record: object) -> Mesh:
        """Return the mesh that *record* describes; the file's objects must stay alive.

        Raises:
            FormatError: It is of a torch that does not record where the rank is.
            UnsupportedError: The rank lies outside of it.
            TypeError, KeyError: It is no mesh.
        """
        found = self._known.get(id(record))
        if found is None:
            found = self._known[id(record)] = _mesh(attributes(record))
            _require_inside(found)
        return found


def _mesh(state: Mapping[str, object]) -> Mesh:
    if "_coordinate_on_dim" not in state:
        raise FormatError(
            "a device mesh does not say where its rank is", hint="save it with torch 2.2 or later"
        )
    coordinate = state["_coordinate_on_dim"]
    ranks = state.get("_flatten_rank_map", state.get("_flatten_mesh_list")) or ()
    rank = state.get("_rank")
    return Mesh(
        _axes(state),
        None if coordinate is None else integers(coordinate),
        rank if type(rank) is int else None,
        tuple(item for item in ranks if type(item) is int),  # type: ignore[attr-defined]
    )


def _require_inside(mesh: Mesh) -> None:
    """Refuse a rank that has a place in a mesh and is none of its ranks."""
    at, who = mesh.coordinate, "a rank" if mesh.rank is None else f"rank {mesh.rank}"
    if at is None:
        return
    sizes = " x ".join(map(str, mesh.sizes))
    if any(n >= size for n, size in zip(at, mesh.sizes, strict=False)):
        why = f"its place is {list(at)}, the mesh has {sizes} ranks"
    elif mesh.ranks and mesh.rank is not None and mesh.rank not in mesh.ranks:
        why = f"the mesh has {sizes} of the ranks {listed([str(n) for n in sorted(mesh.ranks)])}"
    else:
        return
    raise UnsupportedError(
        f"{who} lies outside of the device mesh that its file records",
        why=why,
        hint="the file is damaged, or of another run; use the one that the rank wrote",
    )


def _axes(state: Mapping[str, object]) -> tuple[Axis, ...]:
    if "_layout" not in state:
        mesh = state["mesh"]
        if not isinstance(mesh, StoredTensor):
            raise TypeError("its mesh is not a tensor")
        pairs = zip(mesh.shape, row_major(mesh.shape), strict=True)
        return tuple((pair,) for pair in pairs)
    layout = attributes(state["_layout"])
    if "axes" in layout:
        found = [attributes(axis) for axis in _items(layout["axes"])]
        return tuple(_axis(axis["shape"], axis["stride"]) for axis in found)
    both = zip(_items(layout["shape"]), _items(layout["stride"]), strict=True)
    return tuple(_axis(shape, stride) for shape, stride in both)


def _items(value: object) -> tuple[object, ...]:
    return tuple(value)[:MAX_RANK] if isinstance(value, tuple | list) else (value,)


def _axis(shape: object, stride: object) -> Axis:
    """Return one mesh dimension, which torch may describe as several."""
    return tuple(zip(integers(_items(shape)), integers(_items(stride)), strict=True))
