"""torchtune's distributed recipe on several ranks; only they import torchtune."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.checkpoints import differences, load_any_reference
from tests.oracle.integrations import test_torchtune as cases
from tests.oracle.trainers.jobs.environment import announce

Trained = dict[str, torch.Tensor]


def trained(base: Path, out: Path, component: str, **changed: Any) -> Trained:
    """Run the recipe, and return full weights and moments."""
    found = cases.recipe(cases.SHARDED, base, out, component, **changed)
    state = {**found._model.state_dict(), **cases.moments(found)}
    return {
        n: one.full_tensor() if hasattr(one, "full_tensor") else one for n, one in state.items()
    }


def shards(rank: int, world: int, folder: Path) -> None:
    """Ours ends as the stock checkpointer, gathers nothing, and goes on bit for bit."""
    announce(rank, world)
    quantization = importlib.import_module("torchao.quantization")
    for name in cases.QUANTIZERS:
        if not hasattr(quantization, name):
            setattr(quantization, name, None)
    from torchtune import training

    for name in ("cleanup_before_training", "get_memory_stats", "log_memory_stats"):  # of a GPU
        setattr(training, name, lambda *_, **__: {})
    base, ours, half = folder / "base", folder / "ours" / "out", folder / "half" / "out"
    stock = trained(base, folder / "stock" / "out", cases.STOCK)
    no = mock.Mock(side_effect=AssertionError("one rank was to hold everything"))
    with mock.patch.multiple(training, gather_cpu_state_dict=no, get_full_optimizer_state_dict=no):
        whole = trained(base, ours, cases.OURS)
        dist.barrier()
        if rank == 0:
            shutil.copytree(ours / "step-0", half / "step-0")
        dist.barrier()
        again = trained(base, half, cases.OURS, resume_from_checkpoint=True)
    assert any(name.endswith("exp_avg") for name in whole)
    assert not differences(whole, stock)
    assert not differences(again, whole)
    if rank == 0:
        final = load_any_reference(folder / "stock" / "out" / "epoch_1")
        assert not differences(load_any_reference(ours / "epoch_1"), final)
        assert not differences(load_any_reference(half / "epoch_1"), final)
        assert len(list((ours / "step-0").glob("__*.distcp"))) == world, "each rank its shards"
