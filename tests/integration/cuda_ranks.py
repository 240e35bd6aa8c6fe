"""What ranks with tensors on CUDA devices do; imported by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptctl.catalog import Box
from ckptctl.distributed.group import TorchGroup
from ckptctl.distributed.loading.broadcast import SharedRead, exchange_boxes, get_transfer_devices
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.state import TensorShard


def stock_of(folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors as safetensors reads them."""
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def shards(rank: int, world: int, folder: str) -> None:
    """Load parts of tensors along each dimension."""
    stock = stock_of(folder)
    mesh = DeviceMesh("cpu", torch.arange(world))
    for dim in (0, 1):
        for broadcast in (True, False):
            state: dict[str, Any] = {}
            for name, full in stock.items():
                cut = Shard(min(dim, full.ndim - 1)) if full.ndim else Replicate()
                local = _part(full, cut, rank, world)
                empty = torch.zeros_like(local, device="cuda")
                state[name] = DTensor.from_local(
                    empty, mesh, [cut], run_check=False, shape=full.shape, stride=full.stride()
                )
            load(state, folder, jobs=2, broadcast=broadcast)
            for name, full in stock.items():
                placement = state[name].placements[0]
                found = state[name].to_local().cpu()
                assert torch.equal(found, _part(full, placement, rank, world)), (name, dim)


def _part(full: torch.Tensor, cut: Shard | Replicate, rank: int, world: int) -> torch.Tensor:
    if isinstance(cut, Replicate):
        return full
    size = -(-full.shape[cut.dim] // world)
    first = min(rank * size, full.shape[cut.dim])
    return full.narrow(cut.dim, first, min(size, full.shape[cut.dim] - first)).contiguous()


def replicas(rank: int, world: int, folder: str) -> None:
    """Load the same on all ranks, sent through host memory; one has some of it in that."""
    stock = stock_of(folder)
    group = TorchGroup()
    assert get_transfer_devices(group)["cuda"] == "cpu"
    state = {
        name: torch.zeros_like(full, device="cpu" if rank and number % 3 == 0 else "cuda")
        for number, (name, full) in enumerate(stock.items())
    }
    turned = {
        name: one.t().contiguous().t() if one.ndim == 2 else one for name, one in state.items()
    }
    for wanted in (state, turned):
        report = load(wanted, folder, jobs=2, broadcast=True)
        for name, full in stock.items():
            assert torch.equal(wanted[name].cpu(), full), name
        read = torch.tensor([report.bytes_read])
        dist.all_reduce(read)
        assert int(read) == sum(full.nbytes for full in stock.values())


def by_nccl(rank: int, world: int, folder: str) -> None:
    """Load with a group of NCCL's, and send boxes through it."""
    stock = stock_of(folder)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    for backend in ("cpu:gloo,cuda:nccl", "nccl"):
        group = dist.new_group(backend=backend)
        assert get_transfer_devices(TorchGroup(group))["cuda"] == "cuda"
        state = {name: torch.zeros_like(full, device=device) for name, full in stock.items()}
        report = load(state, folder, jobs=2, broadcast=True, process_group=group)
        for name, full in stock.items():
            assert torch.equal(state[name].cpu(), full), name
        assert world == 1 or report.bytes_received > 0
        sent = torch.arange(3 << 20, device=device).reshape(3, -1)
        places = [
            TensorShard("a", Box.whole(tuple(sent.shape)), sent.clone()),
            TensorShard("b", Box.whole((5, 4)), torch.ones(4, 5, device=device).t()),
        ]
        everyone = tuple(range(world))
        shared = [SharedRead(everyone, 0, n, one.box, "cuda") for n, one in enumerate(places)]
        if rank:
            places = [one._replace(tensor=torch.zeros_like(one.tensor)) for one in places]
        exchange_boxes(places, shared, TorchGroup(group))
        assert torch.equal(places[0].tensor, sent) and bool((places[1].tensor == 1).all())
