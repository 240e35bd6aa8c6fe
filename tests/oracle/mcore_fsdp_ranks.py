"""What ranks do with Megatron-FSDP: train, and save as Megatron-LM does (``fsdp_dtensor``).

Only ranks import this module. What stands in for CUDA holds no parameters.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import fsdp_dtensor_checkpoint as fsdp_checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh

from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import VOCABULARY, Ranks, Recipe
from tests.oracle.mcore_optimizer_ranks import _plain, _without_cuda
from tests.oracle.mcore_ranks import arguments
from tests.oracle.models import tokens


class _Device(str):
    """Device of the CPU that is called the first one of CUDA."""

    def __format__(self, specification: str) -> str:
        return "0"


class _Stream:
    """Stream or event of a device that has none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class _Precision(MegatronModule):  # type: ignore[misc]
    """``Float16Module`` of a model of float32, which is one more module in the names."""

    def __init__(self, module: Any) -> None:
        super().__init__(module.config)
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def state_dict(self, **options: Any) -> Any:
        return self.module.state_dict(**options)


@cache
def _without_streams() -> None:
    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(  # type: ignore
        lambda group, device_type, *rest, **options: from_group(group, "cpu", *rest, **options)
    )
    torch.cuda.current_device = lambda: _Device("cpu")  # type: ignore
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore
    torch.cuda.current_stream = _Stream  # type: ignore
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore
    FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda self: None


def save(rank: int, world: int, out: Path, recipe: Recipe, ranks: Ranks, run: str) -> None:
    """Train two steps, write the save *run*, train two more and write their losses."""
    torch.manual_seed(3)
    model = build(recipe, ranks)
    _without_cuda()
    _without_streams()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    model.config.calculate_per_token_loss = True  # or gloo would have to scale gradients
    wrapped = FullyShardedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
        ),
        _Precision(model),
        device=torch.device("cpu"),
    )
    config = OptimizerConfig(lr=0.01, use_distributed_optimizer=True, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
    for _ in range(2):
        _step(wrapped, optimizer)
    content = {
        "args": Namespace(**_plain(arguments(recipe, ranks)), consumed_train_samples=80),
        "checkpoint_version": 3.0,
        "iteration": 10,
        **_make_state(wrapped.module, optimizer),
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 80},
    }
    save_dcp(content, checkpoint_id=out / run)
    losses = [_step(wrapped, optimizer) for _ in range(2)]
    if rank == 0:
        torch.save(losses, out / f"losses-{run}.pt")


def _make_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what ``preprocess_fsdp_dtensor_state_dict`` of ``megatron.training`` makes.

    The *model* is that within ``FullyShardedDataParallel``.

    Norms get the names that they have in Transformer Engine's layers.
    """
    held = model.state_dict_for_save_checkpoint()
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    _add_empty_states(optimizer)
    kept = optimizer.sharded_state_dict(held, metadata=metadata)
    kept["state"] = dict(sorted(kept["state"].items()))  # ranks must split them in one order
    fsdp_checkpoint.handle_fp8_extra_state_case(held)
    if model.config.gated_linear_unit:
        held, kept = fsdp_checkpoint.handle_swiglu_in_state_dict(model, held, kept)
    held, kept = fsdp_checkpoint.handle_gdn_in_state_dict(model, held, kept)
    if model.config.num_moe_experts:
        held = fsdp_checkpoint.handle_experts_in_state_dict(held, model.config.num_moe_experts)
    names = _fused_norms(model)
    state = {
        "model": {names(key): value for key, value in held.items()},
        "optimizer": {
            part: {names(key): value for key, value in values.items()}
            for part, values in kept.items()
        },
    }
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def _add_empty_states(optimizer: Any) -> None:
    """Add the state of parameters of which this rank has nothing, as all ranks must save it."""
    states = optimizer.optimizer.state
    step = next(iter(states.values()))["step"]
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in states:
                assert parameter.to_local().numel() == 0
                states[parameter] = {
                    "step": step.clone(),
                    **{kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")},
                }


def _fused_norms(model: Any) -> Callable[[str], str]:
    pairs = [
        tuple(f".{name.removeprefix('module.module.')}.{part}" for part in (old, new))
        for name, layer in model.named_modules()
        if isinstance(layer, TransformerLayer)
        for old, new in layer.submodules_config.sharded_state_dict_keys_map.items()
    ]

    def rename(key: str) -> str:
        for old, new in pairs:
            key = key.replace(old, new)
        return key

    return rename


def _step(model: Any, optimizer: Any) -> float:
    ids = tokens()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    places = torch.arange(ids.shape[1]).expand_as(ids)
    logits = model(ids, places, None)[..., :VOCABULARY]  # of all tensor-parallel ranks
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    count = parallel_state.get_data_parallel_world_size()  # whose gradients are added
    torch.autograd.backward(loss / count)
    model.finish_grad_sync()
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
    return float(loss)
