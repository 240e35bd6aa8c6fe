"""Folders as ``megatron.core.dist_checkpointing`` leaves them, written with torch's own classes."""

from __future__ import annotations

import io
import json
import pickle
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON = {"common_backend": "torch", "common_backend_version": 1}
Cuts = Mapping[str, Sequence[int]]


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    arguments: Mapping[str, Any] | None = None,
    *,
    cuts: Cuts | None = None,
    edges: Mapping[str, Sequence[int]] | None = None,
    objects: Mapping[str, Any] | None = None,
    finished: bool = True,
) -> Path:
    """Write *tensors*, each cut along its dimensions into as many chunks as *cuts* says of it.

    Tensors of one dimension may be cut at *edges* instead.
    """
    folder.mkdir(parents=True)
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    content = io.BytesIO()

    def put(index: Any, value: object) -> None:
        start = content.tell()
        torch.save(value, content)
        places[index] = _StorageInfo("__0_0.distcp", start, content.tell() - start)

    for name, tensor in tensors.items():
        boxes = list(_boxes(tensor.shape, (cuts or {}).get(name, ())))
        if own := (edges or {}).get(name):
            boxes = [((a,), (b - a,)) for a, b in pairwise([*own, *tensor.shape])]
        for offsets, sizes in boxes:
            spans = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            put(MetadataIndex(name, torch.Size(offsets)), tensor[spans].clone())
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        kind = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(kind, tensor.shape, chunks)
    for name, value in (objects or {}).items():
        put(MetadataIndex(name), [value])
        entries[name] = BytesStorageMetadata()
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, None, places)))
    mark(folder, arguments, finished=finished)
    return folder


def mark(
    folder: Path, arguments: Mapping[str, Any] | None = None, *, finished: bool = True
) -> None:
    """Add what tells Megatron-Core's folders from other ones of DCP."""
    told = Namespace(**(arguments or {}))
    common = {"args": told, "iteration": 10, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    if finished:
        (folder / "metadata.json").write_text(json.dumps(BACKEND | COMMON))


def _boxes(shape: Sequence[int], cuts: Sequence[int]) -> Any:
    found: list[Any] = [((), ())]
    for size, count in zip(shape, [*cuts, *[1] * len(shape)], strict=False):
        step = size // count
        found = [((*o, at), (*n, step)) for o, n in found for at in range(0, size, step)]
    return found
