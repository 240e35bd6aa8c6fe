"""The request of one rank to load, and the agreement of all ranks on theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.compat import ShardedTensor
from ckptctl.distributed.loading.overlaps import find_overlaps
from ckptctl.distributed.loading.owners import Owners, Target
from ckptctl.distributed.loading.state_options import LoadCall
from ckptctl.distributed.loading.target_memory import find_same_memory, steps_of
from ckptctl.distributed.state import HeldShard, State, state_of
from ckptctl.errors import MappingError, RefusedError
from ckptctl.formats.dcp_rank_local import DcpRankLocalFormat, read_rank
from ckptctl.ranks.coordinator import Coordinator
from ckptctl.save_load.loading.identity import Fingerprint, identity, require_same_checkpoint
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.rank_agreement import RankStatement, require_agreement
from ckptctl.save_load.saving.local_shards import TensorMeta, digest
from ckptctl.tree import TreePath

VERSION = 1
"""Version of the contents of a plan's key."""
HOW = ("strict", "cast", "allow_overflow", "trusted", "checksum", "jobs")
"""Options of a load that do not affect how the checkpoint is interpreted."""


@dataclass(frozen=True, slots=True)
class WantedLeaves:
    """Tensors and values that ranks require of a checkpoint."""

    tensors: Mapping[str, TensorMeta]
    values: Mapping[str, Keys]

    @property
    def digest(self) -> bytes:
        """Digest of all names, dtypes, shapes and paths."""
        leaves = [(n, one.dtype, one.shape, one.path) for n, one in self.tensors.items()]
        return digest((leaves, list(self.values.items())))


def wanted_by_all(own: WantedLeaves, ranks: Coordinator) -> WantedLeaves:
    """Merge the required leaves of all ranks.

    Raises:
        MappingError: Ranks disagree on a dtype or a shape.
    """
    tensors: dict[str, TensorMeta] = {}
    values: dict[str, Keys] = {}
    for rank, one in enumerate(ranks.all_gather(own)):
        for name, leaf in one.tensors.items():
            known = tensors.setdefault(name, leaf)
            if (known.dtype, known.shape) != (leaf.dtype, leaf.shape):
                raise MappingError(
                    f"ranks disagree on `{name}`",
                    where=f"rank {rank}",
                    why=f"{leaf.dtype} {list(leaf.shape)} on this rank, but {known.dtype} "
                    f"{list(known.shape)} on a lower rank",
                )
        values |= one.values
    return WantedLeaves(tensors, values)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Request of one rank."""

    source: TreePath
    owners: Owners
    plain: dict[str, Any]  # state dict, with objects replaced by their state dicts
    state: State
    places: list[HeldShard]
    same: list[int]  # index of the first place with the same memory, per place
    meeting: dict[int, int]  # places that partly overlap, by index
    new: Mapping[str, torch.device]  # devices of new tensors
    part: WantedLeaves  # required leaves, as sent to other ranks
    # Digest of everything on which a plan depends except the checkpoint, or None if unknown.
    structure: bytes | None
    key: bytes | None  # digest of everything on which a plan depends, or None if unknown
    made: Mapping[str, torch.Tensor] = field(default_factory=dict)  # new tensors


class RankView(NamedTuple):
    """Request as sent to the other ranks."""

    statement: RankStatement
    host: str
    objects: bool  # whether the state contains stateful objects
    new: bool  # whether new tensors are allocated
    # Identity of the checkpoint, or None if it cannot be read or the rank loads without others.
    fingerprint: Fingerprint | None


def request(target: Target, path: str | TreePath, how: LoadCall, here: object) -> LoadRequest:
    """Build the request of this rank."""
    owners = Owners.of(target)
    plain = owners.plain()
    state = state_of(plain, on_meta=True)
    new = _new(owners, state, how)
    places = state.shards
    same, source = find_same_memory(places, new), formats.to_existing_path(path)
    meeting = find_overlaps(places, same, new)
    structure = key = None
    beside = [file for file in (how.assets, how.rules, how.converter) if file is not None]
    extra = identity(beside) if beside else b""
    rename = how.rename
    if extra is not None and (rename is None or isinstance(rename, Mapping)):
        boxes = [
            (one.name, one.box.offsets, one.box.sizes, steps_of(one.tensor), one.tensor.device.type)
            for one in places
        ]
        made = [(name, str(device)) for name, device in new.items()]
        own = digest((state.meta, boxes, state.paths, made, sorted((rename or {}).items())))
        memory = (same, sorted(meeting.items()))
        structure = digest((VERSION, here, how.shared(), extra, memory, own))
        files = identity([source])
        key = None if files is None else digest((structure, files))
    part = WantedLeaves(state.meta, state.paths)
    return LoadRequest(
        source, owners, plain, state, places, same, meeting, new, part, structure, key
    )


def _new(owners: Owners, state: State, how: LoadCall) -> dict[str, torch.device]:
    """Find the tensors that are replaced by new ones, and the devices of these."""
    leaves = {name: one.leaf for name, one in state.tensors.items()}
    meshes = {leaf.device_mesh.device_type for leaf in leaves.values() if isinstance(leaf, DTensor)}
    elsewhere = meshes.pop() if len(meshes) == 1 else "cpu"
    new: dict[str, torch.device] = {}
    for name, leaf in leaves.items():
        owner = owners.owner(state.tensors[name].meta.path)
        takes = owner is None or isinstance(owner, torch.nn.Module)
        if isinstance(leaf, ShardedTensor) or not (leaf.is_meta or (how.assign and takes)):
            continue
        if not takes:
            raise RefusedError(
                f"`{name}` is on the meta device, but its owner is not a module",
                why=f"a {type(owner).__name__} accepts elements, not new tensors",
                hint="pass the module itself in the state, or its state dict",
            )
        here = leaf.device_mesh.device_type if isinstance(leaf, DTensor) else elsewhere
        new[name] = torch.device(how.device or (here if leaf.is_meta else leaf.device))
    return new


def agree(
    ranks: Coordinator, how: LoadCall, own: RankView, error: BaseException | None
) -> list[RankView]:
    """Exchange requests, and raise on all ranks if any failed or they disagree.

    Args:
        ranks: Ranks of the load.
        how: Options of the load.
        own: Request of this rank.
        error: Failure of this rank, if any.
    """
    said = ranks.all_gather(own)
    if error is not None:
        raise error
    statements = [one.statement for one in said]
    alike = all(one.how == statements[0].how for one in statements)
    if not alike and not any(one.problem for one in statements):
        statements = ranks.all_gather(own.statement._replace(how=how.shared()))
    require_agreement(statements, ranks.rank, "checkpoints")
    seen = [one.fingerprint for one in said if one.fingerprint]
    require_same_checkpoint(seen, own.statement.target)
    return said


def require_same_names(ranks: Coordinator, catalog: Catalog) -> None:
    """Raise if ranks rename the keys of the checkpoint differently."""
    said = ranks.all_gather(digest([*catalog.tensors, *catalog.blobs]))
    other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
    if other is not None:
        raise MappingError(
            "the ranks rename keys differently",
            where=catalog.path,
            why=f"`rename` maps to other keys on rank {other} than on rank 0",
            hint="pass the same `rename` on every rank",
        )


def own_part(path: TreePath, rank: int, state: State, options: LoadOptions) -> Catalog | None:
    """Read the part that *rank* saved at *path*, or return None if *state* requires more."""
    about_it = (field for field in fields(LoadOptions) if field.name not in HOW)
    if any(getattr(options, one.name) != one.default for one in about_it):
        return None
    if formats.detect_format(path).name != DcpRankLocalFormat.name:
        return None
    catalog = read_rank(path, rank)
    if catalog is None or not all(name in catalog.blobs for name in state.values):
        return None
    for name, tensor in state.tensors.items():
        entry = catalog.tensors.get(name)
        boxes = {extent.box for extent in entry.extents} if entry else set()
        if entry is None or not all(shard.box in boxes for shard in tensor.shards):
            return None
    return catalog
