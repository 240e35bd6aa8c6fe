"""Options that all functions for saving checkpoints have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ckptctl.distributed.group import choose_thread_count
from ckptctl.option_checks import build_minimum_check
from ckptctl.options import Option, Options
from ckptctl.planner.balance import count_output_files
from ckptctl.planner.copying.blocks import MIB
from ckptctl.storage.execution.execution_options import Execution
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.execution.streaming import stream_plan

SidecarFiles = Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class WriterOptions(Options):
    """Options for writing the files of a checkpoint."""

    overwrite: Annotated[
        bool, Option("Replace an existing checkpoint of the same name atomically.")
    ] = False
    files: Annotated[
        int | None,
        Option(
            "Number of files per rank. Threads that write separate files do not wait for "
            "each other. None uses one file per thread, and at most one per 128 MiB.",
            check=build_minimum_check(1),
        ),
    ] = None
    jobs: Annotated[
        int,
        Option(
            "Number of threads per rank. 0 uses its share of the host's cores, at most 16.",
            check=build_minimum_check(0),
        ),
    ] = 0
    memory: Annotated[
        int,
        Option(
            "Size of the buffers of each rank in bytes. They are for tensors that must be "
            "reordered or copied from a device.",
            check=build_minimum_check(0),
        ),
    ] = 64 * MIB
    sync: Annotated[
        bool,
        Option(
            "Flush data to disk before the checkpoint is published. If False, a crash of "
            "the machine can leave a published checkpoint without its data."
        ),
    ] = True
    checksum: Annotated[
        bool,
        Option("Store CRC-32 checksums in the records, as torch does. ``verify`` requires them."),
    ] = True
    beside: SidecarFiles | None = None
    """Function that returns sidecar files to publish.

    It is called on rank 0 after all ranks have written, and only if collectives are used.
    """
    execute: Callable[..., Execution] = execute_plan
    """Function that executes a rank's plan, possibly in another process."""
    stream: Callable[..., None] = stream_plan
    """Function that executes a rank's plan for a store to which files are written as streams."""

    def choose_file_count(self, nbytes: int) -> int:
        """Return the number of files into which a rank divides *nbytes* of data."""
        return self.files or count_output_files(nbytes, choose_thread_count(self.jobs))

    def collect_sidecars(self) -> Mapping[str, bytes]:
        """Return the contents of the sidecar files to publish, by file name."""
        return self.beside() if self.beside else {}


@dataclass(frozen=True, kw_only=True)
class SaveOptions(WriterOptions):
    """Options for saving a state."""

    trusted: Annotated[
        bool,
        Option(
            "Also save objects of classes that are not known to be harmless. Only "
            "``load(trusted=True)`` reads them back."
        ),
    ] = False
    compare_replicas: Annotated[
        bool,
        Option(
            "Compare replicated tensors by CRC-32 between ranks before one copy is "
            "written. A difference is an error. Tensors of at most 64 KiB are compared "
            "at every save. Larger ones are compared at the first save and after the "
            "structure of the state has changed."
        ),
    ] = True
    digests: Callable[[Any], Mapping[int, int]] | None = None
    """Function that returns the CRC-32 of possible replicas, by shard index.

    If it is None, the CRC-32 are computed from memory.
    """
