"""ShardedTensors, FSDP1's sharded state dict, as ``torch.save`` leaves them; nothing is built.

Source: ``torch/distributed/_shard/sharded_tensor/api.py`` (``ShardedTensor.__getstate__``) and
``metadata.py``. torch itself needs a process group to read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial

from ckptctl.catalog import Box
from ckptctl.errors import UnsupportedError
from ckptctl.formats.shared.dtensor import Piece, Sharded, wrapped
from ckptctl.formats.shared.inert_fields import attributes, integers
from ckptctl.storage.pickles.reader import Builder, Global
from ckptctl.storage.zips.reader import StoredTensor

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


def refuse_flat(name: str) -> None:
    """Refuse the flat parameters of FSDP1's ``LOCAL_STATE_DICT``.

    Raises:
        UnsupportedError: *name* is one.
    """
    if _FLAT.fullmatch(name.rpartition(".")[2]):
        raise UnsupportedError(
            "this is a LOCAL_STATE_DICT of FSDP1: flat parameters",
            where=f"tensor `{name}`",
            why="many parameters lie in one vector; which, and of what shape, only the model knows",
            hint="load it into the model and save a SHARDED_STATE_DICT or a FULL_STATE_DICT",
        )


def read_sharded_tensor(args: object, state: object) -> Sharded:
    """Return what one rank holds of a ShardedTensor.

    Args:
        args: Arguments of ``_rebuild_wrapper_subclass``.
        state: ``(local shards, metadata, process group, sharding spec, ...)``.

    Raises:
        UnsupportedError: A shard contradicts its metadata.
        TypeError, KeyError, ValueError, IndexError: It is no ShardedTensor.
    """
    whole = wrapped(args)
    if not isinstance(state, tuple) or not isinstance(state[0], list):
        raise TypeError("its state is not that of a ShardedTensor")
    shape = integers(attributes(state[1])["size"])
    if shape != whole.shape:
        raise UnsupportedError(
            "a ShardedTensor has two shapes", why=f"{list(whole.shape)} and {list(shape)}"
        )
    group = attributes(state[2])
    rank, world = integers((group["global_rank"], group["global_world_size"]))
    if world > MAX_WORLD:
        raise UnsupportedError("a world is too large", why=f"{world:,} ranks")
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


def _piece(shard: Mapping[str, object], dtype: str) -> Piece:
    stored, box = shard["tensor"], _box(attributes(shard["metadata"]))
    if not isinstance(stored, StoredTensor):
        raise TypeError("a shard is not a plain tensor")
    if (stored.dtype, stored.shape) != (dtype, box.sizes):
        raise UnsupportedError(
            "a shard is not what its metadata says",
            why=f"{stored.dtype} {list(stored.shape)}, not {dtype} {list(box.sizes)}",
        )
    return Piece(box, stored, (0,) * len(box.sizes))


@lru_cache(maxsize=8)
def _world(size: int) -> frozenset[int]:
    return frozenset(range(size))


def _nested(owner: object, name: object) -> Global:
    """Stand for ``getattr(ShardedTensor, "ProcessGroupState")``, which old protocols write."""
    if owner != Global(API, "ShardedTensor") or name != "ProcessGroupState":
        raise UnsupportedError("malformed pickle", why="it asks for an attribute of something")
    return Global(API, f"ShardedTensor.{name}")


GETATTR = Builder(_nested, source=Global("builtins", "getattr"))
