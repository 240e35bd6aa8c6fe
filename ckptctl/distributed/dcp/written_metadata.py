"""torch's object of a checkpoint's metadata, as the writer of ``.metadata`` takes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckptctl.catalog import Blob, Box, Index, Path
from ckptctl.distributed.compat import StorageInfo
from ckptctl.errors import RefusedError
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.metadata import Item, Origin
from ckptctl.formats.dcp.metadata_writer import Located, encode_tensors


def encoded(metadata: Metadata, world: int = 0) -> tuple[bytes, ...]:
    """Return the content of ``.metadata``, in parts.

    Args:
        metadata: With the places of all items, and the id of the save.
        world: How many ranks save; 0: it is not known.

    Raises:
        RefusedError: It holds more than torch's own planners put in it.
    """
    if type(metadata) is not Metadata:
        raise RefusedError(
            f"metadata of class {type(metadata).__name__} cannot be written",
            why="only what torch's own Metadata has would be kept",
        )
    entries = metadata.state_dict_metadata
    paths = metadata.planner_data or {}
    tensors: list[OutputTensor] = []
    boxes: list[list[Box]] = []
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(_tensor(name, entry, _path(name, paths)))
            boxes.append([Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks])
    places = {index.fqn: one for index, one in metadata.storage_data.items() if not index.offset}
    values = [
        (Blob(name, _path(name, paths)), _item(places[name]))
        for name, entry in entries.items()
        if isinstance(entry, BytesStorageMetadata)
    ]
    meta = metadata.storage_meta
    origin = Origin(meta.save_id or "" if meta else "", world)
    return encode_tensors(tensors, boxes, _items(metadata)).complete(values, origin)


def _tensor(name: str, entry: TensorStorageMetadata, path: Path) -> OutputTensor:
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return OutputTensor(
        name, dtype, tuple(entry.size), path, requires_grad=bool(entry.properties.requires_grad)
    )


def _path(name: str, paths: dict[str, tuple[str | int, ...]]) -> Path:
    return tuple(Index(k) if isinstance(k, int) else k for k in paths.get(name, (name,)))


def _items(metadata: Metadata) -> Iterator[tuple[str, Iterator[Located]]]:
    tensors = ((i, one) for i, one in metadata.storage_data.items() if i.offset is not None)
    for name, items in groupby(tensors, key=lambda item: item[0].fqn):
        yield name, map(_located, items)


def _located(item: tuple[MetadataIndex, StorageInfo]) -> Located:
    index, place = item
    return tuple(index.offset or ()), place.relative_path, place.offset, place.length


def _item(place: StorageInfo) -> Item:
    return Item(place.relative_path, place.offset, place.length)
