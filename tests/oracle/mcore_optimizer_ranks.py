"""What ranks do with Megatron-Core's distributed optimizer: save it, and load it again."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import VOCABULARY, Ranks, Recipe
from tests.oracle.mcore_ranks import SPELLINGS, _pieces, arguments, inner

FORM = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(rank: int, world: int, out: Path, recipe: Recipe, ranks: Ranks) -> None:
    """Train a step, and write ``run/`` and, on one rank, ``live.pt``, what the optimizer has."""
    model, optimizer = _trained(recipe, ranks, seed=3)
    target = out / "run" / "iter_0000010"
    if rank == 0:
        target.mkdir(parents=True)
        (out / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    metadata = {**SPELLINGS["stacked"], **FORM}
    content = {
        "args": Namespace(**_plain(arguments(recipe, ranks)), consumed_train_samples=80),
        "checkpoint_version": 3.0,
        "iteration": 10,
        **_state(model, optimizer, metadata, is_loading=False),
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 80},
    }
    dist_checkpointing.save(content, str(target), ("torch_dist", 1), content_metadata=metadata)
    torch.save(dict(_held(model, optimizer)), out / "live.pt")


def load(rank: int, world: int, out: Path, recipe: Recipe, ranks: Ranks, names: list[str]) -> None:
    """Fill an optimizer of other values from each run in *names*, and hold it against the first."""
    for name in names:
        model, optimizer = _trained(recipe, ranks, seed=4)
        target = str(inner(out / name))
        metadata = dist_checkpointing.load_content_metadata(target)
        wanted = _state(model, optimizer, metadata, is_loading=True)
        state, missing, unexpected = dist_checkpointing.load(wanted, target, strict="return_all")
        problems = {key for key in (*missing, *unexpected) if "_extra_state" not in key}
        assert not problems, problems
        assert state["args"].consumed_train_samples == 80 and state["iteration"] == 10
        optimizer.load_state_dict(state["optimizer"])
        live = torch.load(out / "live.pt", weights_only=True)
        found = dict(_held(model, optimizer))
        assert found.keys() == live.keys()
        for key, value in found.items():
            assert torch.equal(value, live[key]), (name, key)


def _plain(told: Namespace) -> dict[str, Any]:
    """Return arguments that plain torch loads."""
    return {key: value for key, value in vars(told).items() if key != "attention_backend"}


@cache
def _without_cuda() -> None:
    """Take tensors of the CPU for those of a GPU, and torch's Adam for Transformer Engine's.

    The latter counts steps in its groups; 0.16.1 cannot load what it saved of torch's.
    """
    tensor, kind = torch.tensor, torch.Tensor.type
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def filled(optimizer: Any, parameter: Any, state: dict[str, torch.Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][place]
        fill(optimizer, parameter, {**state, "step": optimizer.optimizer.state[main]["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = filled
    torch.tensor = lambda *values, device=None, **how: tensor(*values, **how)
    torch.Tensor.type = lambda one, *to: (  # type: ignore
        kind(one, *to) if to else kind(one).replace("torch.", "torch.cuda.")
    )


def _trained(recipe: Recipe, ranks: Ranks, seed: int) -> tuple[GPTModel, Any]:
    """Return a model and its optimizer after a step with gradients of *seed*."""
    model = build(recipe, ranks)
    _without_cuda()
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    config = OptimizerConfig(lr=0.01, use_distributed_optimizer=True, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(config, [wrapped])
    torch.manual_seed(seed)
    for parameter in wrapped.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape))
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
    return model, optimizer


def _state(
    model: GPTModel, optimizer: Any, metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    known = ensure_metadata_has_dp_cp_group(dict(metadata))
    state = model.sharded_state_dict(metadata=known)
    kept = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=known)
    return {"model": state, "optimizer": kept}


def _held(model: GPTModel, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the optimizer has, by the names that Megatron-Core gives it."""
    metadata = {**SPELLINGS["separate"], **FORM}
    state = _state(model, optimizer, metadata, is_loading=False)["optimizer"]
    apply_factories(state)
    for piece in _pieces(state):
        kept = VOCABULARY if "decoder" not in piece.key else None  # the others are padding
        yield f"{piece.key} {piece.global_offset}", piece.data[:kept].clone()
    groups = optimizer.chained_optimizers[0].state_dict()["optimizer"]["param_groups"]
    for number, group in enumerate(groups):
        yield f"group {number}", torch.tensor([group["lr"], group["step"]])
