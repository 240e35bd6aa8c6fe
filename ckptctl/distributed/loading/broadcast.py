"""Broadcasting of tensor boxes that several ranks need and only one of these ranks reads.

Ranks with the same box of a tensor (data-parallel replicas, norms under tensor parallelism) form a
group. One rank of the group, the reader, reads the box. Readers are chosen such that all ranks read
about the same number of bytes, and large boxes are split for this. Boxes are sent from device to
device if the process group has a backend for this (NCCL), otherwise through host memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from ckptctl.catalog import Box, Catalog
from ckptctl.distributed.group import TorchGroup, translate_group_errors
from ckptctl.distributed.state import TensorShard, view_as_bytes
from ckptctl.errors import CkptError
from ckptctl.planner.balance import assign_chunks, compute_piece_limit, split_box
from ckptctl.ranks.coordinator import RankCollectives, gather_and_scatter
from ckptctl.storage.files import source_files

SLOW_BYTES_PER_SECOND = 1 << 30
SAMPLE_BYTES = 1 << 20
SAMPLE_COUNT = 4
BUCKET_BYTES = 16 << 20
BoxRequest = tuple[str, Box, int, str | None]
"""Tensor name, box, size of the box in bytes, and device type of the memory to send it from.

The device type is None if the box cannot be sent to other ranks.
"""


class SharedRead(NamedTuple):
    """Box that the ranks *holders* all need, and that only the rank *reader* reads."""

    holders: tuple[int, ...]
    reader: int
    shard_index: int  # index of this rank's shard that contains the box
    box: Box
    route: str  # device type of the memory from which the box is sent


def should_broadcast(hosts: Sequence[str], speeds: Sequence[float]) -> bool:
    """Return whether only one rank should read each shared box and broadcast it.

    This is faster if the ranks run on several machines, or if any rank reads less than 1 GiB/s.
    Otherwise, the page cache already avoids reading the same bytes from the disk several times.
    """
    return len(set(hosts)) > 1 or min(speeds) < SLOW_BYTES_PER_SECOND


def measure_read_speed(catalog: Catalog) -> float:
    """Measure how many bytes per second short reads from the largest file achieve.

    The result is the fastest of several reads at distant offsets, because a busy host can slow down
    any of them. Small files count as infinitely fast, and URLs as 0, because each byte should be
    downloaded only once.
    """
    with source_files(catalog.root) as files:
        if not files.local:
            return 0.0
        name = max(catalog.files, key=lambda candidate: catalog.files[candidate], default=None)
        if name is None or catalog.files[name] < SAMPLE_COUNT * SAMPLE_BYTES:
            return math.inf
        step = catalog.files[name] // SAMPLE_COUNT
        try:
            with os.fdopen(files.open_descriptor(name), "rb", buffering=0) as file:
                speeds: list[float] = []
                for number in range(SAMPLE_COUNT):
                    start = time.perf_counter()
                    count = len(os.pread(file.fileno(), SAMPLE_BYTES, number * step))
                    speeds.append(count / max(time.perf_counter() - start, 1e-9))
                return max(speeds)
        except (OSError, CkptError):
            return math.inf


def assign_readers(
    shards: Sequence[TensorShard], ranks: RankCollectives, rank_local_names: Collection[str] = ()
) -> list[SharedRead]:
    """Choose a reader for each box that several ranks need."""
    routes_by_device = get_transfer_devices(ranks)
    requests = [
        (
            shard.name,
            shard.box,
            shard.tensor.nbytes,
            None
            if shard.name in rank_local_names
            else routes_by_device.get(shard.tensor.device.type),
        )
        for shard in shards
    ]
    return gather_and_scatter(ranks, lambda: requests, _plan_shared_reads)


def get_transfer_devices(ranks: RankCollectives) -> dict[str, str]:
    """Map the device type of a tensor to the device type of the memory to send it from.

    A tensor is sent from its own device type, or from ``cpu`` with gloo, which cannot send GPU
    tensors to single ranks.
    """
    if not isinstance(ranks, TorchGroup):
        return {}
    config = str(dist.get_backend_config(ranks.group))
    pairs = (pair.partition(":") for pair in config.split(","))
    return {kind: "cpu" if backend == "gloo" else kind for kind, _, backend in pairs}


def select_shards_to_read(
    shards: Sequence[TensorShard], shared: Sequence[SharedRead], rank: int
) -> list[TensorShard]:
    """Select the shards that only *rank* needs, and the shared boxes that *rank* reads."""
    shared_indices = {item.shard_index for item in shared}
    reads = [shard for index, shard in enumerate(shards) if index not in shared_indices]
    return reads + [
        shards[item.shard_index].select_box(item.box) for item in shared if item.reader == rank
    ]


def _plan_shared_reads(requests: Sequence[Sequence[BoxRequest]]) -> list[list[SharedRead]]:
    """Assign a reader to each box that several ranks request.

    Returns:
        For each rank, the shared boxes that it needs.
    """
    holders: dict[tuple[str, Box, str], list[tuple[int, int]]] = {}
    load = [0] * len(requests)
    size: dict[tuple[str, Box, str], int] = {}
    for rank, rank_requests in enumerate(requests):
        for index, (name, box, nbytes, route) in enumerate(rank_requests):
            if route and nbytes:
                holders.setdefault((name, box, route), []).append((rank, index))
                size[name, box, route] = nbytes
            else:
                load[rank] += nbytes
    for key, members in holders.items():
        if len(members) == 1:
            load[members[0][0]] += size[key]
    shared_boxes = {key: members for key, members in holders.items() if len(members) > 1}
    limit = compute_piece_limit(sum(size[key] for key in shared_boxes), len(requests))
    pieces = [
        (box, size[key] * box.numel // key[1].numel, members, key[2])
        for key, members in shared_boxes.items()
        for box in split_box(key[1], size[key], limit)
    ]
    sized = [(nbytes, [rank for rank, _ in members]) for _, nbytes, members, _ in pieces]
    readers = assign_chunks(sized, len(requests), initial_loads=load)
    shared_reads: list[list[SharedRead]] = [[] for _ in requests]
    for (box, _, members, route), reader in zip(pieces, readers, strict=True):
        ranks = tuple(rank for rank, _ in members)
        for rank, index in members:
            shared_reads[rank].append(SharedRead(ranks, reader, index, box, route))
    for shared in shared_reads:
        shared.sort(key=_get_bucket_key)
    return shared_reads


def _get_bucket_key(item: SharedRead) -> tuple[tuple[int, ...], int, str]:
    """Return a sort key that is equal for all boxes that one broadcast can contain."""
    return item.holders, item.reader, item.route


def exchange_boxes(
    shards: Sequence[TensorShard], shared: Sequence[SharedRead], ranks: RankCollectives
) -> int:
    """Send the boxes that this rank has read for other ranks, and receive its other boxes.

    All ranks process the groups of ranks in the same order, which prevents deadlocks.

    Returns:
        Number of bytes received.
    """
    assert isinstance(ranks, TorchGroup)
    received = 0
    for (holders, reader, route), items in groupby(shared, key=_get_bucket_key):
        parts = (shards[item.shard_index].select_box(item.box).tensor for item in items)
        for bucket in _group_into_buckets(parts):
            with (
                translate_group_errors(),
                torch.inference_mode(any(tensor.is_inference() for tensor in bucket)),
            ):
                received += _broadcast_bucket(bucket, reader, holders, ranks, route)
    for device in {
        shards[item.shard_index].tensor.device for item in shared if item.route != "cpu"
    }:
        with translate_group_errors():
            torch.accelerator.current_stream(device).synchronize()
    return received


def _broadcast_bytes(
    flat: torch.Tensor, reader: int, holders: Sequence[int], ranks: TorchGroup
) -> None:
    """Broadcast the bytes of *reader* to the other *holders* along a binomial tree.

    No process groups are created for this. If only its members create a group, torch derives the
    group name from the number of groups of each process. Members with different numbers of groups
    would wait for each other forever.
    """
    if len(holders) == ranks.world:
        dist.broadcast(flat, group=ranks.group, group_src=reader)
        return
    order = [reader, *(rank for rank in holders if rank != reader)]
    position, step = order.index(ranks.rank), 1
    while step < len(order):
        if position < step and position + step < len(order):
            dist.send(flat, group=ranks.group, group_dst=order[position + step])
        elif step <= position < 2 * step:
            dist.recv(flat, group=ranks.group, group_src=order[position - step])
        step *= 2


def _group_into_buckets(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group small tensors into buckets, and split tensors larger than a bucket into rows."""
    bucket: list[torch.Tensor] = []
    total = 0
    for part in parts:
        for piece in _split_rows(part):
            if bucket and total + piece.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, total = [], 0
            bucket.append(piece)
            total += piece.nbytes
    if bucket:
        yield bucket


def _split_rows(part: torch.Tensor) -> Iterator[torch.Tensor]:
    if part.nbytes <= BUCKET_BYTES:
        yield part
        return
    dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
    step = max(1, part.shape[dim] * BUCKET_BYTES // part.nbytes)
    for start in range(0, part.shape[dim], step):
        rows = part.narrow(dim, start, min(step, part.shape[dim] - start))
        yield from _split_rows(rows) if rows.shape[dim] < part.shape[dim] else (rows,)


def _broadcast_bucket(
    bucket: Sequence[torch.Tensor],
    reader: int,
    holders: Sequence[int],
    ranks: TorchGroup,
    route: str,
) -> int:
    """Broadcast the tensors of a bucket, and return the number of bytes received."""
    is_reader, first = reader == ranks.rank, bucket[0]
    nbytes = sum(part.nbytes for part in bucket)
    device = first.device if first.device.type == route else torch.device(route)
    is_direct = first.is_contiguous() and not (first.is_conj() or first.is_neg())
    if len(bucket) == 1 and is_direct and first.device == device:
        _broadcast_bytes(view_as_bytes(first), reader, holders, ranks)
        return 0 if is_reader else nbytes
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    slots = [*zip(bucket, torch.split(flat, [part.nbytes for part in bucket]), strict=True)]
    for part, slot in slots if is_reader else ():
        content = part.resolve_conj().resolve_neg().contiguous()
        slot.copy_(view_as_bytes(content))
    _broadcast_bytes(flat, reader, holders, ranks)
    for part, slot in () if is_reader else slots:
        # Copy, because a view with another dtype must begin at a multiple of its item size.
        part.copy_(slot.clone().view(part.dtype).reshape(part.shape))
    return 0 if is_reader else nbytes
