"""Copies of local saves to the run folder, at a limited rate.

A copy is a regular collective save: replicated tensors are written once, the checkpoint is
published atomically, and stock ``dcp.load`` can read it. However, tensors are not read from memory,
but from the files that each rank wrote, and are verified with the checksums in these files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ckptctl.catalog import Extent, compute_row_major_strides, parse_memory_key
from ckptctl.distributed.saving.local_state import LocalState
from ckptctl.errors import DamagedError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.dcp.locating import locate_elements
from ckptctl.formats.dcp_rank_local import read_rank_catalog
from ckptctl.planner.plan import Plan
from ckptctl.planner.strided import Part, StridedTensor
from ckptctl.save_load.saving.local_shards import LocalShards
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.execution.streaming import CreateFile, stream_plan
from ckptctl.storage.files import source_files
from ckptctl.storage.threads import Advance


class RateLimiter:
    """Rate limit in bytes per second, shared by all threads."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._earliest_end = (
            0.0  # earliest time at which the bytes processed so far meet the rate limit
        )
        self._lifted = threading.Event()

    def __call__(self, nbytes: int) -> None:
        """Wait until the rate limit is met, after *nbytes* have been processed."""
        if not self._rate or self._lifted.is_set() or not threading.main_thread().is_alive():
            return
        with self._lock:
            now = time.monotonic()
            self._earliest_end = max(self._earliest_end, now) + nbytes / self._rate
            wait = self._earliest_end - now
        self._lifted.wait(wait)

    def lift_limit(self) -> None:
        """Suspend the rate limit, for example because training waits for a copy."""
        self._lifted.set()

    def restore_limit(self) -> None:
        """Apply the rate limit again, after :meth:`lift_limit`."""
        self._lifted.clear()


def build_disk_state(shards: LocalShards, values: Mapping[str, bytes]) -> LocalState:
    """Build a state with a rank's saved shards, whose tensors have no elements in memory.

    :class:`SavedPart` reads the elements from files.
    """
    placeholders = {
        name: torch.empty((), dtype=getattr(torch, entry.dtype))
        for name, entry in shards.tensors.items()
    }
    pieces = [placeholders[chunk.name].expand(chunk.sizes) for chunk in shards.chunks]
    return LocalState(
        shards, pieces, [compute_row_major_strides(entry.sizes) for entry in shards.chunks], values
    )


class SavedPart:
    """Files that *rank* saved in *folder*.

    Save plans read tensors from these files instead of from memory.
    """

    def __init__(self, folder: Path, rank: int, shards: LocalShards, pace: RateLimiter) -> None:
        self._folder, self._rank = folder, rank
        self._shards, self._pace = shards, pace

    def execute(
        self, plan: Plan, root: Path, options: ExecutionOptions, progress: Advance, **_: object
    ) -> Execution:
        """Execute *plan*, but read tensors from the saved files instead of from memory."""
        return execute_plan(
            self._with_file_sources(plan), root, replace(options, pace=self._pace), progress
        )

    def stream(
        self, plan: Plan, create: CreateFile, options: ExecutionOptions, **_: object
    ) -> None:
        """Execute *plan* like :meth:`execute`, but write the files as streams to a store."""
        stream_plan(self._with_file_sources(plan), create, replace(options, pace=self._pace))

    def read_digests(self, state: LocalState) -> Mapping[int, int]:
        """Return the CRC-32 of each shard by index, as recorded in this rank's files."""
        _, extents = self._locate_shards()
        return {
            index: extent.crc32
            for index, (chunk, extent) in enumerate(zip(state.shards.chunks, extents, strict=True))
            # Small tensors are compared as values.
            if extent.crc32 is not None and chunk.name not in state.shards.values
        }

    def _locate_shards(self) -> tuple[Mapping[str, FileIdentity], list[Extent]]:
        """Return the identities of this rank's files by name, and the byte range of each shard."""
        catalog = read_rank_catalog(self._folder, self._rank)
        if catalog is None:
            raise DamagedError("the data that this rank saved is missing", where=str(self._folder))
        with source_files(self._folder) as files:
            tensors = locate_elements(files, catalog.tensors)
            sources = {name: files.read_identity(name) for name in catalog.files}
        extents = {
            (entry.name, extent.box.offsets): extent
            for entry in tensors.values()
            for extent in entry.extents
        }
        return sources, [extents[chunk.name, chunk.offsets] for chunk in self._shards.chunks]

    def _with_file_sources(self, plan: Plan) -> Plan:
        """Return a copy of *plan* that reads tensors from the saved files instead of memory."""
        sources, chunks = self._locate_shards()
        transfers = tuple(
            replace(transfer, tensor=_to_file_tensor(chunks, transfer.tensor))
            for transfer in plan.transfers
        )
        return replace(
            plan,
            source_root=self._folder,
            sources=sources,
            transfers=transfers,
            checked=frozenset(
                (number, entry.name)
                for number, transfer in enumerate(transfers)
                for entry in transfer.iterate_stored_tensors()
            ),
        )


def _to_file_tensor(chunks: list[Extent], tensor: StridedTensor) -> StridedTensor:
    """Return a copy of *tensor* whose extents are in files instead of memory.

    Extents that contain a complete chunk get the checksum that the file records for it.
    """
    parts: list[Part] = []
    for part in tensor.parts:
        (memory_extent,) = part.entry.extents
        extent = chunks[int(parse_memory_key(memory_extent.file))]
        is_whole_chunk = (memory_extent.offset, memory_extent.nbytes) == (0, extent.nbytes)
        file_extent = replace(
            memory_extent,
            file=extent.file,
            offset=extent.offset + memory_extent.offset,
            crc32=extent.crc32 if is_whole_chunk else None,
        )
        parts.append(part._replace(entry=replace(part.entry, extents=(file_extent,))))
    return replace(tensor, parts=tuple(parts))
