"""Shards of one rank's state dict, with their memory and descriptions for other ranks."""

from __future__ import annotations

import hashlib
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from ckptctl.catalog import compute_row_major_strides, parse_memory_key
from ckptctl.distributed.devices import synchronize_devices
from ckptctl.distributed.saving.device_memory import DeviceMemory, DeviceReader, is_on_host
from ckptctl.distributed.state import (
    FlatState,
    RankTensor,
    StateDict,
    flatten_state,
    to_memoryview,
    view_as_bytes,
)
from ckptctl.distributed.values import pickle_values, serialize_value
from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.plan import Plan
from ckptctl.save_load.saving.local_shards import (
    DIGEST_BYTES,
    LocalChunk,
    LocalShards,
    PackedShards,
    pack_shards,
)
from ckptctl.storage.byte_files import Memory
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.execution_options import ExecutionOptions

BLOCK_BYTES = 16 * MIB
"""Number of bytes of a tensor that are copied at a time."""
SMALL_TENSOR_BYTES = 64 << 10
DENSE_FORMAT = torch.contiguous_format


@dataclass(frozen=True)
class LocalState:
    """State of one rank, prepared for a save."""

    shards: LocalShards
    pieces: Sequence[torch.Tensor]
    strides: Sequence[tuple[int, ...]]  # strides of the pieces, in elements
    # Content, as written by ``torch.save``, of each non-tensor value and of each small tensor that
    # may differ between ranks.
    values: Mapping[str, bytes]
    # Indices of the shards that other ranks may have too. Small tensors are omitted, because their
    # digests are included in the digests of the values.
    replicas: Sequence[int] = ()
    complete: bool = True  # whether *pieces* has all shards, not only those that are written

    @cached_property
    def packed_shards(self) -> PackedShards:
        """Compact description of the shards, as sent to other ranks."""
        return pack_shards(self.shards)


def compute_replica_digests(state: LocalState, jobs: int) -> dict[int, int]:
    """Compute the CRC-32 of each shard that other ranks may also have, by shard index."""

    def compute_crc(index: int) -> int:
        crc = 0
        for block in iterate_row_major_blocks(state.pieces[index]):
            crc = crc32(block, crc)
        return crc

    if not state.complete or not state.replicas:
        return {}
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return dict(zip(state.replicas, pool.map(compute_crc, state.replicas), strict=True))


def build_local_state(
    state: StateDict | FlatState | LocalState, *, trusted: bool = False
) -> LocalState:
    """Prepare the state of this rank for a save, without copying tensors.

    Raises:
        RefusedError: A value or a tensor cannot be saved.
    """
    if isinstance(state, LocalState):
        return state
    if not isinstance(state, FlatState):
        state = flatten_state(state)
    pieces = [shard.tensor.resolve_conj().resolve_neg() for shard in state.shards]
    synchronize_devices(pieces)
    leaves = {name: leaf.value for name, leaf in state.values.items()}
    values = pickle_values(leaves, trusted=trusted)
    small = SmallTensors(state.tensors)
    chunks = [LocalChunk(entry.name, entry.box.offsets, entry.box.sizes) for entry in state.shards]
    shards = LocalShards(
        state.meta,
        chunks,
        {name: _hash_content(content) for name, content in values.items()} | small.digests,
        state.paths | {name: state.tensors[name].meta.path for name in small},
    )
    steps = [get_save_strides(tensor) for tensor in pieces]
    shared = {name for name, entry in state.tensors.items() if entry.may_be_replica} - set(small)
    replicas = [index for index, chunk in enumerate(chunks) if chunk.name in shared]
    contents = ChainMap(dict(values), small)  # type: ignore[arg-type]
    return LocalState(shards, pieces, steps, contents, replicas)


def get_save_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in elements that a save plan must use for *tensor*."""
    return (
        tuple(tensor.stride())
        if is_on_host(tensor)
        else compute_row_major_strides(tuple(tensor.shape))
    )


def _hash_content(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class SmallTensors(Mapping[str, bytes]):
    """Mapping from names of small regular tensors to their contents, serialized on first use.

    RNG states, data-loader positions or layer statistics may differ between ranks, and only a
    comparison of their bytes shows whether they do. Small tensors are therefore compared like
    non-tensor values. If a tensor differs, the version of every rank is saved.
    """

    def __init__(self, tensors: Mapping[str, RankTensor]) -> None:
        self._copies = dict(_copy_small_tensors(tensors))
        self.digests = {
            name: _hash_content(to_memoryview(copy)) for name, copy in self._copies.items()
        }

    def __getitem__(self, name: str) -> bytes:
        return serialize_value(self._copies[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)


def _copy_small_tensors(tensors: Mapping[str, RankTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield host copies of small regular tensors, with one transfer per device and dtype."""
    small = [
        (name, local_tensor.shards[0].tensor)
        for name, local_tensor in tensors.items()
        if local_tensor.is_regular
        and 0 < local_tensor.shards[0].tensor.nbytes <= SMALL_TENSOR_BYTES
    ]
    small.sort(key=lambda pair: (str(pair[1].device), str(pair[1].dtype)))
    for device, group in groupby(small, key=lambda pair: (pair[1].device, pair[1].dtype)):
        named_tensors = [
            (n, t.as_subclass(torch.Tensor).resolve_conj().resolve_neg()) for n, t in group
        ]
        if device[0].type == "cpu":
            yield from (
                (name, tensor.clone(memory_format=DENSE_FORMAT)) for name, tensor in named_tensors
            )
            continue
        flat = torch.cat([view_as_bytes(tensor.contiguous()) for _, tensor in named_tensors]).cpu()
        parts = torch.split(flat, [tensor.nbytes for _, tensor in named_tensors])
        for (name, tensor), part in zip(named_tensors, parts, strict=True):
            yield name, part.view(tensor.dtype).reshape(tensor.shape).clone()


def select_read_tensors(plan: Plan, pieces: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Select the tensors that a save plan reads, by the names that the plan uses for them."""
    names = {file for copy in plan.transfers for file in copy.list_files()}
    return {name: pieces[int(parse_memory_key(name))] for name in names}


def map_names_to_memory(
    plan: Plan, pieces: Sequence[torch.Tensor], execution_options: ExecutionOptions
) -> dict[str, Memory]:
    """Map the names that a save plan uses for tensors to the memory of these tensors.

    The tensors must outlive the result.
    """
    reader = DeviceReader(execution_options.compute_tile_limits().max_tile_bytes)
    return {
        name: to_memoryview(tensor) if is_on_host(tensor) else DeviceMemory(tensor, reader)
        for name, tensor in select_read_tensors(plan, pieces).items()
    }


def split_into_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split *tensor* into views of consecutive row-major elements of limited size."""
    if tensor.nbytes <= BLOCK_BYTES or tensor.ndim == 0:
        yield tensor
        return
    rows = BLOCK_BYTES // (math.prod(tensor.shape[1:]) * tensor.element_size())
    for start in range(0, tensor.shape[0], max(rows, 1)):
        part = tensor[start : start + max(rows, 1)]
        yield from split_into_blocks(part if rows else part[0])


def iterate_row_major_blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the row-major elements of *tensor* in blocks of host memory."""
    for block in split_into_blocks(tensor):
        host_block = block.to("cpu").contiguous()
        yield to_memoryview(host_block)
