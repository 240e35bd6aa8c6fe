"""A decision of who writes what, in the classes of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptctl.catalog import Box, Index, Path
from ckptctl.formats.base import OutputTensor
from ckptctl.ops.saving.decision import Decision


def metadata_of(decision: Decision) -> Metadata:
    """Return what torch's load planners look at; where items lie is not in it yet."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        tensor.name: TensorStorageMetadata(
            _properties(tensor), torch.Size(tensor.shape), [chunk_of(box) for box in boxes]
        )
        for tensor, boxes in zip(decision.tensors, decision.boxes, strict=True)
    }
    entries |= {name: BytesStorageMetadata() for name in decision.paths}
    entries |= {
        name: TensorStorageMetadata(
            _properties(tensor), torch.Size(tensor.shape), [chunk_of(Box.whole(tensor.shape))]
        )
        for name, tensor in decision.apart.items()
    }
    tensors = (*decision.tensors, *decision.apart.values())
    paths = {tensor.name: keys_of(tensor.path) for tensor in tensors}
    return Metadata(entries, paths | {n: keys_of(path) for n, path in decision.paths.items()})


def items_of(decision: Decision) -> list[list[WriteItem]]:
    """Return what each rank writes."""
    items: list[list[WriteItem]] = [[] for _ in decision.shares]
    for tensor, boxes, ranks in zip(
        decision.tensors, decision.boxes, decision.writers, strict=True
    ):
        kind = WriteItemType.SHARD if len(boxes) > 1 else WriteItemType.TENSOR
        size, properties = torch.Size(tensor.shape), _properties(tensor)
        for number, (box, rank) in enumerate(zip(boxes, ranks, strict=True)):
            chunk = chunk_of(box)
            index = MetadataIndex(tensor.name, chunk.offsets, number)
            data = TensorWriteData(chunk, properties, size)
            items[rank].append(WriteItem(index, kind, tensor_data=data))
    for own, share in zip(items, decision.shares, strict=True):
        own += [
            _apart(decision.apart[under])
            if under in decision.apart
            else WriteItem(MetadataIndex(under), WriteItemType.BYTE_IO)
            for under in share.values.values()
        ]
    return items


def _apart(tensor: OutputTensor) -> WriteItem:
    chunk = chunk_of(Box.whole(tensor.shape))
    data = TensorWriteData(chunk, _properties(tensor), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(tensor.name, chunk.offsets, 0), WriteItemType.TENSOR, None, data)


def _properties(tensor: OutputTensor) -> TensorProperties:
    return TensorProperties(getattr(torch, tensor.dtype), requires_grad=tensor.requires_grad)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return *box* as torch has it."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def keys_of(path: Path) -> tuple[str | int, ...]:
    """Return the keys down to a leaf as torch has them."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in path)
