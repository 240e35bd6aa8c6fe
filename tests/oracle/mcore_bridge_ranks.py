"""Megatron-Bridge's own ``load_checkpoint`` on a CPU rank: a base model, then an adapter on it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.oracle.mcore_bridge import peft_of, stand_in
from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import Ranks, Recipe
from tests.oracle.mcore_ranks import inner, keep, logits


def loaded(rank: int, world: int, out: Path, recipe: Recipe, base: Path, adapter: Path) -> None:
    """Load *base*, then *adapter*; write the logits, ``bridge-base.pt``, ``bridge-adapter.pt``."""
    assert (rank, world) == (0, 1)
    model = build(recipe, Ranks())
    checkpointing, state = _training()
    state.cfg = _settings(model.config, base)
    checkpointing.load_checkpoint(state, [model], None, None, strict=True)
    keep(logits(model), out / "bridge-base.pt")
    peft = peft_of(inner(adapter) / "run_config.yaml")
    peft(model, training=False)
    peft.set_params_to_save(model)
    state.cfg = _settings(model.config, adapter, pretrained=base, peft=peft)
    checkpointing.load_checkpoint(state, [model], None, None, strict=True)
    keep(logits(model), out / "bridge-adapter.pt")


def _training() -> tuple[ModuleType, Any]:
    """Return Bridge's checkpointing and the state of a training that has not begun."""
    stated = metadata.version
    vars(metadata)["version"] = lambda name: "2.9.0" if "engine" in name else stated(name)
    stand_in()
    made: Callable[..., torch.Tensor] = torch.tensor
    torch.tensor = lambda *values, device=None, **more: made(*values, **more)  # it asks for CUDA
    init_num_microbatches_calculator(0, None, 1, 1, 1, False)
    checkpointing = import_module("megatron.bridge.training.checkpointing")
    vars(checkpointing)["restore_modelopt_state"] = lambda *_, **__: None
    train_state = import_module("megatron.bridge.training.state").TrainState()
    loggers = ("wandb_logger", "mlflow_logger", "tensorboard_logger", "comet_logger")
    return checkpointing, SimpleNamespace(train_state=train_state, **dict.fromkeys(loggers))


def _settings(
    model: TransformerConfig, folder: Path, *, pretrained: Path | None = None, peft: Any = None
) -> SimpleNamespace:
    """Return what ``load_checkpoint`` looks at of Bridge's configuration, with its defaults."""
    checkpoint = SimpleNamespace(
        ckpt_format="torch_dist",
        load=str(folder),
        pretrained_checkpoint=pretrained and str(pretrained),
        finetune=False,
        load_rng=True,
        load_optim=True,
        save_rng=True,
        save_optim=True,
        ckpt_step=None,
        non_persistent_global_ckpt_dir=None,
        non_persistent_ckpt_type=None,
        exit_on_missing_checkpoint=True,
        fully_parallel_load=False,
        fully_parallel_save=False,
        dist_ckpt_strictness="assume_ok_unexpected",
        use_persistent_ckpt_worker=False,
    )
    return SimpleNamespace(
        checkpoint=checkpoint,
        peft=peft,
        model=model,
        rng=SimpleNamespace(data_parallel_random_init=False),
        optimizer=SimpleNamespace(use_distributed_optimizer=False),
        dist=SimpleNamespace(),
        ddp=SimpleNamespace(),
    )
