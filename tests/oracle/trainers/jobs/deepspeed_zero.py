"""Train and save with DeepSpeed, one checkpoint per case."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)

from tests.oracle.trainers.deepspeed_cases import CASES, MOMENTS, Case
from tests.oracle.trainers.jobs.environment import announce, without_compiling
from tests.oracle.trainers.model import TIED, Model, tokens
from tests.oracle.trainers.outcome import CHECKPOINT, attempt, keep


def save_all(rank: int, world: int, folder: str) -> None:
    announce(rank, world)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch can, on any CPU
    without_compiling()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    for name, case in CASES.items():
        save(rank, Path(folder) / f"{world}" / name, case)


def save(rank: int, folder: Path, case: Case) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    engine = _trained(rank, case)
    engine.save_checkpoint(str(folder / CHECKPOINT), tag="step", client_state={"note": "mine"})
    states = _live(engine, case)
    if rank == 0:
        for name, state in states.items():
            keep(folder, name, state)
        _run_peers(folder)
    torch.distributed.barrier()


def _trained(rank: int, case: Case) -> Any:
    torch.manual_seed(0)
    model = Model(case.tied, case.frozen)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=_groups(model, case.groups),
        config=_config(case),
        dist_init_required=False,
    )
    for step in range(2):
        engine.backward(engine(tokens(rank, step)))
        engine.step()
    return engine


def _groups(model: Model, count: int) -> Any:
    trained = [one for one in model.parameters() if one.requires_grad]
    if count == 1:
        return trained
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]


def _config(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage} | case.zero,
        "bf16": {"enabled": case.dtype == "bf16"},
        "fp16": {"enabled": case.dtype == "fp16", "initial_scale_power": 4},
    } | case.config


def _live(engine: Any, case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """Return what the module holds, the masters, and the moments, by DeepSpeed's own accessors."""
    _link_moments(engine.optimizer)
    module = dict(engine.module.named_buffers())
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    for name, one in parameters.items():
        with deepspeed.zero.GatheredParameters([one], enabled=case.stage == 3):
            module[name] = one.detach().clone()
    trained = {name: one for name, one in parameters.items() if one.requires_grad and case.stage}
    masters = {name: safe_get_full_fp32_param(one) for name, one in trained.items()}
    moments = {
        f"{name}.{key}": safe_get_full_optimizer_state(one, key)
        for name, one in trained.items()
        for key in MOMENTS
        if not (case.tied and name == TIED)
    }
    return {"module": module, "master": module | masters, "moments": moments}


def _link_moments(optimizer: Any) -> None:
    """DeepSpeed 0.19.8 does so once, after the first group's first step, when others have none."""
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _run_peers(folder: Path) -> None:
    source = str(folder / CHECKPOINT)
    with contextlib.redirect_stdout(None):
        attempt(folder, "zero_to_fp32", lambda: get_fp32_state_dict_from_zero_checkpoint(source))
        attempt(folder, "safetensors", lambda: _safetensors(source, folder / "peer"))
        attempt(folder, "universal", lambda: _universal(folder))


def _safetensors(source: str, target: Path) -> dict[str, torch.Tensor]:
    convert_zero_checkpoint_to_fp32_state_dict(source, str(target), safe_serialization=True)
    return {}


def _universal(folder: Path) -> dict[str, torch.Tensor]:
    target = folder / "universal" / CHECKPOINT
    arguments = argparse.Namespace(
        input_folder=str(folder / CHECKPOINT / "step"),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    to_universal(arguments)
    files = sorted((target / "zero").rglob("fp32.pt"))
    found = {}
    for file in files:
        content = torch.load(file, weights_only=False)
        name = str(file.parent.relative_to(target / "zero"))
        found[name] = content["param"] if isinstance(content, dict) else content
    return found
