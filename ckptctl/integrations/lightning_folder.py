"""What Lightning's checkpoints are as directories: the parts, and the file beside them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptctl.distributed.state import memory, state_of
from ckptctl.errors import UsageError
from ckptctl.storage.crc import crc32

META = "meta.pt"
MODEL = "state_dict"
OPTIMIZERS = "optimizer_states"
OPTIMIZER = "optimizer_"


def parts(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what goes into the directory's data, and the rest."""
    states = checkpoint.get(OPTIMIZERS, ())
    state = {MODEL: checkpoint[MODEL]}
    state |= {f"{OPTIMIZER}{number}": one for number, one in enumerate(states)}
    return state, {key: one for key, one in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}


def fingerprint(state: Mapping[str, Any]) -> tuple[object, ...]:
    """Return CRC-32 of all that this rank holds: with the trainer's progress, what is saved."""
    return tuple(
        (name, piece.box, crc32(memory(piece.tensor.cpu().contiguous())))
        for name, held in state_of(state).tensors.items()
        for piece in held.pieces
    )


def read_rest(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return what lies beside the tensors.

    Args:
        path: The checkpoint.
        weights_only: False: objects in it may run code when they are unpickled.
    """
    found: dict[str, Any] = torch.load(path / META, "cpu", weights_only=weights_only)
    return found


def pickled(rest: Mapping[str, Any]) -> bytes:
    """Return the content of ``meta.pt``."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def require_none(storage_options: object) -> None:
    """Refuse options that nothing here understands.

    Raises:
        UsageError: There are some.
    """
    if storage_options is not None:
        raise UsageError("`storage_options` are not supported", hint="leave them out")
