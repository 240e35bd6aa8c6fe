"""Read checkpoints with torch's and safetensors' own readers, as the truth to compare with."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def load_any_reference(path: Path) -> dict[str, Any]:
    """Return every leaf of a checkpoint by its dotted name.

    Args:
        path: A checkpoint that one of :data:`READERS` reads. Meta's model-parallel folders have
            no one reader: load each file.

    Raises:
        ValueError: None of them reads it.
    """
    for read in READERS.values():
        state = read(path)
        if state is not None:
            return state
    raise ValueError(f"no reference reader for {path}")


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return what differs between two flat state dicts: names, dtypes, shapes, bits, values.

    Tensors are compared as bytes: NaN payloads and negative zeros count.
    """
    problems = [f"missing: {name}" for name in expected if name not in found]
    problems += [f"unexpected: {name}" for name in found if name not in expected]
    for name in [name for name in expected if name in found]:
        mine, theirs = found[name], expected[name]
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            if type(mine) is not type(theirs) or mine != theirs:
                problems.append(f"{name}: {mine!r} is not {theirs!r}")
        elif (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            problems.append(
                f"{name}: {mine.dtype} {tuple(mine.shape)} is not "
                f"{theirs.dtype} {tuple(theirs.shape)}"
            )
        elif raw_bytes(mine) != raw_bytes(theirs):
            problems.append(f"{name}: other bytes")
    return problems


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of *tensor* in row-major order as bytes; every dtype works."""
    if not tensor.numel():
        return b""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def flatten(value: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings and of lists of mappings, by dotted names."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat |= flatten(item, f"{name}.")
        elif isinstance(item, list) and any(isinstance(part, Mapping) for part in item):
            flat |= flatten(dict(enumerate(item)), f"{name}.")
        else:
            flat[name] = item
    return flat


def _read_hf(path: Path) -> dict[str, Any] | None:
    """Read a safetensors file, or a Hugging Face folder of safetensors or ``.bin`` files."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        return dict(load(path.read_bytes()))
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = path / f"{stem}.{suffix}.index.json", path / f"{stem}.{suffix}"
        if index.exists():
            return _by_index(index)
        if single.exists():
            return load_any_reference(single)
    return None


def _by_index(index: Path) -> dict[str, Any]:
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {
        file: load_any_reference(index.parent / file) for file in sorted(set(weight_map.values()))
    }
    return {name: files[file][name] for name, file in weight_map.items()}


def _read_torch(path: Path) -> dict[str, Any] | None:
    return flatten(torch.load(path, weights_only=True)) if path.is_file() else None


def _read_dcp(path: Path) -> dict[str, Any] | None:
    if not (path / ".metadata").exists():
        return None
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(path),
            planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
            no_dist=True,
        )
    return flatten(state)


READERS: dict[str, Callable[[Path], dict[str, Any] | None]] = {
    "dcp": _read_dcp,
    "hf": _read_hf,
    "torch": _read_torch,
}
"""Readers by name of the format, without ckptctl. Each returns None for files of other formats.

Contract tests convert to a format as soon as it has a reader.
"""
