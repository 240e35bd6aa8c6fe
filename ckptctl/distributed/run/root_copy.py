"""A save on local disks is written into the root of its run, as any save is, at a bounded rate.

What several ranks hold is written once, the checkpoint appears when it is whole, and stock
``dcp.load`` reads it: it is the same collective save, but that the bytes of tensors come out of the
files that this rank wrote, and are compared with their checksums on the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ckptctl.catalog import Extent, memory_key, row_major
from ckptctl.distributed.saving.local_state import LocalState
from ckptctl.errors import DamagedError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.dcp.locating import located
from ckptctl.formats.dcp_rank_local import read_rank
from ckptctl.planner.plan import Plan
from ckptctl.planner.strided import Part, Strided
from ckptctl.save_load.saving.local_shards import LocalShards
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.streaming import Create, stream
from ckptctl.storage.files import source_files
from ckptctl.storage.threads import Advance


class Pace:
    """Has threads wait so that all of them together do so many bytes per second."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0  # when the bytes so far may have been done
        self._lifted = threading.Event()

    def __call__(self, nbytes: int) -> None:
        """Wait as long as *nbytes* take; they were just done."""
        if not self._rate or self._lifted.is_set() or not threading.main_thread().is_alive():
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + nbytes / self._rate
            wait = self._free - now
        self._lifted.wait(wait)

    def lift(self) -> None:
        """Let nobody wait: training waits itself."""
        self._lifted.set()

    def restore(self) -> None:
        """Hold them back again."""
        self._lifted.clear()


def state_on_disk(shards: LocalShards, values: Mapping[str, bytes]) -> LocalState:
    """Return what a rank saved as a state; :class:`SavedPart` says where the elements are."""
    nothing = {
        name: torch.empty((), dtype=getattr(torch, one.dtype))
        for name, one in shards.tensors.items()
    }
    pieces = [nothing[chunk.name].expand(chunk.sizes) for chunk in shards.chunks]
    return LocalState(shards, pieces, [row_major(one.sizes) for one in shards.chunks], values)


class SavedPart:
    """What *rank* saved in *folder*, to be written in place of its memory."""

    def __init__(self, folder: Path, rank: int, shards: LocalShards, pace: Pace) -> None:
        self._folder, self._rank = folder, rank
        self._shards, self._pace = shards, pace

    def execute(
        self, plan: Plan, root: Path, options: ExecutionOptions, progress: Advance, **_: object
    ) -> Execution:
        """Carry out *plan*, which reads memory, with the files."""
        return execute(self._with_files(plan), root, replace(options, pace=self._pace), progress)

    def stream(self, plan: Plan, create: Create, options: ExecutionOptions, **_: object) -> None:
        """Carry out *plan*, which reads memory, for a place that takes streams."""
        stream(self._with_files(plan), create, replace(options, pace=self._pace))

    def digests(self, own: LocalState) -> Mapping[int, int]:
        """Return the CRC-32 that this rank's files record of the shards of *own*."""
        _, extents = self._located()
        return {
            index: extent.crc32
            for index, (chunk, extent) in enumerate(zip(own.shards.chunks, extents, strict=True))
            # Small tensors are among the values, and may differ.
            if extent.crc32 is not None and chunk.name not in own.shards.values
        }

    def _located(self) -> tuple[Mapping[str, FileIdentity], list[Extent]]:
        """Return the files of this rank, and where in them each shard lies."""
        catalog = read_rank(self._folder, self._rank)
        if catalog is None:
            raise DamagedError("the data that this rank saved is missing", where=str(self._folder))
        with source_files(self._folder) as files:
            tensors = located(files, catalog.tensors)
            sources = {name: files.identity(name) for name in catalog.files}
        extents = {
            (entry.name, extent.box.offsets): extent
            for entry in tensors.values()
            for extent in entry.extents
        }
        return sources, [extents[chunk.name, chunk.offsets] for chunk in self._shards.chunks]

    def _with_files(self, plan: Plan) -> Plan:
        """Return *plan* with files in place of the memory that it reads."""
        sources, chunks = self._located()
        transfers = tuple(
            replace(one, tensor=_in_file(chunks, one.tensor)) for one in plan.transfers
        )
        return replace(
            plan,
            source_root=self._folder,
            sources=sources,
            transfers=transfers,
            checked=frozenset(
                (number, entry.name)
                for number, one in enumerate(transfers)
                for entry in one.stored_tensors()
            ),
        )


def _in_file(chunks: list[Extent], tensor: Strided) -> Strided:
    """Return a tensor in a file in place of memory; all of a chunk has a checksum."""
    parts: list[Part] = []
    for part in tensor.parts:
        (held,) = part.of.extents
        extent = chunks[int(memory_key(held.file))]
        whole = (held.offset, held.nbytes) == (0, extent.nbytes)
        found = replace(
            held,
            file=extent.file,
            offset=extent.offset + held.offset,
            crc32=extent.crc32 if whole else None,
        )
        parts.append(part._replace(of=replace(part.of, extents=(found,))))
    return replace(tensor, parts=tuple(parts))
