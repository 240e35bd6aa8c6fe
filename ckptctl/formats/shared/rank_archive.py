"""One rank's ``torch.save`` file, with regular tensors, shards and non-tensor values.

Shards are DTensors, which ``torch.save`` stores as a local tensor, a mesh and placements
(``torch/distributed/tensor/_api.py``, ``_dtensor_spec.py``, ``torch/_tensor.py``; field names are
those of torch 2.13), and ShardedTensors, FSDP1's sharded state dict
(``torch/distributed/_shard/sharded_tensor/api.py``, ``metadata.py``). torch needs a process group
to load them; here, no such object is created.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from ckptctl.catalog import Blob, Box, Path, row_major
from ckptctl.errors import CkptError, FormatError, UnsupportedError, quote_names
from ckptctl.formats.shared.indexes import Integers, integers
from ckptctl.formats.shared.leaves import flatten, join, require_known
from ckptctl.formats.shared.stored_leaves import is_stored, refuse_hidden_tensors
from ckptctl.planner.placements import MeshShard, ShardPlacement, compute_local_shard
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_reader import Table
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.schema import malformed_errors, read_attributes
from ckptctl.storage.zips.zip_reader import StoredTensor, read_archive
from ckptctl.units import pluralize

Axis = tuple[tuple[int, int], ...]
"""Sizes and strides of the axes that form one dimension of a mesh, slowest first."""
_HOMES = ("torch.distributed.tensor", "torch.distributed._tensor")
_SUBMODULES = ("", ".api", "._api", ".placement_types", "._dtensor_spec", ".device_mesh")
_DTENSOR = (
    *("DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "Partial"),
    *("_Partial", "_NormPartial", "_MaskPartial", "MaskPartial", "_StridedShard", "_RaggedShard"),
)
_SHARD = "torch.distributed._shard"
_CLASSES: Mapping[str, tuple[str, ...]] = {
    **{home + part: _DTENSOR for home in _HOMES for part in _SUBMODULES},
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._tensor.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
    "torch._utils": ("_rebuild_wrapper_subclass",),
    f"{_SHARD}.sharded_tensor.api": ("ShardedTensor", "ShardedTensor.ProcessGroupState"),
    f"{_SHARD}.sharded_tensor.shard": ("Shard",),
    f"{_SHARD}.sharded_tensor.metadata": (
        *("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING"),
    ),
    f"{_SHARD}.metadata": ("ShardMetadata",),
    f"{_SHARD}.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
    f"{_SHARD}.sharding_spec.api": ("EnumerableShardingSpec",),
    "torch.distributed.remote_device": ("_remote_device",),
}
"""Classes in pickles of DTensors and ShardedTensors, in addition to those of regular tensors."""
_TABLE: Table = {
    **TORCH_TABLE,
    **{(home, name): Global(home, name) for home, names in _CLASSES.items() for name in names},
}
_FLAT = re.compile(r"_?flat_param(_\d+)?")
_WRAPPED = Global("torch._utils", "_rebuild_wrapper_subclass")
MAX_WORLD = 1 << 20
_REASONS = {
    "Partial": "each rank has a partial value, and the reduction is not recorded",
    "_RaggedShard": "the rows are divided by weights that are not recorded",
}


class Mesh:
    """A device mesh as recorded by one rank.

    *order* contains the numbers of all ranks in the order of the strides of *axes*.

    Attributes:
        sizes: Ranks along each dimension.
        coordinate: This rank's coordinate; None if it is not part of the mesh.
        rank: This rank's number, if recorded.
        ranks: Numbers of all ranks, if recorded.
    """

    def __init__(
        self, axes: tuple[Axis, ...], coordinate: Integers | None, rank: int | None, order: Integers
    ) -> None:
        self.sizes = tuple(math.prod(size for size, _ in axis) for axis in axes)
        self.coordinate, self.rank, self.ranks = coordinate, rank, frozenset(order)
        self._axes, self._order = axes, order

    def place(self, rank: int) -> Integers | None:
        """Return the coordinate of another rank, or None if it is not recorded."""
        at = self._positions.get(rank)
        return None if at is None else _coordinate(self._axes, at)

    @cached_property
    def _positions(self) -> Mapping[int, int]:
        """Index of each rank in the mesh, or empty if this would contradict *coordinate*."""
        found = {rank: at for at, rank in enumerate(self._order)}
        own = None if self.rank is None else found.get(self.rank)
        if own is None or _coordinate(self._axes, own) != self.coordinate:
            return {}
        return found


def _coordinate(axes: tuple[Axis, ...], at: int) -> Integers:
    """Return the mesh coordinate of the rank at index *at* of the rank list."""
    found = [0] * len(axes)
    for number, axis in enumerate(axes):
        for size, stride in axis:
            found[number] = found[number] * size + at // max(stride, 1) % max(size, 1)
    return tuple(found)


class Meshes:
    """Reader for the device meshes of one file, cached because thousands of tensors share one."""

    def __init__(self) -> None:
        self._known: dict[int, Mesh] = {}

    def read(self, record: object) -> Mesh:
        """Read the mesh in *record*, an object that must stay alive."""
        if id(record) in self._known:
            return self._known[id(record)]
        state = read_attributes(record)
        if "_coordinate_on_dim" not in state:
            raise FormatError(
                "a device mesh does not contain the position of its rank",
                hint="save it with torch 2.2 or later",
            )
        coordinate = state["_coordinate_on_dim"]
        ranks = state.get("_flatten_rank_map", state.get("_flatten_mesh_list")) or ()
        rank = state.get("_rank")
        mesh = self._known[id(record)] = Mesh(
            _axes(state),
            None if coordinate is None else integers(coordinate),
            rank if type(rank) is int else None,
            tuple(item for item in ranks if type(item) is int),  # type: ignore[attr-defined]
        )
        _require_inside(mesh)
        return mesh


def _require_inside(mesh: Mesh) -> None:
    """Raise if a rank has a coordinate outside its mesh, or is not one of the mesh's ranks."""
    at, who = mesh.coordinate, "a rank" if mesh.rank is None else f"rank {mesh.rank}"
    if at is None:
        return
    sizes = " x ".join(map(str, mesh.sizes))
    if any(n >= size for n, size in zip(at, mesh.sizes, strict=False)):
        why = f"its position is {list(at)}, but the mesh has {sizes} ranks"
    elif mesh.ranks and mesh.rank is not None and mesh.rank not in mesh.ranks:
        why = f"the {sizes} mesh has the ranks {quote_names([str(n) for n in sorted(mesh.ranks)])}"
    else:
        return
    raise UnsupportedError(
        f"{who} is outside the device mesh recorded in its file",
        why=why,
        hint="use the file that the rank wrote (this one is damaged or from another run)",
    )


def _axes(state: Mapping[str, object]) -> tuple[Axis, ...]:
    if "_layout" not in state:
        mesh = state["mesh"]
        if not isinstance(mesh, StoredTensor):
            raise TypeError("the mesh is not a tensor")
        pairs = zip(mesh.shape, row_major(mesh.shape), strict=True)
        return tuple((pair,) for pair in pairs)
    layout = read_attributes(state["_layout"])
    if "axes" in layout:
        found = [read_attributes(axis) for axis in _items(layout["axes"])]
        return tuple(_axis(axis["shape"], axis["stride"]) for axis in found)
    both = zip(_items(layout["shape"]), _items(layout["stride"]), strict=True)
    return tuple(_axis(shape, stride) for shape, stride in both)


def _items(value: object) -> tuple[object, ...]:
    return tuple(value)[:MAX_RANK] if isinstance(value, tuple | list) else (value,)


def _axis(shape: object, stride: object) -> Axis:
    """Return one mesh dimension, which torch may split into several."""
    return tuple(zip(integers(_items(shape)), integers(_items(stride)), strict=True))


def nothing_known(_: int) -> tuple[Box, ...]:
    """Return no boxes, for formats that do not record those of other ranks."""
    return ()


class LocalShard(NamedTuple):
    """A box of a global tensor and its place in the file of one rank.

    Attributes:
        box: Index range in the global tensor.
        tensor: The local tensor that contains the box.
        start: First index of the box in the local tensor.
    """

    box: Box
    tensor: StoredTensor
    start: Integers


@dataclass(frozen=True, slots=True)
class Sharded:
    """A sharded tensor as recorded in one rank's file.

    Attributes:
        dtype: torch's name.
        shape: Global shape.
        pieces: Boxes of this rank.
        requires_grad: As recorded.
        rank: Rank that wrote it, if recorded.
        ranks: All ranks that it refers to.
        held_by: Function that returns the boxes of another rank, as far as they are recorded.
    """

    dtype: str
    shape: Integers
    pieces: tuple[LocalShard, ...]
    requires_grad: bool
    rank: int | None
    ranks: frozenset[int]
    held_by: Callable[[int], tuple[Box, ...]] = nothing_known


class Wrapped(NamedTuple):
    """The relevant arguments of ``_rebuild_wrapper_subclass``."""

    dtype: str
    shape: Integers
    requires_grad: bool


def wrapped(args: object) -> Wrapped:
    """Parse ``(class, dtype, size, stride, offset, layout, device, requires_grad)``."""
    if not isinstance(args, tuple) or len(args) < 8 or not isinstance(args[1], Global):
        raise TypeError("the arguments of a tensor subclass differ from those that torch writes")
    return Wrapped(args[1].name, integers(args[2]), args[7] is True)


def read_dtensor(args: object, state: object, meshes: Meshes) -> Sharded:
    """Read one rank's part of a DTensor."""
    whole, fields = wrapped(args), read_attributes(state)
    spec, stored = read_attributes(fields["_spec"]), fields["_local_tensor"]
    if not isinstance(stored, StoredTensor):
        raise TypeError("the local part is not a regular tensor")
    mesh = meshes.read(spec["mesh"])
    records = spec["placements"]
    if not isinstance(records, tuple | list) or len(records) > MAX_RANK:
        raise TypeError("the placements are not a short sequence")
    placements = tuple(_placement(record) for record in records)
    order = _order(spec.get("shard_order"))
    pieces: tuple[LocalShard, ...] = ()
    if mesh.coordinate is not None:
        local = _local(whole.shape, mesh.sizes, mesh.coordinate, placements, order)
        _check_local(local, stored, whole, placements)
        pieces = tuple(LocalShard(part.box, stored, part.start) for part in local.boxes)
    others = partial(_placed_boxes, whole.shape, mesh, placements, order)
    return Sharded(
        whole.dtype, whole.shape, pieces, whole.requires_grad, mesh.rank, mesh.ranks, others
    )


def _placed_boxes(
    shape: Integers,
    mesh: Mesh,
    placements: tuple[ShardPlacement | None, ...],
    order: tuple[tuple[int, Integers], ...] | None,
    rank: int,
) -> tuple[Box, ...]:
    coordinate = mesh.place(rank)
    if coordinate is None:
        return ()
    local = _local(shape, mesh.sizes, coordinate, placements, order)
    return tuple(part.box for part in local.boxes)


@lru_cache(maxsize=256)
def _local(
    shape: Integers,
    mesh: Integers,
    coordinate: Integers,
    placements: tuple[ShardPlacement | None, ...],
    order: tuple[tuple[int, Integers], ...] | None,
) -> MeshShard:
    """Compute :func:`local_part`, cached because the layers of a model have the same shapes."""
    return compute_local_shard(shape, mesh, coordinate, placements, dict(order) if order else None)


def _check_local(
    local: MeshShard,
    stored: StoredTensor,
    whole: Wrapped,
    placements: tuple[ShardPlacement | None, ...],
) -> None:
    if stored.dtype != whole.dtype:
        raise UnsupportedError(
            "the local tensor has a different dtype", why=f"{stored.dtype}, expected {whole.dtype}"
        )
    if local.shape == stored.shape:
        return
    why = f"its shape is {list(stored.shape)}, the placement requires {list(local.shape)}"
    if any(one is not None and one.split_factor > 1 for one in placements):
        raise FormatError(
            "the placement of an unevenly divided _StridedShard is ambiguous",
            why=why,
            hint="save it with `torch.distributed.checkpoint`, or as a full tensor",
        )
    raise UnsupportedError("the local tensor does not match its placement", why=why)


def _placement(record: object) -> ShardPlacement | None:
    name = record.name if isinstance(record, Inert) else type(record).__name__
    if name == "Replicate":
        return None
    if name not in ("Shard", "_StridedShard") or not isinstance(record, Inert):
        kind = "Partial" if name.endswith("Partial") else name
        raise FormatError(
            f"the DTensor placement `{name}` is not supported",
            why=_REASONS.get(kind, "only Shard, Replicate and _StridedShard are supported"),
            hint="redistribute it to Shard or Replicate before saving",
        )
    fields = read_attributes(record) if record.state is not None else {"dim": record.args[0]}
    numbers = integers([fields["dim"], fields.get("split_factor", 1)])
    return ShardPlacement(numbers[0], numbers[1])


def _order(entries: object) -> tuple[tuple[int, Integers], ...] | None:
    if not isinstance(entries, tuple | list) or len(entries) > MAX_RANK:
        return None
    pairs = [entry.args if isinstance(entry, Inert) else entry for entry in entries]
    return tuple((integers(pair[:1])[0], integers(pair[1])) for pair in pairs)


def _read_sharded_tensor(args: object, state: object) -> Sharded:
    """Read one rank's part of a ShardedTensor."""
    whole = wrapped(args)
    if not isinstance(state, tuple) or not isinstance(state[0], list):
        raise TypeError("the state is not that of a ShardedTensor")
    shape = integers(read_attributes(state[1])["size"])
    if shape != whole.shape:
        raise UnsupportedError(
            "a ShardedTensor has two different shapes", why=f"{list(whole.shape)} and {list(shape)}"
        )
    group = read_attributes(state[2])
    rank, world = integers((group["global_rank"], group["global_world_size"]))
    if world > MAX_WORLD:
        raise UnsupportedError("the world size is too large", why=f"{pluralize(world, 'rank')}")
    pieces = tuple(_piece(read_attributes(shard), whole.dtype) for shard in state[0])
    others = partial(_listed_boxes, read_attributes(state[1])["shards_metadata"])
    return Sharded(whole.dtype, shape, pieces, whole.requires_grad, rank, _world(world), others)


def _listed_boxes(shards: object, rank: int) -> tuple[Box, ...]:
    """Return the boxes of another rank (every rank's file lists the boxes of all)."""
    if not isinstance(shards, list):
        return ()
    found = (read_attributes(shard) for shard in shards)
    return tuple(_box(one) for one in found if read_attributes(one["placement"])["_rank"] == rank)


def _box(place: Mapping[str, object]) -> Box:
    return Box(integers(place["shard_offsets"]), integers(place["shard_sizes"]))


def _piece(shard: Mapping[str, object], dtype: str) -> LocalShard:
    stored, box = shard["tensor"], _box(read_attributes(shard["metadata"]))
    if not isinstance(stored, StoredTensor):
        raise TypeError("a shard is not a regular tensor")
    if (stored.dtype, stored.shape) != (dtype, box.sizes):
        raise UnsupportedError(
            "a shard does not match its metadata",
            why=f"{stored.dtype} {list(stored.shape)}, expected {dtype} {list(box.sizes)}",
        )
    return LocalShard(box, stored, (0,) * len(box.sizes))


@lru_cache(maxsize=8)
def _world(size: int) -> frozenset[int]:
    return frozenset(range(size))


def read_rank_file(files: SourceFiles, name: str) -> Iterator[tuple[Path, object]]:
    """Yield the leaves of one rank's file with their paths."""
    archive = read_archive(files, name, table=_TABLE, unknown="inert")
    if isinstance(archive.root, Inert) and not _is_tensor(archive.root):
        require_known([Blob(name, (), value=archive.root)])
    meshes, where = Meshes(), str(files.root / name)
    for path, leaf in flatten(archive.root, _is_tensor, where=where):
        key = join(path)
        if _is_sharded(leaf):
            yield path, _sharded(leaf, key, where, meshes)
        else:
            if not is_stored(leaf):
                refuse_hidden_tensors(leaf, key, where)
            yield path, leaf


def _is_tensor(node: object) -> bool:
    return is_stored(node) or _is_sharded(node)


def _is_sharded(node: object) -> bool:
    """Return whether *node* is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, ...)``."""
    if not isinstance(node, Inert) or node.name != "_rebuild_from_type_v2":
        return False
    return len(node.args) == 4 and node.args[0] == _WRAPPED


def _sharded(node: object, key: str, where: str, meshes: Meshes) -> Sharded:
    assert isinstance(node, Inert)
    if _FLAT.fullmatch(key.rpartition(".")[2]):
        raise UnsupportedError(
            "FSDP1's LOCAL_STATE_DICT (flat parameters) is not supported",
            where=f"tensor `{key}`",
            why="a vector contains many parameters, and only the model knows their names and "
            "shapes",
            hint="load it into the model and save a SHARDED_STATE_DICT or a FULL_STATE_DICT",
        )
    _, kind, args, state = node.args
    where = f"{where}, tensor `{key}`"
    try:
        with malformed_errors(f"`{key}` is not a valid sharded tensor", where):
            if isinstance(kind, Global) and kind.name == "DTensor":
                return read_dtensor(args, state, meshes)
            if isinstance(kind, Global) and kind.name == "ShardedTensor":
                return _read_sharded_tensor(args, state)
            raise TypeError(f"`{kind}` is not a sharded tensor class")
    except CkptError as error:
        error.where = where
        raise
