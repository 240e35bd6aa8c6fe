"""Allocation of tensors that replace meta tensors, or all tensors with ``assign=True``.

New tensors are filled before they replace any tensor of the state, so a failed load replaces none.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from ckptctl.catalog import compute_row_major_strides
from ckptctl.distributed.compat import ShardedTensor
from ckptctl.distributed.loading.request import LoadRequest, RequestedLeaves
from ckptctl.distributed.loading.state_options import LoadCallOptions
from ckptctl.distributed.state import (
    FlatState,
    build_rank_tensor,
    copy_placement,
    get_address,
    has_placement,
    read_placement,
)
from ckptctl.save_load.loading.state_mapping import StateMapping


def with_new_tensors(
    request: LoadRequest, mapping: StateMapping, options: LoadCallOptions
) -> LoadRequest:
    """Return a copy of *request* in which new tensors replace the tensors to be replaced.

    Tensors that share memory, or a storage on the meta device, are replaced by one shared tensor.
    Tensors that are missing from the checkpoint stay as they are.
    """
    dtypes = _find_dtypes(mapping)
    groups: dict[object, list[str]] = {}
    for name in request.new_tensor_devices:
        groups.setdefault(_get_memory_identity(request.state.tensors[name].leaf), []).append(name)
    new_tensors: dict[str, torch.Tensor] = {}
    for names in groups.values():
        dtype = next((dtypes[name] for name in names if name in dtypes), None)
        if dtype is not None:
            first = request.state.tensors[names[0]]
            kind = getattr(torch, dtype if options.assign else first.meta.dtype)
            new_tensors |= dict.fromkeys(
                names, _allocate_like(first.leaf, kind, request.new_tensor_devices[names[0]])
            )
    tensors = dict(request.state.tensors)
    for name, leaf in new_tensors.items():
        tensors[name] = build_rank_tensor(name, leaf, tensors[name].meta.path)
    state = FlatState(tensors, request.state.values)
    part = RequestedLeaves(state.meta, request.requested_leaves.values)
    return replace(
        request,
        state=state,
        shards=state.shards,
        requested_leaves=part,
        allocated_tensors=new_tensors,
    )


def find_missing_tied_names(state: FlatState, offered: Container[str]) -> set[str]:
    """Find tensors of *state* that are not in *offered* but share memory with one that is."""
    memory = {name: _get_memory_identity(tensor.leaf) for name, tensor in state.tensors.items()}
    filled = {place for name, place in memory.items() if name in offered}
    return {name for name, place in memory.items() if name not in offered and place in filled}


def _find_dtypes(mapping: StateMapping) -> dict[str, str]:
    """Map the names of tensors in the state to the dtypes of these tensors in the checkpoint."""
    entries = mapping.catalog.tensors
    return {
        name: entries[composed.sources[0].key].dtype for name, composed in mapping.tensors.items()
    }


def _get_memory_identity(leaf: torch.Tensor | ShardedTensor) -> object:
    """Return a key that is equal for tensors with the same memory, dtype, shape and strides."""
    if isinstance(leaf, ShardedTensor):
        return id(leaf)
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    part = read_placement("", leaf) if has_placement(leaf) else leaf.shape
    kind = (local.device, local.dtype, local.shape, local.stride(), part)
    return (get_address(local) if local.numel() or local.is_meta else id(leaf), *kind)


def _allocate_like(leaf: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialized contiguous tensor with the type and sharding of *leaf*."""
    assert isinstance(leaf, torch.Tensor)
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    tensor = torch.empty(local.shape, dtype=dtype, device=device)
    if isinstance(leaf, DTensor):
        tensor = DTensor.from_local(
            tensor,
            leaf.device_mesh,
            leaf.placements,
            run_check=False,
            shape=leaf.shape,
            stride=compute_row_major_strides(tuple(leaf.shape)),
        )
    if isinstance(leaf, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=leaf.requires_grad)
    else:
        tensor = tensor.requires_grad_(leaf.requires_grad)
    if has_placement(leaf):
        copy_placement(leaf, tensor)
    return tensor
