"""Write checkpoints that are large in everything but bytes on disk.

``python -m tests.benchmarks.build_ranks FOLDER [RANKS TENSORS ELEMENTS]``: a save of that many
ranks without collectives; the data of all of them is one sparse file under many names. Without
numbers: the index and the headers of a model of eight billion parameters, sparse as well.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from pathlib import Path

import torch

from tests.benchmarks.build import BIG

EDGE = 4096


def ranks(folder: Path, world: int, count: int, elements: int) -> None:
    """Write the metadata of every rank, and one data file.

    Args:
        folder: Created.
        world: Number of ranks.
        count: Number of tensors, each with one chunk on every rank.
        elements: Of a chunk.
    """
    folder.mkdir(parents=True)
    places = _write_items(folder / "__0_0.distcp", count, elements)
    for rank in range(world):
        if rank:
            os.link(folder / "__0_0.distcp", folder / f"__{rank}_0.distcp")
        content = pickle.dumps(_metadata(rank, world, places, elements))
        (folder / f"__{rank}.metadata").write_bytes(content)


def _write_items(path: Path, count: int, elements: int) -> list[tuple[int, int]]:
    buffer = io.BytesIO()
    torch.save(torch.zeros(4, elements // 4, dtype=torch.bfloat16), buffer)
    item = buffer.getvalue()
    with path.open("wb") as file:
        for number in range(count):
            start = number * len(item)
            for part in (slice(0, EDGE), slice(max(0, len(item) - EDGE), len(item))):
                file.seek(start + part.start)
                file.write(item[part])
    return [(number * len(item), len(item)) for number in range(count)]


def _metadata(rank: int, world: int, places: list[tuple[int, int]], elements: int) -> object:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    offsets, sizes = torch.Size((4 * rank, 0)), torch.Size((4, elements // 4))
    size = torch.Size((4 * world, elements // 4))
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage = {}
    for number, (start, length) in enumerate(places):
        name = f"model.layers.{number // 9}.part.{number % 9}.weight"
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16),
            size,
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))],
        )
        index = MetadataIndex(name, torch.Size(offsets), 0)
        storage[index] = _StorageInfo(f"__{rank}_0.distcp", start, length)
    return Metadata(entries, {name: ("model", name[6:]) for name in entries}, storage)


def hf(folder: Path) -> None:
    """Write an index and sparse shards of 32 layers."""
    from dataclasses import replace

    folder.mkdir(parents=True)
    shapes = replace(BIG, layers=32, hidden=4096, ffn=14336, vocab=128256).shapes()
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(4):
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        own, header, end = names[number::4], {}, 0
        for name in own:
            length = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": list(shapes[name])}
            header[name]["data_offsets"] = [end, end + length]
            end += length
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ranks(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
    else:
        hf(Path(sys.argv[1]))
