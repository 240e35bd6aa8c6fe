"""What ranks do in tests of loading; imported by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptctl.distributed.loading.load import load
from ckptctl.errors import CkptError
from tests.checkpoints.dcp import distribute
from tests.integration.dcp_ranks import SHARDINGS

POISON = 0xA5


def wiped(full: dict[str, Any]) -> dict[str, Any]:
    """Return tensors like those of *full* that hold nothing of use."""
    return {
        name: torch.full((t.nbytes,), POISON, dtype=torch.uint8).view(t.dtype).reshape(t.shape)
        for name, t in full.items()
    }


def require_equal(placed: dict[str, Any], full: dict[str, Any], how: object) -> None:
    """Compare what was loaded with full tensors."""
    for name, tensor in placed.items():
        found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(found, full[name]), (how, name)


def load_into_shards(
    rank: int, world: int, folder: str, truth: str, prefix: str, options: dict[str, Any]
) -> None:
    """Load a checkpoint in every sharding of this world size and compare with *truth*."""
    full = torch.load(truth)
    for mesh, words in SHARDINGS[world]:
        placed = distribute(wiped(full), mesh, words)
        state = {prefix: placed} if prefix else dict(placed)
        report = load(state, folder, **options)
        assert not report.missing and not report.unexpected, report
        require_equal(placed, full, words)


def load_once(rank: int, world: int, folder: str, truth: str) -> None:
    """Load replicas with and without broadcast, and count what is read."""
    full = torch.load(truth)
    total = sum(tensor.nbytes for tensor in full.values())
    meshes = [((world,), "R"), *([((2, 2), "R,S0"), ((2, 2), "S0,R")] if world == 4 else [])]
    for mesh, words in meshes:
        for broadcast in (True, False):
            placed = distribute(wiped(full), mesh, words)
            report = load(dict(placed), folder, broadcast=broadcast)
            require_equal(placed, full, (words, broadcast))
            read = torch.tensor([report.bytes_read, report.bytes_received])
            dist.all_reduce(read)
            assert read.sum() >= total
            if broadcast:
                assert read[0] == total, (words, read, total)
            else:
                assert read[1] == 0


def load_training(rank: int, world: int, root: Path) -> None:
    """Load everything that was saved, with broadcast, into every sharding of this world size."""
    from tests.integration.training_ranks import state

    full = state()
    for folder in sorted(root.iterdir()):
        for mesh, words in SHARDINGS[world]:
            placed = distribute(wiped(full), mesh, words)
            report = load({"model": placed}, folder, broadcast=True)
            assert not report.missing, report.missing
            require_equal(placed, full, (folder.name, words))


Case = tuple[str, str, str, dict[str, Any]]


def load_cases(rank: int, world: int, cases: list[Case]) -> None:
    """Load ``(checkpoint, full tensors, prefix in the state, options)`` in every sharding."""
    for folder, truth, prefix, options in cases:
        load_into_shards(rank, world, folder, truth, prefix, options)


def load_stage(rank: int, world: int, folder: str, truth: str) -> None:
    """Load other tensors on every rank, as pipeline stages do; then let one want what is not."""
    full = torch.load(truth)
    names = [name for number, name in enumerate(full) if number % world == rank]
    mine = {name: full[name] for name in names}
    placed = wiped(mine)
    report = load(placed, folder)
    require_equal(placed, mine, "stage")
    assert not report.unexpected and set(report.loaded) == set(names)
    more = {"strange": torch.zeros(2)} if rank == world - 1 else {}
    again = {**wiped(mine), **more}
    before = {name: tensor.clone().view(torch.uint8) for name, tensor in again.items()}
    try:
        load(again, folder)
    except CkptError as error:
        assert "strange" in str(error.why)
    else:
        raise AssertionError("it did not fail everywhere")
    assert all(torch.equal(again[n].view(torch.uint8), before[n]) for n in again)
    if rank == world - 1:
        again[names[0]] = torch.zeros(5, 5, 5)
    try:
        load(again, folder, strict=False)
    except CkptError as error:
        assert "a different shape" in str(error)
    else:
        raise AssertionError("it did not fail everywhere")
