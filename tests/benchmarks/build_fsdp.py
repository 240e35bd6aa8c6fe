"""Write the ``.metadata`` that torch writes for a large model on many ranks, and sparse data.

``python -m tests.benchmarks.build_fsdp FOLDER RANKS [MODEL]``: every tensor of Llama cut along
dimension 0, as FSDP2 does it. Ranks whose parts have the same shapes share one file of items.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.benchmarks.training_plans import MODELS

EDGE = 4096
Shape = tuple[int, ...]
Part = tuple[str, int, Shape]
"""Name, first row and sizes of what a rank has of a tensor."""


def build(folder: Path, world: int, model: str = "405B") -> None:
    """Write a checkpoint of *world* ranks; only its metadata takes room."""
    folder.mkdir(parents=True)
    shapes = {f"model.{name}": shape for name, shape in MODELS[model].shapes().items()}
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size(shape), [])
        for name, shape in shapes.items()
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    files: dict[tuple[Shape, ...], tuple[Path, list[tuple[int, int]]]] = {}
    for rank in range(world):
        path = folder / f"__{rank}_0.distcp"
        # Each rank sends its own plan and results: what torch unpickles shares nothing with others.
        parts: list[Part] = pickle.loads(pickle.dumps(_parts(shapes, rank, world)))
        alike = tuple(sizes for _, _, sizes in parts)
        if alike in files:
            os.link(files[alike][0], path)
        else:
            files[alike] = path, _write_items(path, alike)
        for (name, row, sizes), (start, length) in zip(parts, files[alike][1], strict=True):
            offsets = (row, *(0,) * (len(sizes) - 1))
            chunks = entries[name].chunks
            index = MetadataIndex(name, torch.Size(offsets), len(chunks))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            storage[index] = _StorageInfo(path.name, start, length)
    planner = {name: (name,) for name in shapes}
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(entries, planner, storage, StorageMeta(), "2.6"), file)


def _parts(shapes: dict[str, Shape], rank: int, world: int) -> list[Part]:
    """Return what a rank has; beyond the last row that is nothing."""
    found: list[Part] = []
    for name, (rows, *rest) in shapes.items():
        most = -(-rows // world)
        first, end = min(rank * most, rows), min((rank + 1) * most, rows)
        if first < end:
            found.append((name, first, (end - first, *rest)))
    return found


def _write_items(path: Path, alike: tuple[Shape, ...]) -> list[tuple[int, int]]:
    """Write items one after the other, with holes for their elements; return where they lie."""
    places: list[tuple[int, int]] = []
    end = 0
    with path.open("wb") as file:
        for sizes in alike:
            buffer = io.BytesIO()
            torch.save(torch.zeros(sizes, dtype=torch.bfloat16), buffer)
            item = buffer.getvalue()
            for edge in (0, max(0, len(item) - EDGE)):
                file.seek(end + edge)
                file.write(item[edge : edge + EDGE])
            places.append((end, len(item)))
            end += len(item)
    return places


if __name__ == "__main__":
    build(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
