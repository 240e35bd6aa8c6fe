"""How a plan is carried out, and what was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.copying.tile import Limits
from ckptctl.storage.outcome import OutOfRange, Rounding
from ckptctl.storage.threads import Advance, default_threads

ARITHMETIC = 224 * MIB
"""Bytes of buffers in all, for arithmetic."""
LEAST = 64 << 10
"""Bytes of buffers that a thread has at least."""


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How a plan is carried out; none of it changes a byte of the output but CRCs.

    Attributes:
        jobs: Threads.
        memory: Bytes of buffers in all, arithmetic apart.
        checksum: Whether to compute CRCs of records and check those of sources.
        resume: Whether to believe the journal of an earlier run.
        journal_every: Bytes written between entries of the journal.
        sync: Whether files and directories have to be on disk in the end.
        shared: Whether others write below the same directory: then nothing there is removed.
        direct: Whether plain ranges of files that are not in the page cache are read past it. They
            stay out of it, so it is for those who read alone, and once.
        pace: Called by each thread with the bytes that it has just done; it may wait.
    """

    jobs: int = 0
    memory: int = 64 * MIB
    checksum: bool = True
    resume: bool = False
    journal_every: int = 1 << 30
    sync: bool = True
    shared: bool = False
    direct: bool = False
    pace: Advance | None = None

    @property
    def threads(self) -> int:
        """Return the number of threads: *jobs*, or as many as the cores and *memory* are for."""
        return self.jobs or max(1, min(default_threads(), self.memory // LEAST))

    def limits(self, *, short: bool = False) -> Limits:
        """Return the sizes of tiles that keep within *memory*.

        Args:
            short: Whether plain ranges are no longer than other tiles: several processes share a
                plan by whole tiles.
        """
        each = max(LEAST, self.memory // self.threads // 64 * 64)
        return Limits(
            tile=min(MIB, each),
            widest=min(4 * MIB, each),
            flat=min(MIB, each) if short else 16 * MIB,
            arithmetic=min(16 * MIB, ARITHMETIC // (2 * self.threads)),
            check=self.checksum,
        )

    def threads_within(self, limits: Limits) -> int:
        """Return for how many threads the memory is enough where tiles are of another's sizes."""
        most = min(self.memory // limits.widest, ARITHMETIC // (2 * limits.arithmetic))
        return max(1, min(self.threads, most))


@dataclass(frozen=True, slots=True)
class Execution:
    """What was done.

    Attributes:
        crcs: CRC-32 of each record of the plan; all 0 without checksums.
        bytes_written: Bytes of records and raw copies that this run wrote.
        resumed_bytes: Those that an earlier run had written.
        bytes_read: Bytes read into memory from source files, those that computed tensors are made
            of included.
        lost: What became infinite, NaN or saturated, by the name of the tensor in the output;
            none: nothing did.
        rounding: How far the elements that were quantized are off, by the same name.
    """

    crcs: list[int]
    bytes_written: int
    resumed_bytes: int
    bytes_read: int = 0
    lost: Mapping[str, OutOfRange] = field(default_factory=dict)
    rounding: Mapping[str, Rounding] = field(default_factory=dict)
