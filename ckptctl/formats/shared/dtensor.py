"""DTensors as ``torch.save`` leaves them: a local tensor, a mesh and placements; nothing is built.

Sources: ``torch/distributed/tensor/_api.py`` and ``_dtensor_spec.py`` (``DTensorSpec``),
``torch/_tensor.py`` (``_rebuild_from_type_v2``). Field names are those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import FormatError, UnsupportedError
from ckptctl.formats.shared.device_mesh import Mesh, Meshes
from ckptctl.formats.shared.inert_fields import Ints, attributes, integers
from ckptctl.planner.parallel.placements import Local, Shard, local_part
from ckptctl.storage.pickles.reader import Global, Inert
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.zips.reader import StoredTensor

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


def nothing_known(_: int) -> tuple[Box, ...]:
    """Return no box: what another rank holds is not told."""
    return ()


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
        held_by: Returns the boxes that another rank holds, as far as this one tells.
    """

    dtype: str
    shape: Ints
    pieces: tuple[Piece, ...]
    requires_grad: bool
    rank: int | None
    ranks: frozenset[int]
    held_by: Callable[[int], tuple[Box, ...]] = nothing_known


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


def read_dtensor(args: object, state: object, meshes: Meshes) -> Sharded:
    """Return what one rank holds of a DTensor.

    Args:
        args: Arguments of ``_rebuild_wrapper_subclass``.
        state: Attributes of the tensor.
        meshes: Those of the file.

    Raises:
        FormatError: It is placed in a way that is not supported.
        UnsupportedError: Its shape, mesh and placements contradict each other.
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
    order = _order(spec.get("shard_order"))
    pieces: tuple[Piece, ...] = ()
    if mesh.coordinate is not None:
        local = _local(whole.shape, mesh.sizes, mesh.coordinate, placements, order)
        _check_local(local, stored, whole, placements)
        pieces = tuple(Piece(part.box, stored, part.start) for part in local.parts)
    others = partial(_held_by, whole.shape, mesh, placements, order)
    return Sharded(
        whole.dtype, whole.shape, pieces, whole.requires_grad, mesh.rank, mesh.ranks, others
    )


def _held_by(
    shape: Ints,
    mesh: Mesh,
    placements: tuple[Shard | None, ...],
    order: tuple[tuple[int, Ints], ...] | None,
    rank: int,
) -> tuple[Box, ...]:
    coordinate = mesh.place(rank)
    if coordinate is None:
        return ()
    local = _local(shape, mesh.sizes, coordinate, placements, order)
    return tuple(part.box for part in local.parts)


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
        raise UnsupportedError(
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
    raise UnsupportedError("the local tensor does not fit its placement", why=why)


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
