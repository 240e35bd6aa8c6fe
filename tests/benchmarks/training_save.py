"""``save`` in training against stock ``dcp.save`` and bare loops of ``pwrite``, on several ranks.

Llama-shaped bfloat16 tensors, sharded on dimension 0 as FSDP2 does. The bare loops write as many
bytes per rank into one file each, from memory, in blocks, with one thread per rank: without a
checksum, with the CRC-32 of zlib and with that of ISA-L. All ways take turns in every round, in
one set of processes. Used by :mod:`tests.benchmarks.training`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.training_load import cpu, state_of_shapes, turned
from tests.gloo import run_on_ranks

BLOCK = 1 << 20
Crc = Callable[[memoryview], int]


def bare(folder: Path, views: list[memoryview], rank: int, crc: Crc | None, *, sync: bool) -> None:
    """Write *views* one after the other into one file.

    Args:
        folder: Where; made if it is not there.
        views: What is written.
        rank: Names the file.
        crc: Computes the checksum of a block; None: there is none.
        sync: Whether it has to be on disk in the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"{rank}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    offset = 0
    for view in views:
        for start in range(0, len(view), BLOCK):
            part = view[start : start + BLOCK]
            if crc:
                crc(part)
            offset += os.pwrite(descriptor, part, offset)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def ways(state: dict[str, Any], rank: int) -> dict[str, Callable[[Path], Any]]:
    """Return what is compared, by name; each writes below the path that it is given."""
    from isal.isal_zlib import crc32
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as stock

    from ckptctl.distributed.saving.save import save
    from ckptctl.distributed.state import memory

    views = [memory(tensor.to_local()) for tensor in state.values()]
    model = {"model": state}

    def dcp(path: Path, sync: bool) -> None:
        stock(model, storage_writer=FileSystemWriter(path, sync_files=sync))

    return {
        "bare pwrite": lambda path: bare(path, views, rank, None, sync=False),
        "bare pwrite + crc32 (zlib)": lambda path: bare(path, views, rank, zlib.crc32, sync=False),
        "bare pwrite + crc32 (isal)": lambda path: bare(path, views, rank, crc32, sync=False),
        "bare pwrite + crc32 (isal) + fsync": lambda p: bare(p, views, rank, crc32, sync=True),
        "ckptctl.save": lambda path: save(model, path, sync=False),
        "ckptctl.save, sync": lambda path: save(model, path, sync=True),
        "dcp.save": lambda path: dcp(path, False),
        "dcp.save, sync": lambda path: dcp(path, True),
    }


def measure(rank: int, world: int, folder: str, gigabytes: float, rounds: int, out: str) -> None:
    """Time all ways in turn; rank 0 notes seconds, and CPU seconds of all ranks, per round."""
    import torch.distributed as dist

    state = state_of_shapes(gigabytes, world, "S0", 1.5)
    found: dict[str, list[tuple[float, float]]] = {}
    compared = ways(state, rank)
    for number in range(rounds + 1):
        for name in turned(list(compared), number):
            path = Path(folder, "one")
            dist.barrier()
            before, start = cpu(), time.perf_counter()
            compared[name](path)
            dist.barrier()
            wall = time.perf_counter() - start
            spent: list[Any] = [None] * world
            dist.all_gather_object(spent, cpu() - before)
            if rank == 0:
                shutil.rmtree(path)
            dist.barrier()
            if number:  # the first time, memory, plans and caches are made
                found.setdefault(name, []).append((wall, sum(spent)))
    if rank == 0:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        Path(out).write_text(json.dumps({"samples": found, "nbytes": nbytes}))


def run(world: int, root: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Return what :func:`measure` notes for *world* ranks."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        out = Path(folder) / "out.json"
        given = (folder, gigabytes, rounds, str(out))
        run_on_ranks("tests.benchmarks.training_save:measure", [world], *given, timeout=900)
        found: dict[str, Any] = json.loads(out.read_text())
        return found
