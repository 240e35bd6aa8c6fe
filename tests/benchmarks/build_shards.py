"""Write what two ranks leave behind, in every form that ``ckptctl consolidate`` reads.

Used by :mod:`tests.benchmarks.build`, with a Python that has the form's own library.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.template import Shapes, tensor
from tests.gloo import run_on_ranks

WORLD = 2


def write(form: str, folder: Path, shapes: Shapes, template: Path) -> None:
    """Write one source into *folder*.

    Args:
        form: One of :data:`FORMS`.
        folder: Is there.
        shapes: Of the tensors.
        template: See :mod:`tests.benchmarks.template`.
    """
    writer = FORMS[form]
    arguments = (str(folder), dict(shapes), str(template))
    if writer in (_zero, _snapshot):
        writer(0, 1, form, *arguments)
    else:
        place = f"{__name__}:{writer.__name__}"
        run_on_ranks(place, [WORLD], form, *arguments, timeout=1800)


def _sharded(form: str, world: int, shapes: Shapes, template: str) -> dict[str, Any]:
    """Return this rank's DTensors; ``-columns`` divides matrices on their last dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    state = {}
    for name, shape in shapes.items():
        dim = _get_dimension(form, shape)
        local = list(shape)
        local[dim] //= world
        part = tensor(tuple(local), Path(template))
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(
            part, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return state


def _get_dimension(form: str, shape: tuple[int, ...]) -> int:
    return len(shape) - 1 if form.endswith("-columns") else 0


def _dcp(rank: int, world: int, form: str, folder: str, shapes: Shapes, template: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _sharded(form, world, shapes, template)
    save(state, checkpoint_id=folder, use_collectives=not form.startswith("dcp-rank-local"))


def _hf(rank: int, world: int, form: str, folder: str, shapes: Shapes, template: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(folder, dict.fromkeys(shapes, 1), save_distributed=True)
    save(_sharded(form, world, shapes, template), storage_writer=writer)
    if rank == 0:
        _describe_to_torch_checkpointing(form, world, Path(folder), shapes)


def _describe_to_torch_checkpointing(form: str, world: int, folder: Path, shapes: Shapes) -> None:
    """Write the ``metadata.pkl`` with which torch_checkpointing consolidates the same shards.

    Its own writer gathers metadata on a GPU (``torch_checkpointing`` 0.1.1).
    """
    ranks = tuple(range(world))
    mesh = {
        "device_type": "cpu",
        "mesh_shape": (world,),
        "mesh_data": ranks,
        "mesh_dim_names": None,
    }
    entries = {}
    for name, shape in shapes.items():
        data = {
            "global_shape": tuple(shape),
            "dtype": "torch.bfloat16",
            "stride": torch.empty(shape, device="meta").stride(),
            "mesh_spec": mesh,
            "placements": [{"type": "Shard", "dim": _get_dimension(form, shape)}],
        }
        metadata = {"type": "DTensorShardingMetadata", "data": data}
        path = json.dumps([name], separators=(",", ":"))
        entries[path] = [{"ranks": ranks, "sharding_metadata": metadata}]
    layouts = {
        rank: {
            "file_path": f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            "serialization_format": {"type": "SafetensorsSerialization"},
        }
        for rank in ranks
    }
    model = {"nested_path_to_metadata": entries, "rank_to_layout_info": layouts}
    content = {"version": "2.0", "world_size": world, "metadata": {"model": model}}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(content, 4))


def _files(rank: int, world: int, form: str, folder: str, shapes: Shapes, template: str) -> None:
    state = _sharded(form, world, shapes, template)
    torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")


def _torch_checkpointing(
    rank: int, world: int, form: str, folder: str, shapes: Shapes, template: str
) -> None:
    library = import_module("torch_checkpointing")
    saver = import_module("torch_checkpointing.config").SyncCheckpointSaverConfig()
    manager = library.CheckpointManager(library.CheckpointManager.Config(save=saver))
    manager.save(f"{folder}/step-1", {"model": _sharded(form, world, shapes, template)})
    manager.close()


def _snapshot(rank: int, world: int, form: str, folder: str, shapes: Shapes, template: str) -> None:
    library = import_module("torchsnapshot")
    state = {name: tensor(shape, Path(template)) for name, shape in shapes.items()}
    library.Snapshot.take(f"{folder}/snap", {"app": library.StateDict(**state)})


def _zero(rank: int, world: int, form: str, folder: str, shapes: Shapes, template: str) -> None:
    """Write fp32 master weights without moments, with the keys that ``zero_to_fp32`` reads."""
    step = Path(folder, "global_step1")
    step.mkdir()
    Path(folder, "latest").write_text("global_step1")
    sizes = OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())
    numel = sum(size.numel() for size in sizes.values())
    model = {
        "module": OrderedDict(),
        "buffer_names": [],
        "param_shapes": [sizes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": int(form[-1])}},
        "dp_world_size": WORLD,
        "mp_world_size": 1,
    }
    if form == "zero3":
        numel = sum(-(-size.numel() // WORLD) for size in sizes.values())
    part = numel if form == "zero3" else -(-numel // (2 * WORLD)) * 2
    flat = torch.from_file(f"{folder}.flat", shared=True, size=part, dtype=torch.float32)
    flat.copy_(torch.arange(part, dtype=torch.float32))
    names = [f"zero_pp_rank_{r}_mp_rank_00" for r in range(WORLD)]
    for name in names if form == "zero3" else ["mp_rank_00"]:
        torch.save(model, step / f"{name}_model_states.pt")
    for name in names:
        torch.save(_optimizer(form, flat, part * WORLD - numel), step / f"{name}_optim_states.pt")
    Path(f"{folder}.flat").unlink()


def _optimizer(form: str, flat: torch.Tensor, padding: int) -> dict[str, Any]:
    stage = int(form[-1])
    state: dict[str, Any] = {"zero_stage": stage, "loss_scaler": None, "overflow": False}
    if stage == 3:
        state |= {"partition_count": WORLD, "fp32_flat_groups": [flat]}
        state["optimizer_state_dict"] = {"state": {}, "param_groups": []}
    else:
        state |= {
            "base_optimizer_state": {"state": {}, "param_groups": []},
            "single_partition_of_fp32_groups": [flat],
            "group_paddings": [0],
            "partition_count": [WORLD],
            "ds_version": "0.19.8",
        }
    return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}


FORMS: dict[str, Callable[..., None]] = {
    "dcp": _dcp,
    "dcp-columns": _dcp,
    "dcp-rank-local": _dcp,
    "hf-rank-shards": _hf,
    "hf-rank-shards-columns": _hf,
    "rank-files": _files,
    "rank-files-columns": _files,
    "zero1": _zero,
    "zero3": _zero,
    "torch-checkpointing": _torch_checkpointing,
    "torchsnapshot": _snapshot,
}
