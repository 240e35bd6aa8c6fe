"""A training checkpoint: model, AdamW moments, scheduler, data loader, counters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from tests.checkpoints.dcp import save_dcp

Style = Literal["torchtitan", "prefixed"]


def training_state(
    model: Mapping[str, torch.Tensor], style: Style = "torchtitan", seed: int = 7
) -> dict[str, Any]:
    """Return what a trainer hands to ``dcp.save`` after a few steps.

    Args:
        model: State dict of the model, any layout; floating tensors get moments.
        style: ``torchtitan``: the model's tensors at the top level beside ``optimizer``,
            ``lr_scheduler``, ``dataloader`` and ``train_state`` (torchtitan 0.3
            ``components/checkpointer/dcp.py``, optimizer state flattened by name).
            ``prefixed``: ``model``, ``optim`` (nested as
            ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns it), ``step``,
            ``rng``.
        seed: For the moments.
    """
    moments = _moments(model, seed)
    if style == "prefixed":
        return {
            "model": dict(model),
            "optim": {"state": moments, "param_groups": [_group() | {"params": list(moments)}]},
            "step": 41,
            "rng": torch.arange(16, dtype=torch.uint8),
        }
    optimizer: dict[str, Any] = {
        f"state.{name}.{part}": value
        for name, parts in moments.items()
        for part, value in parts.items()
    }
    for name in moments:
        optimizer |= {f"param_groups.{name}.{key}": value for key, value in _group().items()}
    return {
        **model,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": 41},
        "dataloader": {"dp_rank_0": b"position 1234"},
        "train_state": {"step": torch.tensor(41, dtype=torch.int32)},
    }


def save_training_dcp(
    folder: Path, model: Mapping[str, torch.Tensor], style: Style = "torchtitan"
) -> Path:
    """Write :func:`training_state` as one DCP directory and return *folder*."""
    return save_dcp(folder, training_state(model, style))


def _moments(model: Mapping[str, torch.Tensor], seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    moments = {}
    for name, value in model.items():
        if value.is_floating_point():
            average = torch.randn(value.shape, generator=generator) * 1e-3
            moments[name] = {
                "step": torch.tensor(41.0),
                "exp_avg": average,
                "exp_avg_sq": average.square() + 1e-8,
            }
    return moments


def _group() -> dict[str, Any]:
    return {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
