"""Save with every writer that torch has, and let torch's own tools make it whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint._experimental.builder import make_sync_checkpointer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tests.checkpoints.readers import load_any_reference
from tests.oracle.trainers.jobs.torch_models import states, tensors
from tests.oracle.trainers.model import TIED
from tests.oracle.trainers.outcome import CHECKPOINT, attempt, keep
from tests.oracle.trainers.torch_cases import kinds, writers

State = dict[str, Any]


def save_all(rank: int, world: int, folder: str) -> None:
    """Save every kind of model with every writer below ``folder/world/kind/writer``."""
    for kind in kinds(world):
        state, live = states(kind, rank, world)
        for writer in writers(kind):
            case = Path(folder) / str(world) / kind / writer
            if rank == 0:
                case.mkdir(parents=True)
            dist.barrier()
            SAVE[writer](str(case / CHECKPOINT), state)
            dist.barrier()
            if rank == 0:
                _keep(case, live)
                _run_peer(case)
            dist.barrier()


def _keep(case: Path, live: State) -> None:
    chosen = {"hf_shards": _untied, "hf_floats": _floats}.get(case.name, dict)
    keep(case, "live", chosen(live["model"]))
    if chosen is dict:
        keep(case, "all", tensors(live))


def _run_peer(case: Path) -> None:
    make = PEERS.get(case.name)
    if make:
        attempt(case, "peer", lambda: make(case / CHECKPOINT))
    if case.name == "hf_floats":
        first = min((case / CHECKPOINT).iterdir())
        without = shutil.copytree(case / CHECKPOINT, case / "short", ignore=lambda *_: [first.name])
        attempt(case, "short", lambda: _to_safetensors(without))


def _untied(model: State) -> State:
    """Return *model* without what safetensors refuses to write twice."""
    return {name: value for name, value in model.items() if name != TIED}


def _floats(model: State) -> State:
    """Return what torch's consolidation does not fail on, and a tensor of no dimension."""
    floats = {name: value for name, value in _untied(model).items() if value.is_floating_point()}
    return floats | {"temperature": torch.tensor(0.25)}


def _dcp(folder: str, state: State) -> None:
    save(state, checkpoint_id=folder)


def _asynchronous(folder: str, state: State) -> None:
    saving = async_save(state, checkpoint_id=folder)
    assert isinstance(saving, Future)
    saving.result()


def _rank_local(folder: str, state: State) -> None:
    save(state, checkpoint_id=folder, use_collectives=False)


def _shards(folder: str, state: State) -> None:
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    save(_untied(state["model"]), storage_writer=writer)


def _float_shards(folder: str, state: State) -> None:
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    save(_floats(state["model"]), storage_writer=writer)


def _experimental(folder: str, state: State) -> None:
    make_sync_checkpointer().save(folder, state)


def _files(folder: str, state: State) -> None:
    Path(folder).mkdir(exist_ok=True)
    torch.save(state, f"{folder}/rank{dist.get_rank()}.pt")


SAVE: dict[str, Callable[[str, State], None]] = {
    "dcp": _dcp,
    "async": _asynchronous,
    "rank_local": _rank_local,
    "hf_shards": _shards,
    "hf_floats": _float_shards,
    "experimental": _experimental,
    "files": _files,
}


def _to_torch(source: Path) -> State:
    target = source.parent / "peer.pt"
    dcp_to_torch_save(source, target)
    return tensors(torch.load(target, weights_only=False))


def _to_safetensors(source: Path) -> State:
    target = source.parent / f"{source.name}_whole"
    target.mkdir()
    names = dict.fromkeys(_names(source), 1)
    consolidate_safetensors_files(str(source), str(target), names)
    return load_any_reference(target)


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    found: dict[str, None] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys())
    return list(found)


PEERS: dict[str, Callable[[Path], State]] = {
    "dcp": _to_torch,
    "async": _to_torch,
    "rank_local": _to_torch,
    "hf_shards": _to_safetensors,
    "hf_floats": _to_safetensors,
}
