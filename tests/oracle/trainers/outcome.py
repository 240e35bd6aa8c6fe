"""What a job leaves beside a checkpoint: the live weights, and what the trainer's own tool made."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.readers import differences
from tests.unit.formats.damage import converted

State = dict[str, torch.Tensor]
CHECKPOINT = "checkpoint"


def keep(folder: Path, name: str, state: Mapping[str, torch.Tensor]) -> None:
    """Write *state* as it is now, every tied name in full."""
    copies = {key: value.detach().clone().contiguous() for key, value in state.items()}
    save_file(copies, folder / f"{name}.safetensors")


def kept(folder: Path, name: str) -> State:
    """Return what :func:`keep` wrote."""
    return load_file(folder / f"{name}.safetensors")


def attempt(folder: Path, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
    """Keep the tensors that a trainer's tool makes, or the text of its error."""
    try:
        keep(folder, name, make())
    except Exception:
        (folder / f"{name}.error").write_text(traceback.format_exc())


def error(folder: Path, name: str) -> str:
    """Return the error that :func:`attempt` met; empty without one."""
    file = folder / f"{name}.error"
    return file.read_text() if file.exists() else ""


def check(
    case: Path, scratch: Path, expected: str = "live", inside: str = "", **options: object
) -> None:
    """Convert the checkpoint of *case* and expect what a job kept, bit for bit.

    Args:
        case: Folder of the checkpoint and of what was kept beside it.
        scratch: An existing folder.
        expected: Name under which it was kept.
        inside: Folder of the checkpoint that is meant.
        **options: For ``ckptctl.convert``.
    """
    source = case / CHECKPOINT / inside
    for to in ("torch", "hf"):
        found = tensors(converted(source, scratch, to, **options))
        assert not differences(found, kept(case, expected)), (case.name, to)


def tensors(found: Mapping[str, Any]) -> State:
    """Return what is a tensor."""
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
