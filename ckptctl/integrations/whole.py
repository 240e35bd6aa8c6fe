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
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import write_collectively
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import StateDict, flatten_state, path_to_keys, to_memoryview
from ckptctl.errors import StorageError
from ckptctl.formats import open_checkpoint
from ckptctl.ranks.coordinator import run_on_rank_zero
from ckptctl.storage.crc import crc32
from ckptctl.storage.destinations import resolve_destination
from ckptctl.storage.file_system import add_file, sync_directory
from ckptctl.storage.paths import expand_home
from ckptctl.storage.publish import stage_output
from ckptctl.tree import TreePath

RANK_PREFIX = re.compile(r"rank_\d+\.")
_own_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_all_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def create_single_rank_group() -> dist.ProcessGroup | None:
    """Return a process group of only this rank, or None if torch.distributed is not initialized.

    The group is created without the other ranks, for trainers in which one rank saves or loads
    everything.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    default = dist.group.WORLD
    assert default
    if default not in _own_groups:
        _own_groups.clear()
        rank = dist.get_rank()
        with compat.keep_group_counter():
            _own_groups[default] = dist.new_group(
                [rank], backend="gloo", use_local_synchronization=True
            )
    return _own_groups[default]


def create_all_ranks_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, which must all call this function.

    The first call creates the group.
    """
    default = dist.group.WORLD
    assert default
    if default not in _all_groups:
        _all_groups.clear()
        _all_groups[default] = dist.new_group(backend="gloo")
    return _all_groups[default]


def load_full_state_dict(path: TreePath) -> dict[str, Any]:
    """Load a checkpoint as a full, nested state dict in host memory, without collectives.

    If ranks saved different values, the values of this rank are loaded. Keys of dictionaries are
    strings, as in all DCP directories, so optimizer states need
    :func:`restore_optimizer_param_keys`.
    """
    catalog = open_checkpoint(path)
    flat: dict[str, Any] = {}
    keys: dict[str, tuple[str | int, ...]] = {}
    for name, entry in catalog.tensors.items():
        flat[name], keys[name] = allocate_zeros(entry.dtype, entry.shape), path_to_keys(entry.path)
    for name, blob in catalog.blobs.items():
        if not RANK_PREFIX.match(name):
            flat[name], keys[name] = None, path_to_keys(blob.path)
    state: dict[str, Any] = compat.unflatten_state_dict(flat, keys)
    load(state, path, collectives=False)
    return state


def load_full_model(
    path: Path, layout: str, model_type: str, process_group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Load the model of a checkpoint of any format to host memory, converted to *layout*."""
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_conversion(
            path, Path(folder) / "model.pt", to="torch", to_layout=layout, model_type=model_type
        )
    tensors = {tensor.name: allocate_zeros(tensor.dtype, tensor.shape) for tensor in plan.output}
    load(tensors, path, layout=layout, model_type=model_type, process_group=process_group)
    return tensors


def restore_optimizer_param_keys(state: Any) -> Any:
    """Restore the keys of optimizer states in *state* as ``Optimizer.state_dict`` returns them.

    ``Optimizer.state_dict`` uses the numbers or names in ``params`` as keys of ``state``. A DCP
    directory uses strings, and omits an empty ``state``.
    """
    if isinstance(state, list):
        return [restore_optimizer_param_keys(item) for item in state]
    if not isinstance(state, Mapping):
        return state
    restored = {key: restore_optimizer_param_keys(value) for key, value in state.items()}
    if "param_groups" in restored:
        original_keys = {
            str(key): key for group in restored["param_groups"] for key in group["params"]
        }
        restored["state"] = {
            original_keys.get(key, key): item for key, item in restored.get("state", {}).items()
        }
    return restored


def allocate_zeros(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Allocate a zero tensor, which uses no physical memory until it is written to."""
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def compute_shard_checksums(state: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the name, box and CRC-32 of each shard on this rank, to recognize an equal state."""
    return tuple(
        (shard.name, shard.box, crc32(to_memoryview(shard.tensor.cpu().contiguous())))
        for shard in flatten_state(state).shards
    )


def save_with_sidecar_files(
    state: StateDict,
    path: Path,
    files: Mapping[str, bytes],
    *,
    like: Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save *state* and small files on all ranks as one directory.

    An existing directory at *path* is replaced. *like* is None or a directory that this function
    wrote with the same tensors. If the file system supports hard links, the data files of *like*
    are linked instead of written again.
    """
    ranks = get_rank_collectives(process_group)
    linked = run_on_rank_zero(
        ranks, lambda: like is not None and _try_publish_hard_links(like, path, files)
    )
    if not ranks.broadcast(linked):
        write_collectively(state, path, ranks, SaveOptions(overwrite=True, beside=lambda: files))


def _try_publish_hard_links(source: Path, path: Path, files: Mapping[str, bytes]) -> bool:
    """Publish a checkpoint at *path* with hard links to the data files of *source*.

    Return False if the file system does not support hard links.
    """
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
