"""Read the ``torch.save`` file of one rank, with regular tensors, shards and other values.

Shards are DTensors, which ``torch.save`` stores as a local tensor, a mesh and placements
(``torch/distributed/tensor/_api.py``, ``_dtensor_spec.py``, ``torch/_tensor.py``; field names are
those of torch 2.13), and ShardedTensors, which are in the sharded state dict of FSDP1
(``torch/distributed/_shard/sharded_tensor/api.py``, ``metadata.py``). torch needs a process group
to load them, whereas this module parses the pickle without creating objects of these classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from ckptctl.catalog import Blob, Box, Path, compute_row_major_strides
from ckptctl.errors import CkptError, FormatError, UnsupportedError, quote_names
from ckptctl.formats.shared.indexes import Integers, parse_integers
from ckptctl.formats.shared.leaves import flatten_object, join_path, require_known_classes
from ckptctl.formats.shared.stored_leaves import is_stored_tensor, refuse_hidden_tensors
from ckptctl.planner.placements import MeshShard, ShardPlacement, compute_local_shard
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_reader import GlobalsTable
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.schema import get_record_attributes, wrap_malformed_errors
from ckptctl.storage.zips.zip_reader import StoredTensor, read_archive
from ckptctl.units import pluralize

Axis = tuple[tuple[int, int], ...]
"""Sizes and strides of the axes that form one mesh dimension, with the outermost axis first."""
_TORCH_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor")
_SUBMODULES = ("", ".api", "._api", ".placement_types", "._dtensor_spec", ".device_mesh")
_DTENSOR = (
    *("DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "Partial"),
    *("_Partial", "_NormPartial", "_MaskPartial", "MaskPartial", "_StridedShard", "_RaggedShard"),
)
_SHARD = "torch.distributed._shard"
_CLASSES: Mapping[str, tuple[str, ...]] = {
    **{home + part: _DTENSOR for home in _TORCH_MODULES for part in _SUBMODULES},
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
"""Names of the classes that pickles of DTensors and ShardedTensors contain, by module."""
_TABLE: GlobalsTable = {
    **TORCH_TABLE,
    **{(home, name): Global(home, name) for home, names in _CLASSES.items() for name in names},
}
_FLAT_PARAMETER = re.compile(r"_?flat_param(_\d+)?")
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
MAX_WORLD_SIZE = 1 << 20
_UNSUPPORTED_REASONS = {
    "Partial": "each rank has a partial value, and the reduction is not recorded",
    "_RaggedShard": "the rows are divided by weights that are not recorded",
}


class Mesh:
    """A device mesh, as recorded in the file of one rank.

    *order* lists all global ranks, in the order in which the strides of *axes* index them.

    Attributes:
        sizes: Number of ranks along each mesh dimension.
        coordinate: Mesh coordinate of the rank that wrote the file, or None if the rank is not part
            of the mesh.
        rank: Global rank that wrote the file, or None if unknown.
        ranks: All global ranks of the mesh, or empty if not recorded.
    """

    def __init__(
        self, axes: tuple[Axis, ...], coordinate: Integers | None, rank: int | None, order: Integers
    ) -> None:
        self.sizes = tuple(math.prod(size for size, _ in axis) for axis in axes)
        self.coordinate, self.rank, self.ranks = coordinate, rank, frozenset(order)
        self._axes, self._order = axes, order

    def find_coordinate(self, rank: int) -> Integers | None:
        """Return the mesh coordinate of the global rank *rank*, or None if it is not recorded."""
        index = self._positions.get(rank)
        return None if index is None else _compute_coordinate(self._axes, index)

    @cached_property
    def _positions(self) -> Mapping[int, int]:
        """Map each global rank to its index in *order*.

        The result is empty if *order* contradicts the recorded coordinate.
        """
        positions = {rank: index for index, rank in enumerate(self._order)}
        this_index = None if self.rank is None else positions.get(self.rank)
        if this_index is None or _compute_coordinate(self._axes, this_index) != self.coordinate:
            return {}
        return positions


def _compute_coordinate(axes: tuple[Axis, ...], index: int) -> Integers:
    """Return the mesh coordinate of the rank at *index* in the list of global ranks."""
    coordinate = [0] * len(axes)
    for number, axis in enumerate(axes):
        for size, stride in axis:
            coordinate[number] = coordinate[number] * size + index // max(stride, 1) % max(size, 1)
    return tuple(coordinate)


class MeshParser:
    """Parser of device meshes, with a cache because the tensors of a file share few meshes."""

    def __init__(self) -> None:
        self._cache: dict[int, Mesh] = {}

    def parse_mesh(self, record: object) -> Mesh:
        """Parse the pickle record of a mesh.

        The caller must keep *record* alive, because its id is the cache key.
        """
        if id(record) in self._cache:
            return self._cache[id(record)]
        state = get_record_attributes(record)
        if "_coordinate_on_dim" not in state:
            raise FormatError(
                "a device mesh does not contain the position of its rank",
                hint="save it with torch 2.2 or later",
            )
        coordinate = state["_coordinate_on_dim"]
        ranks = state.get("_flatten_rank_map", state.get("_flatten_mesh_list")) or ()
        rank = state.get("_rank")
        mesh = self._cache[id(record)] = Mesh(
            _parse_axes(state),
            None if coordinate is None else parse_integers(coordinate),
            rank if type(rank) is int else None,
            tuple(item for item in ranks if type(item) is int),  # type: ignore[attr-defined]
        )
        _require_in_mesh(mesh)
        return mesh


def _require_in_mesh(mesh: Mesh) -> None:
    """Raise if the rank that recorded *mesh*, or its coordinate, is outside of the mesh."""
    coordinate, subject = mesh.coordinate, "a rank" if mesh.rank is None else f"rank {mesh.rank}"
    if coordinate is None:
        return
    sizes = " x ".join(map(str, mesh.sizes))
    if any(n >= size for n, size in zip(coordinate, mesh.sizes, strict=False)):
        why = f"its position is {list(coordinate)}, but the mesh has {sizes} ranks"
    elif mesh.ranks and mesh.rank is not None and mesh.rank not in mesh.ranks:
        why = f"the {sizes} mesh has the ranks {quote_names([str(n) for n in sorted(mesh.ranks)])}"
    else:
        return
    raise UnsupportedError(
        f"{subject} is outside the device mesh recorded in its file",
        why=why,
        hint="use the file that the rank wrote (this one is damaged or from another run)",
    )


def _parse_axes(state: Mapping[str, object]) -> tuple[Axis, ...]:
    if "_layout" not in state:
        mesh = state["mesh"]
        if not isinstance(mesh, StoredTensor):
            raise TypeError("the mesh is not a tensor")
        pairs = zip(mesh.shape, compute_row_major_strides(mesh.shape), strict=True)
        return tuple((pair,) for pair in pairs)
    layout = get_record_attributes(state["_layout"])
    if "axes" in layout:
        axis_records = [get_record_attributes(axis) for axis in _to_tuple(layout["axes"])]
        return tuple(_parse_axis(axis["shape"], axis["stride"]) for axis in axis_records)
    both = zip(_to_tuple(layout["shape"]), _to_tuple(layout["stride"]), strict=True)
    return tuple(_parse_axis(shape, stride) for shape, stride in both)


def _to_tuple(value: object) -> tuple[object, ...]:
    return tuple(value)[:MAX_RANK] if isinstance(value, tuple | list) else (value,)


def _parse_axis(shape: object, stride: object) -> Axis:
    """Parse the shape and stride of one mesh dimension, which may consist of several axes."""
    return tuple(
        zip(parse_integers(_to_tuple(shape)), parse_integers(_to_tuple(stride)), strict=True)
    )


def get_no_boxes(_: int) -> tuple[Box, ...]:
    """Return an empty tuple, for files that do not record the boxes of other ranks."""
    return ()


class LocalShard(NamedTuple):
    """A box of a global tensor, and the local tensor that contains it.

    Attributes:
        box: Index ranges of the box in the global tensor.
        tensor: Local tensor that contains the box.
        start: Index of the first element of the box in the local tensor, one per dimension.
    """

    box: Box
    tensor: StoredTensor
    start: Integers


@dataclass(frozen=True, slots=True)
class ShardedPart:
    """The shards of one global tensor that the file of one rank contains.

    Attributes:
        dtype: Name of the torch dtype.
        shape: Global shape.
        pieces: Boxes in this file, each with its local tensor.
        requires_grad: Value of ``requires_grad`` in the file.
        rank: Global rank that wrote the file, or None if not recorded.
        ranks: Global ranks of the mesh or process group, or empty if not recorded.
        boxes_of_rank: Function that returns the boxes of another rank, or an empty tuple if they
            are not recorded.
    """

    dtype: str
    shape: Integers
    pieces: tuple[LocalShard, ...]
    requires_grad: bool
    rank: int | None
    ranks: frozenset[int]
    boxes_of_rank: Callable[[int], tuple[Box, ...]] = get_no_boxes


class WrapperArgs(NamedTuple):
    """Dtype, shape and ``requires_grad`` from the arguments of ``_rebuild_wrapper_subclass``."""

    dtype: str
    shape: Integers
    requires_grad: bool


def parse_wrapper_args(args: object) -> WrapperArgs:
    """Parse the arguments of ``_rebuild_wrapper_subclass``.

    The arguments are ``(class, dtype, size, stride, offset, layout, device, requires_grad)``.
    """
    if not isinstance(args, tuple) or len(args) < 8 or not isinstance(args[1], Global):
        raise TypeError("the arguments of a tensor subclass differ from those that torch writes")
    return WrapperArgs(args[1].name, parse_integers(args[2]), args[7] is True)


def parse_dtensor(args: object, state: object, meshes: MeshParser) -> ShardedPart:
    """Parse the local shard of a DTensor from the arguments and state of its pickle record."""
    wrapper, fields = parse_wrapper_args(args), get_record_attributes(state)
    spec, stored = get_record_attributes(fields["_spec"]), fields["_local_tensor"]
    if not isinstance(stored, StoredTensor):
        raise TypeError("the local part is not a regular tensor")
    mesh = meshes.parse_mesh(spec["mesh"])
    records = spec["placements"]
    if not isinstance(records, tuple | list) or len(records) > MAX_RANK:
        raise TypeError("the placements are not a short sequence")
    placements = tuple(_parse_placement(record) for record in records)
    order = _parse_shard_order(spec.get("shard_order"))
    pieces: tuple[LocalShard, ...] = ()
    if mesh.coordinate is not None:
        local = _compute_cached_local_shard(
            wrapper.shape, mesh.sizes, mesh.coordinate, placements, order
        )
        _check_local_tensor(local, stored, wrapper, placements)
        pieces = tuple(LocalShard(part.box, stored, part.start) for part in local.boxes)
    boxes_of_rank = partial(_compute_boxes_of_rank, wrapper.shape, mesh, placements, order)
    return ShardedPart(
        wrapper.dtype,
        wrapper.shape,
        pieces,
        wrapper.requires_grad,
        mesh.rank,
        mesh.ranks,
        boxes_of_rank,
    )


def _compute_boxes_of_rank(
    shape: Integers,
    mesh: Mesh,
    placements: tuple[ShardPlacement | None, ...],
    order: tuple[tuple[int, Integers], ...] | None,
    rank: int,
) -> tuple[Box, ...]:
    coordinate = mesh.find_coordinate(rank)
    if coordinate is None:
        return ()
    local = _compute_cached_local_shard(shape, mesh.sizes, coordinate, placements, order)
    return tuple(part.box for part in local.boxes)


@lru_cache(maxsize=256)
def _compute_cached_local_shard(
    shape: Integers,
    mesh: Integers,
    coordinate: Integers,
    placements: tuple[ShardPlacement | None, ...],
    order: tuple[tuple[int, Integers], ...] | None,
) -> MeshShard:
    """Return :func:`compute_local_shard` from a cache, because layers have equal shapes."""
    return compute_local_shard(shape, mesh, coordinate, placements, dict(order) if order else None)


def _check_local_tensor(
    local: MeshShard,
    stored: StoredTensor,
    wrapper: WrapperArgs,
    placements: tuple[ShardPlacement | None, ...],
) -> None:
    if stored.dtype != wrapper.dtype:
        raise UnsupportedError(
            "the local tensor has a different dtype",
            why=f"{stored.dtype}, expected {wrapper.dtype}",
        )
    if local.shape == stored.shape:
        return
    why = f"its shape is {list(stored.shape)}, the placement requires {list(local.shape)}"
    if any(placement is not None and placement.split_factor > 1 for placement in placements):
        raise FormatError(
            "the placement of an unevenly divided _StridedShard is ambiguous",
            why=why,
            hint="save it with `torch.distributed.checkpoint`, or as a full tensor",
        )
    raise UnsupportedError("the local tensor does not match its placement", why=why)


def _parse_placement(record: object) -> ShardPlacement | None:
    name = record.name if isinstance(record, Inert) else type(record).__name__
    if name == "Replicate":
        return None
    if name not in ("Shard", "_StridedShard") or not isinstance(record, Inert):
        kind = "Partial" if name.endswith("Partial") else name
        raise FormatError(
            f"the DTensor placement `{name}` is not supported",
            why=_UNSUPPORTED_REASONS.get(
                kind, "only Shard, Replicate and _StridedShard are supported"
            ),
            hint="redistribute it to Shard or Replicate before saving",
        )
    fields = get_record_attributes(record) if record.state is not None else {"dim": record.args[0]}
    numbers = parse_integers([fields["dim"], fields.get("split_factor", 1)])
    return ShardPlacement(numbers[0], numbers[1])


def _parse_shard_order(entries: object) -> tuple[tuple[int, Integers], ...] | None:
    if not isinstance(entries, tuple | list) or len(entries) > MAX_RANK:
        return None
    pairs = [entry.args if isinstance(entry, Inert) else entry for entry in entries]
    return tuple((parse_integers(pair[:1])[0], parse_integers(pair[1])) for pair in pairs)


def _parse_sharded_tensor(args: object, state: object) -> ShardedPart:
    """Parse the local shards of a ShardedTensor from the arguments and state of its record."""
    wrapper = parse_wrapper_args(args)
    if not isinstance(state, tuple) or not isinstance(state[0], list):
        raise TypeError("the state is not that of a ShardedTensor")
    shape = parse_integers(get_record_attributes(state[1])["size"])
    if shape != wrapper.shape:
        raise UnsupportedError(
            "a ShardedTensor has two different shapes",
            why=f"{list(wrapper.shape)} and {list(shape)}",
        )
    group = get_record_attributes(state[2])
    rank, world = parse_integers((group["global_rank"], group["global_world_size"]))
    if world > MAX_WORLD_SIZE:
        raise UnsupportedError("the world size is too large", why=f"{pluralize(world, 'rank')}")
    pieces = tuple(_parse_piece(get_record_attributes(shard), wrapper.dtype) for shard in state[0])
    boxes_of_rank = partial(_find_listed_boxes, get_record_attributes(state[1])["shards_metadata"])
    return ShardedPart(
        wrapper.dtype,
        shape,
        pieces,
        wrapper.requires_grad,
        rank,
        _make_rank_set(world),
        boxes_of_rank,
    )


def _find_listed_boxes(shards: object, rank: int) -> tuple[Box, ...]:
    """Return the boxes that *shards*, the ``shards_metadata`` of all ranks, lists for *rank*."""
    if not isinstance(shards, list):
        return ()
    records = (get_record_attributes(shard) for shard in shards)
    return tuple(
        _parse_box(record)
        for record in records
        if get_record_attributes(record["placement"])["_rank"] == rank
    )


def _parse_box(place: Mapping[str, object]) -> Box:
    return Box(parse_integers(place["shard_offsets"]), parse_integers(place["shard_sizes"]))


def _parse_piece(shard: Mapping[str, object], dtype: str) -> LocalShard:
    stored, box = shard["tensor"], _parse_box(get_record_attributes(shard["metadata"]))
    if not isinstance(stored, StoredTensor):
        raise TypeError("a shard is not a regular tensor")
    if (stored.dtype, stored.shape) != (dtype, box.sizes):
        raise UnsupportedError(
            "a shard does not match its metadata",
            why=f"{stored.dtype} {list(stored.shape)}, expected {dtype} {list(box.sizes)}",
        )
    return LocalShard(box, stored, (0,) * len(box.sizes))


@lru_cache(maxsize=8)
def _make_rank_set(size: int) -> frozenset[int]:
    return frozenset(range(size))


def read_rank_file(files: SourceFiles, name: str) -> Iterator[tuple[Path, object]]:
    """Yield the path and value of every leaf in the file *name* of one rank."""
    archive = read_archive(files, name, table=_TABLE, unknown="inert")
    if isinstance(archive.root, Inert) and not _is_tensor(archive.root):
        require_known_classes([Blob(name, (), value=archive.root)])
    meshes, where = MeshParser(), str(files.root / name)
    for path, leaf in flatten_object(archive.root, _is_tensor, where=where):
        key = join_path(path)
        if _is_sharded(leaf):
            yield path, _parse_sharded_leaf(leaf, key, where, meshes)
        else:
            if not is_stored_tensor(leaf):
                refuse_hidden_tensors(leaf, key, where)
            yield path, leaf


def _is_tensor(node: object) -> bool:
    return is_stored_tensor(node) or _is_sharded(node)


def _is_sharded(node: object) -> bool:
    """Return whether *node* is the record of a tensor wrapper subclass, such as DTensor."""
    if not isinstance(node, Inert) or node.name != "_rebuild_from_type_v2":
        return False
    return len(node.args) == 4 and node.args[0] == _REBUILD_WRAPPER


def _parse_sharded_leaf(node: object, key: str, where: str, meshes: MeshParser) -> ShardedPart:
    assert isinstance(node, Inert)
    if _FLAT_PARAMETER.fullmatch(key.rpartition(".")[2]):
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
        with wrap_malformed_errors(f"`{key}` is not a valid sharded tensor", where):
            if isinstance(kind, Global) and kind.name == "DTensor":
                return parse_dtensor(args, state, meshes)
            if isinstance(kind, Global) and kind.name == "ShardedTensor":
                return _parse_sharded_tensor(args, state)
            raise TypeError(f"`{kind}` is not a sharded tensor class")
    except CkptError as error:
        error.where = where
        raise
