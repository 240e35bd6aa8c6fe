"""Options and result of executing a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.storage.outcome import OutOfRange, Rounding
from ckptctl.storage.threads import Advance, get_default_thread_count

ARITHMETIC_BYTES = 224 * MIB
"""Total size in bytes of the buffers in which elements are permuted or cast."""
MIN_THREAD_BYTES = 64 << 10
"""Minimum size of a thread's buffer, in bytes."""


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """Options for executing a plan. Only *checksum* affects the bytes of the output.

    Attributes:
        jobs: Number of threads, or 0 for the default.
        memory: Total size of the buffers in bytes, excluding the buffers for arithmetic.
        checksum: Whether to compute checksums of records and verify checksums of sources.
        resume: Whether to resume from the journal of an earlier run.
        journal_every: Bytes to write between two entries of the journal.
        sync: Whether to sync files and directories at the end.
        shared: Whether other processes write to the same directory, in which case existing files
            there are not removed.
        direct: Whether to read contiguous ranges of uncached files with direct I/O, which does not
            add them to the page cache. Meant for files that only one process reads, once.
        device: Name of the device that computes elements, or None for the CPU.
        pace: Called by each thread with the number of bytes that it has just written, and may wait
            to limit the write rate. None for no limit.
    """

    jobs: int = 0
    memory: int = 64 * MIB
    checksum: bool = True
    resume: bool = False
    journal_every: int = 1 << 30
    sync: bool = True
    shared: bool = False
    direct: bool = False
    device: str | None = None
    pace: Advance | None = None

    @property
    def threads(self) -> int:
        """Number of threads, which is *jobs* or, if it is 0, depends on the cores and *memory*."""
        return self.jobs or max(1, min(get_default_thread_count(), self.memory // MIN_THREAD_BYTES))

    def compute_tile_limits(self, *, short: bool = False) -> TileLimits:
        """Compute tile sizes that fit into *memory*.

        Args:
            short: Whether to limit tiles of contiguous ranges to the size of other tiles, so that
                several processes can share the tiles of a plan.
        """
        thread_bytes = max(MIN_THREAD_BYTES, self.memory // self.threads // 64 * 64)
        return TileLimits(
            tile_bytes=min(MIB, thread_bytes),
            max_tile_bytes=min(4 * MIB, thread_bytes),
            max_unit_bytes=min(MIB, thread_bytes) if short else 16 * MIB,
            permuted_tile_bytes=min(16 * MIB, ARITHMETIC_BYTES // (2 * self.threads)),
            verifies_checksums=self.checksum,
        )

    def count_threads_that_fit(self, limits: TileLimits) -> int:
        """Return how many threads, at most *threads*, fit into memory with tile sizes *limits*."""
        memory_threads = min(
            self.memory // limits.max_tile_bytes,
            ARITHMETIC_BYTES // (2 * limits.permuted_tile_bytes),
        )
        return max(1, min(self.threads, memory_threads))


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of executing a plan.

    Attributes:
        crcs: CRC-32 of each record of the plan, or 0 for every record if checksums are disabled.
        bytes_written: Bytes of records and raw copies written by this run.
        resumed_bytes: Bytes written by an earlier run.
        bytes_read: Bytes read from source files, including the inputs of computed tensors.
        lost: Counts of elements that became infinite, NaN or saturated, by output tensor.
        rounding: Quantization errors, by output tensor.
    """

    crcs: list[int]
    bytes_written: int
    resumed_bytes: int
    bytes_read: int = 0
    lost: Mapping[str, OutOfRange] = field(default_factory=dict)
    rounding: Mapping[str, Rounding] = field(default_factory=dict)
