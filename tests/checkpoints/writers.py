"""Write Hugging Face folders and ``torch.save`` files with safetensors and torch themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def save_hf(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write safetensors files, with an index when there are several, and ``config.json``.

    Tensors are dealt out to the shards in turn, so neighbors lie in different files.

    Returns:
        *folder*.
    """

    def write(part: dict[str, torch.Tensor], path: Path) -> None:
        save_file(part, path, metadata={"format": "pt"})

    return _save(folder, state, config, shards, "model", "safetensors", write)


def save_bin(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write ``pytorch_model*.bin`` as transformers 4 did; see :func:`save_hf`."""

    def write(part: dict[str, torch.Tensor], path: Path) -> None:
        torch.save({name: value.clone() for name, value in part.items()}, path)

    return _save(folder, state, config, shards, "pytorch_model", "bin", write)


def save_torch(path: Path, state: Mapping[str, Any], key: str | None = None) -> Path:
    """Write one ``torch.save`` file, the state dict at its root or under *key*.

    Returns:
        *path*.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state) if key is None else {key: dict(state), "epoch": 3}, path)
    return path


def _save(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None,
    shards: int,
    stem: str,
    suffix: str,
    write: Callable[[dict[str, torch.Tensor], Path], None],
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        write(dict(state), folder / f"{stem}.{suffix}")
        return folder
    weight_map: dict[str, str] = {}
    names = list(state)
    for index in range(shards):
        file = f"{stem}-{index + 1:05d}-of-{shards:05d}.{suffix}"
        part = {name: state[name] for name in names[index::shards]}
        write(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in state.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index_file, indent=2))
    return folder
