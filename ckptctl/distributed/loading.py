"""Loading any checkpoint into a state dict whose tensors may be sharded over ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from ckptctl import formats
from ckptctl.catalog import memory_name
from ckptctl.distributed.state import State, StateDict, memory, state_of
from ckptctl.ops.loading import LoadPlan, Target, Wanted, plan_load
from ckptctl.storage.executor import ExecutionOptions, execute


def load(state_dict: StateDict, path: str | Path) -> LoadPlan:
    """Fill the tensors of *state_dict* in place."""
    state = state_of(state_dict)
    catalog = formats.open_checkpoint(path)
    wanted, tensors = wanted_of(state)
    plan = plan_load(catalog, wanted)
    staged = {
        key: tensor if tensor.device.type == "cpu" else tensor.cpu()
        for key, tensor in tensors.items()
    }
    views = {memory_name(key): memory(tensor) for key, tensor in staged.items()}
    execute(
        plan.plan, Path(catalog.root), ExecutionOptions(sync=False), lambda _: None, memory=views
    )
    for key, tensor in tensors.items():
        if staged[key] is not tensor:
            tensor.copy_(staged[key])
    return plan


def wanted_of(state: State) -> tuple[dict[str, Wanted], dict[str, torch.Tensor]]:
    """Return what is wanted, and the tensors that its memory is."""
    tensors: dict[str, torch.Tensor] = {}
    wanted: dict[str, Wanted] = {}
    for name, held in state.tensors.items():
        targets = []
        for piece in held.pieces:
            key = str(len(tensors))
            tensors[key] = piece.tensor
            targets.append(Target(piece.box, key, tuple(piece.tensor.stride())))
        wanted[name] = Wanted(held.described.dtype, held.described.shape, tuple(targets))
    return wanted, tensors
