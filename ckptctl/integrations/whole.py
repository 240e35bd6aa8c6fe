"""Full state dicts and checkpoints with sidecar files, shared by the integrations."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptctl.api.conversion import plan_conversion
from ckptctl.conversion.destinations import is_replaceable
from ckptctl.distributed import compat
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import write
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict, keys_of, memory, state_of
from ckptctl.errors import StorageError
from ckptctl.formats import open_checkpoint
from ckptctl.ranks.coordinator import on_first
from ckptctl.storage.crc import crc32
from ckptctl.storage.destinations import resolve_destination
from ckptctl.storage.file_system import add_file, sync_directory
from ckptctl.storage.paths import expand_home
from ckptctl.storage.publish import stage_output
from ckptctl.tree import TreePath

RANKS_OWN = re.compile(r"rank_\d+\.")
_own: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_all: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def own_group() -> dist.ProcessGroup | None:
    """Return a group of only this rank, created without the others, or None for a single process.

    It is for trainers in which one rank saves or loads everything.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    default = dist.group.WORLD
    assert default
    if default not in _own:
        _own.clear()
        rank = dist.get_rank()
        _own[default] = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    return _own[default]


def all_ranks() -> dist.ProcessGroup:
    """Return a gloo group of all ranks. All of them call this."""
    default = dist.group.WORLD
    assert default
    if default not in _all:
        _all.clear()
        _all[default] = dist.new_group(backend="gloo")
    return _all[default]


def whole(path: TreePath) -> dict[str, Any]:
    """Load a checkpoint as a full, nested state dict in host memory, without collectives.

    Values that differ between ranks are those of this rank. Keys of dictionaries are strings, as in
    all DCP directories; optimizer states need :func:`with_numbers`.
    """
    catalog = open_checkpoint(path)
    flat: dict[str, Any] = {}
    keys: dict[str, tuple[str | int, ...]] = {}
    for name, entry in catalog.tensors.items():
        flat[name], keys[name] = empty(entry.dtype, entry.shape), keys_of(entry.path)
    for name, blob in catalog.blobs.items():
        if not RANKS_OWN.match(name):
            flat[name], keys[name] = None, keys_of(blob.path)
    found: dict[str, Any] = compat.unflatten_state_dict(flat, keys)
    load(found, path, collectives=False)
    return found


def whole_model(
    path: Path, layout: str, model_type: str, process_group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Load the model of a checkpoint of any format in another layout, in host memory."""
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_conversion(
            path, Path(folder) / "model.pt", to="torch", to_layout=layout, model_type=model_type
        )
    found = {one.name: empty(one.dtype, one.shape) for one in plan.output}
    load(found, path, layout=layout, model_type=model_type, process_group=process_group)
    return found


def with_numbers(state: Any) -> Any:
    """Restore nested optimizer states in *state* to the form of ``Optimizer.state_dict``.

    There, the keys of ``state`` are the numbers or names that ``params`` lists. A DCP directory has
    strings as keys, and no ``state`` at all if it is empty.
    """
    if isinstance(state, list):
        return [with_numbers(one) for one in state]
    if not isinstance(state, Mapping):
        return state
    found = {key: with_numbers(value) for key, value in state.items()}
    if "param_groups" in found:
        known = {str(key): key for group in found["param_groups"] for key in group["params"]}
        found["state"] = {known.get(key, key): one for key, one in found.get("state", {}).items()}
    return found


def empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Allocate zeros, which take no physical memory until they are written."""
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def fingerprint(state: Mapping[str, Any]) -> tuple[object, ...]:
    """Compute the CRC-32 of each of this rank's shards, to recognize an equal state."""
    return tuple(
        (shard.name, shard.box, crc32(memory(shard.tensor.cpu().contiguous())))
        for shard in state_of(state).shards
    )


def save_beside(
    state: StateDict,
    path: Path,
    files: Mapping[str, bytes],
    *,
    like: Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save *state* and small files as one directory, replacing any. All ranks call it.

    *like* is a directory that this function wrote with the same tensors. If the file system
    supports it, its data files are hard-linked instead of written again.
    """
    ranks = coordinator(process_group)
    linked = on_first(ranks, lambda: like is not None and _linked(like, path, files))
    if not ranks.broadcast(linked):
        write(state, path, ranks, SaveOptions(overwrite=True, beside=lambda: files))


def _linked(source: Path, path: Path, files: Mapping[str, bytes]) -> bool:
    """Publish hard links to the data of *source*, and return whether the file system can."""
    target = resolve_destination(expand_home(path).absolute())
    with stage_output(target, overwrite=True, restart=True, is_checkpoint=is_replaceable) as stage:
        try:
            for item in source.iterdir():
                if item.name not in files:
                    os.link(item, stage.data / item.name)
            sync_directory(stage.data)
        except (OSError, StorageError):
            return False
        for name, content in files.items():
            add_file(stage.data / name, [content], sync=True)
        stage.publish()
    return True
