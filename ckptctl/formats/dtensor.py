"""DTensors as ``torch.save`` leaves them: a local tensor, a mesh and placements; nothing is built.

Sources: ``torch/distributed/tensor/_api.py`` and ``_dtensor_spec.py`` (``DTensorSpec``),
``torch/distributed/device_mesh.py`` (``DeviceMesh.__getstate__``), ``torch/_tensor.py``
(``_rebuild_from_type_v2``). Field names are those of torch 2.13 and, for meshes, of 2.2 and later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import DamagedError, FormatError
from ckptctl.planner.placements import Local, Shard, local_part
from ckptctl.storage.pickle_reader import Global, Inert
from ckptctl.storage.torch_globals import MAX_INT, MAX_RANK
from ckptctl.storage.torch_zip import StoredTensor

Ints = tuple[int, ...]
_HOMES = ("torch.distributed.tensor", "torch.distributed._tensor")
_SUBMODULES = ("", ".api", "._api", ".placement_types", "._dtensor_spec", ".device_mesh")
_CLASSES = (
    *("DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "Partial"),
    *("_Partial", "_NormPartial", "_MaskPartial", "MaskPartial", "_StridedShard", "_RaggedShard"),
)
CLASSES: Mapping[str, tuple[str, ...]] = {
    **{home + part: _CLASSES for home in _HOMES for part in _SUBMODULES},
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._tensor.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
    "torch._utils": ("_rebuild_wrapper_subclass",),
}
"""What a pickle of DTensors names besides plain tensors."""
_REASONS = {
    "Partial": "each rank holds a summand, and which sum is meant only the run knows",
    "_RaggedShard": "its rows are cut by weights that are not recorded here",
}


class Piece(NamedTuple):
    """A box of a global tensor and where a file of one rank holds it.

    Attributes:
        box: The part of the global tensor.
        tensor: The local tensor.
        start: The box's first index in the local tensor.
    """

    box: Box
    tensor: StoredTensor
    start: Ints


@dataclass(frozen=True, slots=True)
class Sharded:
    """What one rank's file says about a tensor that several ranks hold.

    Attributes:
        dtype: torch's name.
        shape: Global shape.
        pieces: What this rank holds.
        requires_grad: As recorded.
        rank: The rank that wrote it, if it says so.
        ranks: All ranks that it knows of.
    """

    dtype: str
    shape: Ints
    pieces: tuple[Piece, ...]
    requires_grad: bool
    rank: int | None
    ranks: frozenset[int]


class Mesh(NamedTuple):
    """A device mesh as one rank sees it.

    Attributes:
        sizes: Ranks along each dimension.
        coordinate: This rank's place; None: it is not part of the mesh.
        rank: This rank's number, if recorded.
        ranks: The numbers of all ranks, if recorded.
    """

    sizes: Ints
    coordinate: Ints | None
    rank: int | None
    ranks: frozenset[int]


class Wrapped(NamedTuple):
    """The arguments of ``_rebuild_wrapper_subclass`` that matter.

    Attributes:
        dtype: torch's name.
        shape: Global shape.
        requires_grad: As recorded.
    """

    dtype: str
    shape: Ints
    requires_grad: bool


def wrapped(args: object) -> Wrapped:
    """Return what ``(class, dtype, size, stride, offset, layout, device, requires_grad)`` says.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(args, tuple) or len(args) < 8 or not isinstance(args[1], Global):
        raise TypeError("the arguments of a tensor subclass are not those that torch writes")
    return Wrapped(args[1].name, integers(args[2]), args[7] is True)


def attributes(record: object) -> Mapping[str, object]:
    """Return the attributes of an inert record, from its dict or its slots.

    Raises:
        TypeError: It has none.
    """
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, tuple) and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        raise TypeError(f"a {type(record).__name__} without attributes")
    return state


def integers(value: object) -> Ints:
    """Return a short sequence of numbers from 0 on.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK:
        raise TypeError("a size is not a short sequence")
    if any(type(item) is not int or not 0 <= item < MAX_INT for item in value):
        raise TypeError("a size is not made of numbers from 0 on")
    return tuple(value)


class Meshes:
    """Reads the device meshes of one file, each once: thousands of tensors share one."""

    def __init__(self) -> None:
        self._known: dict[int, Mesh] = {}

    def read(self, record: object) -> Mesh:
        """Return the mesh that *record* describes; the file's objects must stay alive."""
        found = self._known.get(id(record))
        if found is None:
            found = self._known[id(record)] = _mesh(attributes(record))
        return found


def read_dtensor(args: object, state: object, meshes: Meshes) -> Sharded:
    """Return what one rank holds of a DTensor.

    Args:
        args: Arguments of ``_rebuild_wrapper_subclass``.
        state: Attributes of the tensor.
        meshes: Those of the file.

    Raises:
        FormatError: It is placed in a way that is not supported.
        DamagedError: Its shape, mesh and placements contradict each other.
        TypeError, KeyError, ValueError, IndexError: It is no DTensor.
    """
    whole, fields = wrapped(args), attributes(state)
    spec, stored = attributes(fields["_spec"]), fields["_local_tensor"]
    if not isinstance(stored, StoredTensor):
        raise TypeError("its local part is not a plain tensor")
    mesh = meshes.read(spec["mesh"])
    records = spec["placements"]
    if not isinstance(records, tuple | list) or len(records) > MAX_RANK:
        raise TypeError("its placements are not a short sequence")
    placements = tuple(_placement(record) for record in records)
    pieces: tuple[Piece, ...] = ()
    if mesh.coordinate is not None:
        order = _order(spec.get("shard_order"))
        local = _local(whole.shape, mesh.sizes, mesh.coordinate, placements, order)
        _check_local(local, stored, whole, placements)
        pieces = tuple(Piece(part.box, stored, part.start) for part in local.parts)
    return Sharded(whole.dtype, whole.shape, pieces, whole.requires_grad, mesh.rank, mesh.ranks)


@lru_cache(maxsize=256)
def _local(
    shape: Ints,
    mesh: Ints,
    coordinate: Ints,
    placements: tuple[Shard | None, ...],
    order: tuple[tuple[int, Ints], ...] | None,
) -> Local:
    """Return :func:`local_part`, remembered: the layers of a model have the same shapes."""
    return local_part(shape, mesh, coordinate, placements, dict(order) if order else None)


def _check_local(
    local: Local, stored: StoredTensor, whole: Wrapped, placements: tuple[Shard | None, ...]
) -> None:
    if stored.dtype != whole.dtype:
        raise DamagedError(
            "the local tensor has another dtype", why=f"{stored.dtype}, not {whole.dtype}"
        )
    if local.shape == stored.shape:
        return
    why = f"it is {list(stored.shape)}, its placement gives {list(local.shape)}"
    if any(one is not None and one.split_factor > 1 for one in placements):
        raise FormatError(
            "a _StridedShard is cut unevenly, in a way that its placement does not tell",
            why=why,
            hint="save it with `torch.distributed.checkpoint`, or in full",
        )
    raise DamagedError("the local tensor does not fit its placement", why=why)


def _placement(record: object) -> Shard | None:
    name = record.name if isinstance(record, Inert) else type(record).__name__
    if name == "Replicate":
        return None
    if name not in ("Shard", "_StridedShard") or not isinstance(record, Inert):
        kind = "Partial" if name.endswith("Partial") else name
        raise FormatError(
            f"a DTensor is placed as `{name}`",
            why=_REASONS.get(kind, "only Shard, Replicate and _StridedShard are known"),
            hint="redistribute it to Shard or Replicate before saving",
        )
    fields = attributes(record) if record.state is not None else {"dim": record.args[0]}
    numbers = integers([fields["dim"], fields.get("split_factor", 1)])
    return Shard(numbers[0], numbers[1])


def _order(entries: object) -> tuple[tuple[int, Ints], ...] | None:
    if not isinstance(entries, tuple | list) or len(entries) > MAX_RANK:
        return None
    pairs = [entry.args if isinstance(entry, Inert) else entry for entry in entries]
    return tuple((integers(pair[:1])[0], integers(pair[1])) for pair in pairs)


def _mesh(state: Mapping[str, object]) -> Mesh:
    if "_coordinate_on_dim" not in state:
        raise FormatError(
            "a device mesh does not say where its rank is", hint="save it with torch 2.2 or later"
        )
    coordinate = state["_coordinate_on_dim"]
    ranks = state.get("_flatten_rank_map", state.get("_flatten_mesh_list")) or ()
    rank = state.get("_rank")
    return Mesh(
        _mesh_sizes(state),
        None if coordinate is None else integers(coordinate),
        rank if type(rank) is int else None,
        frozenset(item for item in ranks if type(item) is int),  # type: ignore[attr-defined]
    )


def _mesh_sizes(state: Mapping[str, object]) -> Ints:
    if "_layout" not in state:
        mesh = state["mesh"]
        if not isinstance(mesh, StoredTensor):
            raise TypeError("its mesh is not a tensor")
        return mesh.shape
    layout = attributes(state["_layout"])
    axes = layout["axes"] if "axes" in layout else layout["shape"]
    items = axes if isinstance(axes, tuple | list) else (axes,)
    return tuple(_axis_size(axis) for axis in items[:MAX_RANK])


def _axis_size(axis: object) -> int:
    """Return the ranks along one mesh dimension, which torch may describe as several."""
    if isinstance(axis, Inert):
        axis = attributes(axis)["shape"]
    return math.prod(integers(axis)) if isinstance(axis, tuple | list) else integers((axis,))[0]
