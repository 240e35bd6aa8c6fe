"""Lightning: checkpoint directories, written by all ranks and published atomically.

The files are compatible with those of ``ModelParallelStrategy`` in both directions: the model is
``state_dict``, optimizers are ``optimizer_N``, and everything else is in ``meta.pt``
(``lightning/pytorch/strategies/model_parallel.py``).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.loading.load import load
from ckptctl.errors import UsageError
from ckptctl.integrations.whole import (
    compute_shard_checksums,
    create_single_rank_group,
    load_full_state_dict,
    restore_optimizer_param_keys,
    save_with_sidecar_files,
)
from ckptctl.storage import trash
from ckptctl.storage.paths import resolve_links

META_FILE = "meta.pt"
MODEL = "state_dict"
OPTIMIZERS = "optimizer_states"
OPTIMIZER = "optimizer_"


class DirectoryCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Checkpoint directories of one process: ``Trainer(plugins=[DirectoryCheckpointIO()])``.

    For strategies in which rank 0 has the full state (single device, DDP). Use
    :class:`ShardedStrategy` for other strategies.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write *checkpoint* atomically as a directory.

        Args:
            checkpoint: Checkpoint of Lightning.
            path: Destination.
            storage_options: Not supported.

        Raises:
            CkptError: The save failed, and nothing was published.
        """
        require_no_storage_options(storage_options)
        state, rest = split_checkpoint(checkpoint)
        save_with_sidecar_files(
            state,
            Path(path),
            {META_FILE: pickle_meta(rest)},
            process_group=create_single_rank_group(),
        )

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint directory, or a file of Lightning's CheckpointIO, to host memory.

        Args:
            path: Path of the checkpoint.
            map_location: Only for files. Lightning copies to devices itself.
            weights_only: If False, objects may run code when they are unpickled.

        Raises:
            CkptError: The checkpoint cannot be read.
        """
        if Path(path).is_file():
            checkpoint_io = TorchCheckpointIO()
            checkpoint: dict[str, Any] = checkpoint_io.load_checkpoint(
                path, map_location, weights_only
            )
            return checkpoint
        source = resolve_links(Path(path))
        state = restore_optimizer_param_keys(load_full_state_dict(source))
        optimizers = [key for key in state if key.startswith(OPTIMIZER)]
        optimizers.sort(key=lambda key: int(key.removeprefix(OPTIMIZER)))
        rest = read_meta(source, weights_only)
        return {MODEL: state[MODEL], OPTIMIZERS: [state[key] for key in optimizers], **rest}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Rename a checkpoint so that it is no longer visible, and then remove it."""
        trash.delete_permanently(Path(path))


class ShardedStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 and TP with checkpoints by ``ckptctl``: ``Trainer(strategy=ShardedStrategy(...))``.

    Every rank writes its shards to one directory, which is published atomically and can be loaded
    on any number of ranks. A further checkpoint of the same state, as by ``save_last=True``, gets
    hard links to the data of the previous one and a separate ``meta.pt``. It does not depend on the
    previous one, which top-k may remove.

    Args:
        **options: Options of ``ModelParallelStrategy``, except ``save_distributed_checkpoint``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=True, **options)
        self._last: tuple[object, Path] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save the state of all ranks, as :meth:`DirectoryCheckpointIO.save_checkpoint` does."""
        require_no_storage_options(storage_options)
        path = Path(self.broadcast(filepath)).absolute()
        state, rest = split_checkpoint(checkpoint)
        identity = (checkpoint.get("loops"), compute_shard_checksums(state))
        is_same_state = all(
            get_rank_collectives().all_gather(bool(self._last and self._last[0] == identity))
        )
        like = self._last[1] if is_same_state and self._last else None
        save_with_sidecar_files(state, path, {META_FILE: pickle_meta(rest)}, like=like)
        self._last = (identity, path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and the optimizers, and return all other entries of the checkpoint.

        Args:
            checkpoint_path: Path of the checkpoint.
            weights_only: If False, objects may run code when they are unpickled.

        Raises:
            CkptError: The checkpoint cannot be loaded. The error is raised on every rank.
        """
        path = resolve_links(Path(self.broadcast(checkpoint_path)))
        if path.is_file():
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return checkpoint
        state: dict[str, Any] = {MODEL: get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self.optimizers):
            state[f"{OPTIMIZER}{number}"] = get_optimizer_state_dict(self.model, optimizer)
        load(state, path, strict=self.lightning_module.strict_loading)
        set_model_state_dict(self.model, state[MODEL])
        for number, optimizer in enumerate(self.optimizers):
            optimizer_state = state[f"{OPTIMIZER}{number}"]
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=optimizer_state)
        return read_meta(path, weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """On rank 0, rename a checkpoint so that it is no longer visible, and then remove it."""
        if self.is_global_zero:
            trash.delete_permanently(Path(filepath))


def split_checkpoint(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a checkpoint into the state dicts of model and optimizers, and all other entries."""
    states = checkpoint.get(OPTIMIZERS, ())
    state = {MODEL: checkpoint[MODEL]}
    state |= {
        f"{OPTIMIZER}{number}": optimizer_state for number, optimizer_state in enumerate(states)
    }
    return state, {
        key: optimizer_state
        for key, optimizer_state in checkpoint.items()
        if key not in (MODEL, OPTIMIZERS)
    }


def read_meta(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read ``meta.pt`` of the checkpoint directory *path*."""
    meta: dict[str, Any] = torch.load(path / META_FILE, "cpu", weights_only=weights_only)
    return meta


def pickle_meta(rest: Mapping[str, Any]) -> bytes:
    """Serialize *rest* as the contents of ``meta.pt``."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def require_no_storage_options(storage_options: object) -> None:
    """Raise if *storage_options* is not None, because storage options are not supported."""
    if storage_options is not None:
        raise UsageError("`storage_options` are not supported", hint="omit them")
