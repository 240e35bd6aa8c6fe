"""One rank's ``torch.save`` file: plain tensors, shards of larger ones, and other leaves.

ShardedTensors, FSDP1's sharded state dict: ``torch/distributed/_shard/sharded_tensor/api.py``
(``ShardedTensor.__getstate__``) and ``metadata.py``. torch itself needs a process group to read
them; nothing is built here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial

from ckptctl.catalog import Blob, Box, Path
from ckptctl.errors import CkptError, UnsupportedError
from ckptctl.formats.shared import dtensor
from ckptctl.formats.shared.dtensor import LocalShard, Meshes, Sharded, read_dtensor, wrapped
from ckptctl.formats.shared.indexes import integers
from ckptctl.formats.shared.leaves import flatten, join, require_known
from ckptctl.formats.shared.stored_leaves import is_stored, refuse_hidden_tensors
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.reader import Table
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.schema import attributes, malformed
from ckptctl.storage.zips.reader import StoredTensor, read_archive
from ckptctl.units import counted

_SHARD = "torch.distributed._shard"
API = f"{_SHARD}.sharded_tensor.api"
MAX_WORLD = 1 << 20
CLASSES: Mapping[str, tuple[str, ...]] = {
    API: ("ShardedTensor", "ShardedTensor.ProcessGroupState"),
    f"{_SHARD}.sharded_tensor.shard": ("Shard",),
    f"{_SHARD}.sharded_tensor.metadata": (
        *("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING"),
    ),
    f"{_SHARD}.metadata": ("ShardMetadata",),
    f"{_SHARD}.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
    f"{_SHARD}.sharding_spec.api": ("EnumerableShardingSpec",),
    "torch.distributed.remote_device": ("_remote_device",),
}
"""What a pickle of ShardedTensors names besides plain tensors."""

_FLAT = re.compile(r"_?flat_param(_\d+)?")
RankLeaf = Sharded | StoredTensor | object
_NAMED = (dtensor.CLASSES, CLASSES)
_WRAPPED = Global("torch._utils", "_rebuild_wrapper_subclass")


def _refuse_flat(name: str) -> None:
    """Refuse the flat parameters of FSDP1's ``LOCAL_STATE_DICT``."""
    if _FLAT.fullmatch(name.rpartition(".")[2]):
        raise UnsupportedError(
            "FSDP1's LOCAL_STATE_DICT (flat parameters) is not supported",
            where=f"tensor `{name}`",
            why="a vector contains many parameters, and only the model knows their names and "
            "shapes",
            hint="load it into the model and save a SHARDED_STATE_DICT or a FULL_STATE_DICT",
        )


def _read_sharded_tensor(args: object, state: object) -> Sharded:
    """Return what one rank holds of a ShardedTensor."""
    whole = wrapped(args)
    if not isinstance(state, tuple) or not isinstance(state[0], list):
        raise TypeError("the state is not that of a ShardedTensor")
    shape = integers(attributes(state[1])["size"])
    if shape != whole.shape:
        raise UnsupportedError(
            "a ShardedTensor has two different shapes", why=f"{list(whole.shape)} and {list(shape)}"
        )
    group = attributes(state[2])
    rank, world = integers((group["global_rank"], group["global_world_size"]))
    if world > MAX_WORLD:
        raise UnsupportedError("the world size is too large", why=f"{counted(world, 'rank')}")
    pieces = tuple(_piece(attributes(shard), whole.dtype) for shard in state[0])
    others = partial(_held_by, attributes(state[1])["shards_metadata"])
    return Sharded(whole.dtype, shape, pieces, whole.requires_grad, rank, _world(world), others)


def _held_by(shards: object, rank: int) -> tuple[Box, ...]:
    """Return the boxes of another rank; every rank's file lists those of all."""
    if not isinstance(shards, list):
        return ()
    found = (attributes(shard) for shard in shards)
    return tuple(_box(one) for one in found if attributes(one["placement"])["_rank"] == rank)


def _box(place: Mapping[str, object]) -> Box:
    return Box(integers(place["shard_offsets"]), integers(place["shard_sizes"]))


def _piece(shard: Mapping[str, object], dtype: str) -> LocalShard:
    stored, box = shard["tensor"], _box(attributes(shard["metadata"]))
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


TABLE: Table = {
    **TORCH_TABLE,
    **{
        (module, name): Global(module, name)
        for classes in _NAMED
        for module, names in classes.items()
        for name in names
    },
}


def read_rank_file(files: SourceFiles, name: str) -> Iterator[tuple[Path, RankLeaf]]:
    """Yield the leaves of one rank's file with their paths."""
    archive = read_archive(files, name, table=TABLE, unknown="inert")
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
    """Whether *node* is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, ...)``."""
    if not isinstance(node, Inert) or node.name != "_rebuild_from_type_v2":
        return False
    return len(node.args) == 4 and node.args[0] == _WRAPPED


def _sharded(node: object, key: str, where: str, meshes: Meshes) -> Sharded:
    assert isinstance(node, Inert)
    _refuse_flat(key)
    _, kind, args, state = node.args
    where = f"{where}, tensor `{key}`"
    try:
        with malformed(f"`{key}` is not a valid sharded tensor", where):
            if isinstance(kind, Global) and kind.name == "DTensor":
                return read_dtensor(args, state, meshes)
            if isinstance(kind, Global) and kind.name == "ShardedTensor":
                return _read_sharded_tensor(args, state)
            raise TypeError(f"`{kind}` is not a sharded tensor class")
    except CkptError as error:
        error.where = where
        raise
