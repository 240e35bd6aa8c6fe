"""What ranks do with optimizer state that Megatron-Core saves by ranges: save it, and train on.

Gradients are those of a loss, the same on all data-parallel ranks, so that nothing is reduced.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import VOCABULARY, Ranks, Recipe
from tests.oracle.mcore_optimizer_ranks import _plain, _state, _without_cuda
from tests.oracle.mcore_ranks import ITERATION, SPELLINGS, arguments, inner
from tests.oracle.models import tokens

BY_RANGES = {
    "distrib_optim_sharding_type": "dp_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""The default of Megatron-LM since 0.17."""


def save(
    rank: int, world: int, out: Path, recipe: Recipe, ranks: Ranks, spelling: str, name: str
) -> None:
    """Train two steps, write the run *name*, train two more and write their losses."""
    model, optimizer = _made(recipe, ranks, seed=3)
    for _ in range(2):
        step(model, optimizer)
    target = out / name / ITERATION
    if rank == 0:
        target.mkdir(parents=True)
        (out / name / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    metadata = {**SPELLINGS[spelling], **BY_RANGES}
    content = {
        "args": Namespace(**_plain(arguments(recipe, ranks)), consumed_train_samples=80),
        "checkpoint_version": 3.0,
        "iteration": 10,
        **_state(model.module, optimizer, metadata, is_loading=False),
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 80},
    }
    dist_checkpointing.save(content, str(target), ("torch_dist", 1), content_metadata=metadata)
    losses = [step(model, optimizer) for _ in range(2)]
    if rank == 0:
        torch.save(losses, out / f"losses-{name}.pt")


def resume(
    rank: int,
    world: int,
    out: Path,
    recipe: Recipe,
    ranks: Ranks,
    names: list[str],
    expert_scale: float = 1.0,
) -> None:
    """Load each run in *names* into a model of other values, and train two steps.

    Gradients of divided experts are multiplied by *expert_scale*.
    """
    for name in names:
        model, optimizer = _made(recipe, ranks, seed=4)
        step(model, optimizer)
        target = str(inner(out / name))
        metadata = dist_checkpointing.load_content_metadata(target)
        wanted = _state(model.module, optimizer, metadata, is_loading=True)
        state, missing, unexpected = dist_checkpointing.load(wanted, target, strict="return_all")
        problems = {key for key in (*missing, *unexpected) if "_extra_state" not in key}
        assert not problems, problems
        assert state["iteration"] == 10
        model.module.load_state_dict(state["model"], strict=False)
        with torch.no_grad():  # the master weights of float32 models are views of the weights
            optimizer.load_state_dict(state["optimizer"])
        for part in optimizer.chained_optimizers:
            for moments in part.optimizer.state.values():
                moments["step"] = moments["step"].clone()  # or all parameters count in one tensor
        losses = [step(model, optimizer, expert_scale) for _ in range(2)]
        if rank == 0:
            torch.save(losses, out / f"losses-{name}-resumed-{ranks}.pt")


def _made(recipe: Recipe, ranks: Ranks, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = build(recipe, ranks)
    _without_cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=5000),
        model,
    )
    config = OptimizerConfig(lr=0.01, use_distributed_optimizer=True, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
    return wrapped, optimizer


def step(model: Any, optimizer: Any, expert_scale: float = 1.0) -> float:
    """Train a step, and return its loss."""
    ids = tokens()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    places = torch.arange(ids.shape[1]).expand_as(ids)
    logits = model.module(ids, places, None)[..., :VOCABULARY]  # of all tensor-parallel ranks
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    torch.autograd.backward(loss)
    for name, parameter in model.module.named_parameters():
        if parameter.grad is not None:
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        if not getattr(parameter, "allreduce", True):
            parameter.main_grad.mul_(expert_scale)
        if "q_layernorm" in name or "k_layernorm" in name:  # each rank has other heads
            dist.all_reduce(
                parameter.main_grad, group=parallel_state.get_tensor_model_parallel_group()
            )
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    return float(loss)
