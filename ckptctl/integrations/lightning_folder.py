"""Lightning's checkpoints as directories: their parts, and ``meta.pt`` published with the data."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptctl.distributed.group import coordinator
from ckptctl.distributed.saving.destination import SaveOptions
from ckptctl.distributed.saving.save import write
from ckptctl.distributed.state import StateDict, memory, state_of
from ckptctl.errors import StorageError, UsageError
from ckptctl.ops.destinations import replaceable
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.storage.crc import crc32
from ckptctl.storage.destinations import destination
from ckptctl.storage.file_system import add_file, sync_directory
from ckptctl.storage.publish import staging

META = "meta.pt"
MODEL = "state_dict"
OPTIMIZERS = "optimizer_states"
OPTIMIZER = "optimizer_"


def parts(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts, for the directory's data, and the rest."""
    states = checkpoint.get(OPTIMIZERS, ())
    state = {MODEL: checkpoint[MODEL]}
    state |= {f"{OPTIMIZER}{number}": one for number, one in enumerate(states)}
    return state, {key: one for key, one in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}


def fingerprint(state: Mapping[str, Any]) -> tuple[object, ...]:
    """Return CRC-32 of this rank's shards: with the trainer's progress, the identity of a save."""
    return tuple(
        (shard.name, shard.box, crc32(memory(shard.tensor.cpu().contiguous())))
        for shard in state_of(state).shards
    )


def read_rest(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the content of ``meta.pt``, which lies beside the tensors."""
    found: dict[str, Any] = torch.load(path / META, "cpu", weights_only=weights_only)
    return found


def pickled(rest: Mapping[str, Any]) -> bytes:
    """Return the content of ``meta.pt``."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def require_none(storage_options: object) -> None:
    """Refuse options that nothing here understands."""
    if storage_options is not None:
        raise UsageError("`storage_options` are not supported", hint="leave them out")


def save_beside(
    state: StateDict,
    path: Path,
    files: Mapping[str, bytes],
    *,
    like: Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save *state* and small files as one directory, in place of any there; all ranks call it.

    Args:
        state: See :func:`ckptctl.save`.
        path: Where the directory will appear.
        files: Name and content of the files; rank 0's count.
        like: A directory that was made by this function from the same tensors: its data get a
            second name (hard links) where the file system can do that. None: write them.
        process_group: The ranks.
    """
    ranks = coordinator(process_group)
    linked = on_first(ranks, lambda: like is not None and _linked(like, path, files))
    if not ranks.broadcast(linked):
        write(state, path, ranks, SaveOptions(overwrite=True, beside=lambda: files))


def _linked(source: Path, path: Path, files: Mapping[str, bytes]) -> bool:
    """Publish the data of *source* under a second name; return whether the file system can."""
    target = destination(path.expanduser().absolute())
    with staging(target, overwrite=True, is_checkpoint=replaceable) as stage:
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
