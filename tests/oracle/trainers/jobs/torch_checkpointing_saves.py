"""Save FSDP2 models with torch_checkpointing, with its metadata and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch_checkpointing as tc
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tests.oracle.trainers.jobs.torch_models import states, tensors
from tests.oracle.trainers.outcome import CHECKPOINT, keep
from tests.oracle.trainers.torch_cases import kinds


def save_all(rank: int, world: int, folder: str) -> None:
    _gather_without_cuda()
    for kind in kinds(world):
        if kind == "fsdp1":
            continue
        state, live = states(kind, rank, world)
        for name, resharder in (("metadata", DefaultResharder()), ("none", None)):
            case = Path(folder) / str(world) / kind / name
            if rank == 0:
                case.mkdir(parents=True)
            dist.barrier()
            _save(case, state, tc.ItemSpec(resharder=resharder))
            dist.barrier()
            if rank == 0:
                keep(case, "live", live["model"])
                keep(case, "all", tensors(live))


def _save(case: Path, state: dict[str, Any], spec: tc.ItemSpec) -> None:
    config = tc.CheckpointManager.Config.with_sync_save()
    config.items = {"model": spec, "optim": spec}
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    manager.save(str(case / CHECKPOINT), state | {"step": 2})
    manager.close()


def _gather_without_cuda() -> None:
    """Replace the one collective of 0.1.1 that takes CUDA for granted."""

    def gather(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, data, group=process_group)
        return dict(enumerate(found))

    DefaultMetadataManager._all_gather_pickled_data = gather
