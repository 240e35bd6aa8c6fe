"""What ranks do in tests of local tensors that say which parts of a global one they hold."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ckptctl.distributed import LoadPlanner, Reader, SavePlanner, Writer
from ckptctl.distributed.background.async_save import AsyncSaver, async_save
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from ckptctl.errors import CkptError, MappingError

STOCK = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
"""Whether torch's own planners know these tensors."""
PADDING = -7.0


def full() -> dict[str, torch.Tensor]:
    """Return the global tensors: a small one, one above 64 KiB, one without dimensions."""
    return {
        "small": torch.arange(48.0).reshape(8, 6),
        "large": torch.arange(400.0 * 64).reshape(400, 64),
        "flat": torch.arange(40, dtype=torch.int32),
    }


def placed(rank: int, world: int, *, wipe: bool = False, pieces: int = 2) -> dict[str, Any]:
    """Return this rank's part: of each tensor *pieces* ranges of rows, with padding between."""
    found: dict[str, Any] = {}
    for name, whole in full().items():
        rows = len(whole) // (world * pieces)
        firsts = [(number * world + rank) * rows for number in range(pieces)]
        starts = [number * (rows + 1) for number in range(pieces)]
        local = torch.full((pieces * (rows + 1), *whole.shape[1:]), PADDING).to(whole.dtype)
        for first, start in zip(firsts, starts, strict=True):
            if not wipe:
                local[start : start + rows] = whole[first : first + rows]
        rest = (0,) * (whole.ndim - 1)
        local.global_shape = tuple(whole.shape)  # type: ignore[attr-defined]
        local.global_offsets = tuple((first, *rest) for first in firsts)  # type: ignore[attr-defined]
        local.local_offsets = tuple((start, *rest) for start in starts)  # type: ignore[attr-defined]
        sizes = ((rows, *whole.shape[1:]),) * pieces
        local.local_sizes = sizes  # type: ignore[attr-defined]
        found[name] = local
    return found


def is_equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether all tensors are equal, padding included."""
    return all(torch.equal(found[name], one) for name, one in expected.items())


def save_all(rank: int, world: int, root: Path) -> None:
    """Save in every way; stock ``dcp.load`` finds the global tensors."""
    warnings.simplefilter("ignore")
    state = {"model": placed(rank, world), "step": 3}
    save(state, root / "save", sync=False)
    async_save(state, root / "async", sync=False).result()
    for name, writer in (("ours", Writer), ("planner", FileSystemWriter)):
        state_dict_saver.save(state, storage_writer=writer(root / name), planner=SavePlanner())
    if STOCK:
        protocol = importlib.import_module("torch.distributed.checkpoint.protocol")
        assert isinstance(state["model"]["small"], protocol.CheckpointableTensor)  # type: ignore[index]
        state_dict_saver.save(state, storage_writer=FileSystemWriter(root / "stock"))
        state_dict_saver.save(state, storage_writer=Writer(root / "writer"))
    for folder in sorted(root.iterdir()):
        wiped = {name: torch.zeros_like(one) for name, one in full().items()}
        state_dict_loader.load({"model": wiped}, storage_reader=FileSystemReader(folder))
        assert is_equal(wiped, full()), folder


def load_all(rank: int, world: int, root: Path) -> None:
    """Load in every way into other parts than those that were saved."""
    warnings.simplefilter("ignore")
    for folder in sorted(root.iterdir()):
        for pieces in (1, 2):
            expected = placed(rank, world, pieces=pieces)
            found: dict[str, Any] = placed(rank, world, wipe=True, pieces=pieces)
            load({"model": found, "step": 0}, folder)
            assert is_equal(found, expected), (folder, pieces)
            for reader in (Reader, FileSystemReader):
                found = placed(rank, world, wipe=True, pieces=pieces)
                state = {"model": found, "step": 0}
                state_dict_loader.load(state, storage_reader=reader(folder), planner=LoadPlanner())
                assert is_equal(found, expected), (folder, pieces, reader)
            if STOCK:
                found = placed(rank, world, wipe=True, pieces=pieces)
                state_dict_loader.load({"model": found}, storage_reader=FileSystemReader(folder))
                assert is_equal(found, expected), (folder, pieces)
    on_meta: dict[str, Any] = {}
    for name, one in placed(rank, world).items():
        on_meta[name] = torch.empty_like(one, device="meta")
        for attribute in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
            setattr(on_meta[name], attribute, getattr(one, attribute))
    for way in (
        lambda state: load(state, root / "save"),
        lambda state: state_dict_loader.load(
            state, storage_reader=Reader(root / "save"), planner=LoadPlanner()
        ),
    ):
        state = {"model": dict(on_meta), "step": 0}
        way(state)
        for name, one in placed(rank, world).items():
            made: Any = state["model"][name]  # type: ignore[index]
            assert made.global_offsets == one.global_offsets
            for start, size in zip(one.local_offsets, one.local_sizes, strict=True):
                part = slice(start[0], start[0] + size[0])
                assert torch.equal(made[part], one[part])


def in_background(state: dict[str, Any], path: Path, **how: Any) -> None:
    """Save by a saver of its own, which owes nobody an earlier error."""
    saver = AsyncSaver()
    future = saver.save(state, path, sync=False, **how)
    with suppress(CkptError):
        saver.close()
    future.result()


def replicas_that_differ(rank: int, world: int, root: Path) -> None:
    """A tensor that is not the same on all ranks is an error that names it and the ranks."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world,))
    same = torch.arange(20_000.0)
    own = same.clone()
    if rank == 1:
        own[-1] = 0
    shard = placed(0, 1)["large"]  # every rank says that it has all of it
    if rank == 1:
        shard[3, 3] = 5
    for number, leaf in enumerate(
        (own, DTensor.from_local(own, mesh, [Replicate()], run_check=False), shard)
    ):
        state = {"same": same, "own": leaf}
        ways: tuple[Any, ...] = (
            lambda path, state=state, **how: save(state, path, sync=False, **how),
            lambda path, state=state, **how: in_background(state, path, **how),
            lambda path, state=state, **how: state_dict_saver.save(
                state, storage_writer=Writer(path, sync=False), planner=SavePlanner(**how)
            ),
        )
        for way, work in enumerate(ways):
            path = root / f"{number}-{way}"
            with pytest.raises((CkptError, CheckpointException)) as error:
                work(path)
            said = str(error.value)
            if isinstance(error.value, CkptError):
                assert isinstance(error.value, MappingError) or rank
                said += str(error.value.why)
                assert "; rank 1: CRC-32 " in said
                others = "rank 0:" if world == 2 else "ranks 0, 2:"
                assert others in said
            assert "differs between ranks" in said and "`own`" in said
            dist.barrier()
            assert not path.exists()
            work(path, compare_replicas=False)
            assert path.exists()
