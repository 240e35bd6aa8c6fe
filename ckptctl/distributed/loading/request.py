"""Load requests of ranks, and the checks that all ranks request the same load."""

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
from ckptctl.distributed.loading.owners import LoadTarget, StateOwners
from ckptctl.distributed.loading.state_options import LoadCallOptions
from ckptctl.distributed.loading.target_memory import find_first_with_same_memory, get_load_strides
from ckptctl.distributed.state import FlatState, TensorShard, flatten_state
from ckptctl.errors import MappingError, RefusedError
from ckptctl.formats.dcp_rank_local import DcpRankLocalFormat, read_rank_catalog
from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.save_load.loading.identity import (
    Fingerprint,
    compute_identity,
    require_same_checkpoint,
)
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.rank_agreement import RankStatement, require_agreement
from ckptctl.save_load.saving.local_shards import TensorMeta, compute_digest
from ckptctl.tree import TreePath

KEY_VERSION = 1
"""Version number of the data from which cache keys of plans are computed."""
NON_SOURCE_OPTIONS = ("strict", "cast", "allow_overflow", "trusted", "checksum", "jobs")
"""Names of load options that do not affect how the checkpoint is interpreted."""


@dataclass(frozen=True, slots=True)
class RequestedLeaves:
    """Tensors and non-tensor values that a rank, or all ranks, require from a checkpoint."""

    tensors: Mapping[str, TensorMeta]
    values: Mapping[str, Keys]

    @property
    def digest(self) -> bytes:
        """Digest of the names, dtypes, shapes and paths of all required tensors and values."""
        leaves = [(name, meta.dtype, meta.shape, meta.path) for name, meta in self.tensors.items()]
        return compute_digest((leaves, list(self.values.items())))


def merge_requested_leaves(local: RequestedLeaves, ranks: RankCollectives) -> RequestedLeaves:
    """Merge the tensors and values that each rank requires.

    Raises:
        MappingError: Ranks disagree on a dtype or a shape.
    """
    tensors: dict[str, TensorMeta] = {}
    values: dict[str, Keys] = {}
    for rank, leaves in enumerate(ranks.all_gather(local)):
        for name, leaf in leaves.tensors.items():
            existing = tensors.setdefault(name, leaf)
            if (existing.dtype, existing.shape) != (leaf.dtype, leaf.shape):
                raise MappingError(
                    f"ranks disagree on `{name}`",
                    where=f"rank {rank}",
                    why=f"{leaf.dtype} {list(leaf.shape)} on this rank, but {existing.dtype} "
                    f"{list(existing.shape)} on a lower rank",
                )
        values |= leaves.values
    return RequestedLeaves(tensors, values)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """State and source of one rank's load, prepared for planning."""

    source: TreePath
    owners: StateOwners
    state_dict: dict[str, Any]  # state dict, with objects replaced by their state dicts
    state: FlatState
    shards: list[TensorShard]
    first_indices: list[int]  # index of the first shard with the same memory, per shard
    overlaps: dict[int, int]  # index of an overlapping shard, by index of the shard
    new_tensor_devices: Mapping[str, torch.device]  # devices of the tensors to allocate, by name
    requested_leaves: RequestedLeaves  # required leaves, as sent to other ranks
    # Digest of everything on which a plan depends except the checkpoint, or None if unknown.
    structure: bytes | None
    key: bytes | None  # digest of everything on which a plan depends, or None if unknown
    allocated_tensors: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # allocated tensors, by name


class RankRequest(NamedTuple):
    """Description of a rank's load request that is sent to the other ranks."""

    statement: RankStatement
    host: str
    has_objects: bool  # whether the state contains stateful objects
    has_new_tensors: bool  # whether new tensors are allocated
    # Identity of the checkpoint, or None if it cannot be read or the rank loads without others.
    fingerprint: Fingerprint | None


def build_request(
    target: LoadTarget, path: str | TreePath, options: LoadCallOptions, context: object
) -> LoadRequest:
    """Build this rank's request to load the checkpoint at *path* into *target*."""
    owners = StateOwners.from_target(target)
    expanded = owners.build_state_dict()
    state = flatten_state(expanded, on_meta=True)
    new = _find_new_tensors(owners, state, options)
    places = state.shards
    first_indices, source = find_first_with_same_memory(places, new), formats.to_existing_path(path)
    overlaps = find_overlaps(places, first_indices, new)
    structure = key = None
    config_files = [
        file for file in (options.assets, options.rules, options.converter) if file is not None
    ]
    extra = compute_identity(config_files) if config_files else b""
    rename = options.rename
    if extra is not None and (rename is None or isinstance(rename, Mapping)):
        boxes = [
            (
                shard.name,
                shard.box.offsets,
                shard.box.sizes,
                get_load_strides(shard.tensor),
                shard.tensor.device.type,
            )
            for shard in places
        ]
        new_devices = [(name, str(device)) for name, device in new.items()]
        state_digest = compute_digest(
            (state.meta, boxes, state.paths, new_devices, sorted((rename or {}).items()))
        )
        memory = (first_indices, sorted(overlaps.items()))
        structure = compute_digest(
            (KEY_VERSION, context, options.collect_shared_options(), extra, memory, state_digest)
        )
        files = compute_identity([source])
        key = None if files is None else compute_digest((structure, files))
    part = RequestedLeaves(state.meta, state.paths)
    return LoadRequest(
        source, owners, expanded, state, places, first_indices, overlaps, new, part, structure, key
    )


def _find_new_tensors(
    owners: StateOwners, state: FlatState, options: LoadCallOptions
) -> dict[str, torch.device]:
    """Find the tensors to replace, and map their names to the devices of the new tensors."""
    leaves = {name: tensor.leaf for name, tensor in state.tensors.items()}
    meshes = {leaf.device_mesh.device_type for leaf in leaves.values() if isinstance(leaf, DTensor)}
    default_device = meshes.pop() if len(meshes) == 1 else "cpu"
    new: dict[str, torch.device] = {}
    for name, leaf in leaves.items():
        owner = owners.find_owner(state.tensors[name].meta.path)
        is_assignable = owner is None or isinstance(owner, torch.nn.Module)
        if isinstance(leaf, ShardedTensor) or not (
            leaf.is_meta or (options.assign and is_assignable)
        ):
            continue
        if not is_assignable:
            raise RefusedError(
                f"`{name}` is on the meta device, but its owner is not a module",
                why=f"a {type(owner).__name__} accepts elements, not new tensors",
                hint="pass the module itself in the state, or its state dict",
            )
        mesh_device = leaf.device_mesh.device_type if isinstance(leaf, DTensor) else default_device
        new[name] = torch.device(options.device or (mesh_device if leaf.is_meta else leaf.device))
    return new


def agree_on_load(
    ranks: RankCollectives,
    options: LoadCallOptions,
    own_request: RankRequest,
    error: BaseException | None,
) -> list[RankRequest]:
    """Exchange load requests, and raise on all ranks if one failed or the requests differ.

    Args:
        ranks: Ranks of the load.
        options: Options of the load.
        own_request: Request of this rank.
        error: Failure of this rank, if any.
    """
    rank_requests = ranks.all_gather(own_request)
    if error is not None:
        raise error
    statements = [entry.statement for entry in rank_requests]
    is_same = all(entry.options == statements[0].options for entry in statements)
    if not is_same and not any(entry.problem for entry in statements):
        statements = ranks.all_gather(
            own_request.statement._replace(options=options.collect_shared_options())
        )
    require_agreement(statements, ranks.rank, "checkpoints")
    fingerprints = [entry.fingerprint for entry in rank_requests if entry.fingerprint]
    require_same_checkpoint(fingerprints, own_request.statement.target)
    return rank_requests


def require_same_renamed_keys(ranks: RankCollectives, catalog: Catalog) -> None:
    """Raise if ``rename`` produces different keys of the checkpoint on different ranks."""
    digests = ranks.all_gather(compute_digest([*catalog.tensors, *catalog.blobs]))
    differing_rank = next(
        (rank for rank, names_digest in enumerate(digests) if names_digest != digests[0]), None
    )
    if differing_rank is not None:
        raise MappingError(
            "the ranks rename keys differently",
            where=catalog.path,
            why=f"`rename` maps to other keys on rank {differing_rank} than on rank 0",
            hint="pass the same `rename` on every rank",
        )


def open_rank_local_part(
    path: TreePath, rank: int, state: FlatState, options: LoadOptions
) -> Catalog | None:
    """Read the catalog of the data that *rank* saved at *path*.

    Return None if *path* is no rank-local save, if *state* needs data of other ranks, or if an
    option changes how the checkpoint is interpreted.
    """
    source_options = (
        field for field in fields(LoadOptions) if field.name not in NON_SOURCE_OPTIONS
    )
    if any(getattr(options, option.name) != option.default for option in source_options):
        return None
    if formats.detect_format(path).name != DcpRankLocalFormat.name:
        return None
    catalog = read_rank_catalog(path, rank)
    if catalog is None or not all(name in catalog.blobs for name in state.values):
        return None
    for name, tensor in state.tensors.items():
        entry = catalog.tensors.get(name)
        boxes = {extent.box for extent in entry.extents} if entry else set()
        if entry is None or not all(shard.box in boxes for shard in tensor.shards):
            return None
    return catalog
