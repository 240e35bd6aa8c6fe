"""How a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptctl.planner.copying.tile import MIB
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import Execution

Beside = Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        overwrite: Whether to replace a checkpoint of that name, in one step.
        files: Files per rank; threads do not wait for each other when they write several.
        jobs: Threads per rank; 0: its part of the host's cores, at most four.
        memory: Bytes of buffers per rank, for tensors that have to be reordered or copied from a
            device on their way.
        sync: Whether it has to be on disk before it gets its name. Without, a crash of the machine
            can leave a checkpoint whose data is not there.
        checksum: Whether records carry CRC-32, as torch writes them; ``verify`` needs them.
        trusted: Whether leaves are saved, too, that only ``load(trusted=True)`` reads again:
            objects of classes that are not known to be harmless.
        execute: What carries out a rank's plan: the function of
            :mod:`ckptctl.storage.execution.executor`, or one that has another process do that.
        beside: Returns the content of files that are published with it, by name; called on rank 0,
            last. Not below a URL.
    """

    overwrite: bool = False
    files: int = 1
    jobs: int = 0
    memory: int = 64 * MIB
    sync: bool = True
    checksum: bool = True
    trusted: bool = False
    execute: Callable[..., Execution] = execute
    beside: Beside | None = None
