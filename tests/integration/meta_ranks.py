"""What ranks do in tests of loads into sharded models on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ckptctl.distributed.loading.load import load
from ckptctl.errors import CkptError
from tests.checkpoints import save_dcp

TOKENS = torch.arange(12).view(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return found


class Tied(nn.Module):
    """Two blocks between tied embeddings, of 13 rows, which no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embed.weight
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.ones(16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) - self.mean
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def whole() -> Tied:
    torch.manual_seed(3)
    model = Tied()
    model.mean.fill_(0.5)
    return model


def sharded(words: str, world: int) -> Tied:
    """Return the model on the meta device, divided over the ranks."""
    with torch.device("meta"):
        model = Tied()
    if words == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    if words == "tp":
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        mesh = mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loaded_on_meta(rank: int, world: int, folder: str, flat: str) -> None:
    """Load in several shardings, from DCP and one file; compare with the model and with stock."""
    truth = whole()
    weights = truth.state_dict()
    for words in ("fsdp", *(("hsdp", "tp") if world == 4 else ())):
        for source, wrapped in ((folder, True), (flat, False)):
            model = sharded(words, world)
            report = load({"model": model} if wrapped else model, source, strict="state")
            assert not report.on_meta and not report.missing, report
            _require_same(model, weights)
            assert model.head.weight is model.embed.weight
            loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
            expected = nn.functional.cross_entropy(truth(TOKENS).flatten(0, 1), TOKENS.flatten())
            torch.testing.assert_close(loss, expected)
            torch.autograd.backward(loss)
            optimizer = torch.optim.AdamW(model.parameters())
            optimizer.step()
        stock = sharded(words, world).to_empty(device="cpu")
        theirs = {"model": get_model_state_dict(stock)}
        state_dict_loader.load(theirs, checkpoint_id=folder)
        ours = sharded(words, world)
        load({"model": ours}, folder, strict="state")
        for name, tensor in get_model_state_dict(ours).items():
            mine, other = (_local(one) for one in (tensor, theirs["model"][name]))
            assert torch.equal(mine, other), (words, name)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _require_same(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(found, weights[name]), name


def read_once(rank: int, world: int, flat: str) -> None:
    """Each rank reads its own part, and all of them together read everything once."""
    model = sharded("fsdp", world)
    report = load(model, flat)
    own = sum(_local(one).nbytes for one in model.parameters())
    counted = torch.tensor([report.bytes_read])
    dist.all_reduce(counted)
    buffer = model.mean.nbytes
    total = sum(one.nbytes for one in whole().parameters())
    assert own <= report.bytes_read <= own + buffer, (rank, own, report.bytes_read)
    assert int(counted) <= total + world * buffer, (int(counted), total)


def assigned(rank: int, world: int, flat: str) -> None:
    """New shards, of the file's dtype, take the place of those that a sharded model has."""
    model, weights = Tied(), torch.load(flat)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    before = model.embed.weight
    load(model, flat, assign=True)
    assert model.embed.weight is not before and model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == torch.bfloat16
    _require_same(model, weights)
    assert model(TOKENS).isfinite().all()


def failing(rank: int, world: int, folder: str) -> None:
    """One rank wants what is not there: no rank has changed anything."""
    model = sharded("fsdp", world)
    state: dict[str, Any] = {"model": model}
    if rank == world - 1:
        state["strange"] = torch.empty(3, device="meta")
    for options in ({"strict": "state"}, {"rename": lambda name: f"{name}{rank}", "strict": False}):
        try:
            load(state, folder, **options)
        except CkptError as error:
            said = f"{error} {error.why}"
            assert "strange" in said or "rename keys differently" in said
        else:
            raise AssertionError("it did not fail everywhere")
        assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))


def in_folder(root: Path) -> tuple[str, str]:
    """Write the model as stock torch does; return a directory of DCP and a file."""
    model = whole()
    save_dcp(root / "dcp", {"model": model.state_dict(), "step": 1})
    torch.save(model.state_dict(), root / "flat.pt")
    return str(root / "dcp"), str(root / "flat.pt")
