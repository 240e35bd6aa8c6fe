"""Metadata of ``torch.distributed.checkpoint``, built from a catalog or a plan, and encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptctl.catalog import Blob, Box, Catalog, Extent, TensorEntry
from ckptctl.catalog import Path as Keys
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import keys_of, path_of
from ckptctl.errors import CkptError, RefusedError
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.metadata import Item, Origin
from ckptctl.formats.dcp.metadata_writer import encode_tensors
from ckptctl.keywords import spell_in_python
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.state_mapping import MappingRequest, StateMapping, map_state, moved
from ckptctl.save_load.saving.global_plan import GlobalPlan
from ckptctl.save_load.saving.local_shards import TensorMeta

P = ParamSpec("P")
R = TypeVar("R")
STOCK = "the checkpoint"


def with_notes(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap *method* to add where, why and hint to errors as notes, with Python option names."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with spell_in_python(LoadOptions, SaveOptions):
                return method(*args, **kwargs)
        except CkptError as error:
            known = getattr(error, "__notes__", ())
            for title in ("where", "why", "hint"):
                text = getattr(error, title)
                note = f"{title}: {text}"
                if text and note not in known:
                    error.add_note(note)
            raise

    return call


def metadata_of(global_plan: GlobalPlan) -> Metadata:
    """Build torch's metadata of a global plan, without the positions of its items."""

    def entry(tensor: OutputTensor, boxes: Sequence[Box]) -> TensorStorageMetadata:
        size, chunks = torch.Size(tensor.shape), [chunk_of(box) for box in boxes]
        return TensorStorageMetadata(properties_of(tensor), size, chunks)

    apart = global_plan.apart.values()
    written = zip(global_plan.tensors, global_plan.boxes, strict=True)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        **{tensor.name: entry(tensor, boxes) for tensor, boxes in written},
        **{name: BytesStorageMetadata() for name in global_plan.paths},
        **{tensor.name: entry(tensor, [Box.whole(tensor.shape)]) for tensor in apart},
    }
    paths = {tensor.name: keys_of(tensor.path) for tensor in (*global_plan.tensors, *apart)}
    return Metadata(entries, paths | {n: keys_of(path) for n, path in global_plan.paths.items()})


def properties_of(tensor: OutputTensor) -> TensorProperties:
    """Build torch's properties of a tensor."""
    return TensorProperties(getattr(torch, tensor.dtype), requires_grad=tensor.requires_grad)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Convert a box to torch's chunk metadata."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Convert torch's chunk metadata to a box."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


class CatalogMetadata(Metadata):
    """Metadata of a checkpoint of any format, with the names of the state."""

    def __init__(
        self,
        catalog: Catalog | None,
        options: LoadOptions,
        problem: CkptError | None = None,
    ) -> None:
        super().__init__({}, {}, storage_data={})
        self._options = options
        self._catalog = catalog
        self._problem = problem
        self.mapping: StateMapping | None = None
        if catalog:
            self._offer(
                map_state(catalog, {}, MappingRequest(source=ModelRequest(root=options.root)))
            )

    def require(self) -> StateMapping:
        """Return the mapping, or raise the error of reading the checkpoint."""
        if self._problem:
            raise self._problem
        assert self.mapping
        return self.mapping

    def adapt(self, state: Mapping[str, TensorMeta]) -> None:
        """Present the checkpoint's tensors with the names and layout of *state*."""
        self.require()
        assert self._catalog
        self._offer(map_state(self._catalog, state, self._options.mapping))

    def _offer(self, mapping: StateMapping) -> None:
        self.mapping = mapping
        catalog = mapping.catalog
        kinds: dict[str, str] = {}
        whole: dict[str, list[ChunkStorageMetadata]] = {}
        paths: dict[str, Keys] = {}
        for name, composed in mapping.tensors.items():
            source = catalog.tensors[composed.sources[0].key]
            kinds[name] = source.dtype
            boxes = [extent.box for extent in source.extents] if composed.is_rename else []
            whole[name] = [chunk_of(box) for box in boxes or [Box.whole(composed.shape)]]
            paths[name] = source.path if source.name == name else (name,)
        self.state_dict_metadata = {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, kind)),
                torch.Size(mapping.tensors[name].shape),
                whole[name],
            )
            for name, kind in kinds.items()
        }
        for blob in catalog.blobs.values():
            name = moved(blob.name, mapping.root, mapping.prefix)
            if name not in kinds:
                self.state_dict_metadata[name] = BytesStorageMetadata()
                paths[name] = blob.path if blob.name == name else (name,)
        self.planner_data = {name: keys_of(keys) for name, keys in paths.items()}


def mapping_of(metadata: Metadata) -> StateMapping:
    """Return the mapping of a checkpoint, which is the identity for metadata of other readers."""
    if isinstance(metadata, CatalogMetadata):
        return metadata.require()
    paths = metadata.planner_data or {}
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, Blob] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = path_of(paths.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            extents = tuple(Extent(box_of(chunk), "", 0, 0) for chunk in entry.chunks)
            tensors[name] = TensorEntry(name, dtype, tuple(entry.size), extents, path)
        else:
            blobs[name] = Blob(name, path)
    catalog = Catalog(Path(), Path(STOCK), "dcp", {}, tensors, blobs)
    return map_state(catalog, {}, MappingRequest())


def encode_metadata(metadata: Metadata, world: int = 0) -> tuple[bytes, ...]:
    """Encode the content of ``.metadata``, in parts.

    Raises:
        RefusedError: The metadata has fields that would be lost.
    """
    if type(metadata) is not Metadata:
        raise RefusedError(
            f"metadata of class {type(metadata).__name__} cannot be written",
            why="only the fields of torch's own Metadata would be kept",
        )
    paths = metadata.planner_data or {}
    places = {index.fqn: one for index, one in metadata.storage_data.items() if not index.offset}
    tensors: list[OutputTensor] = []
    boxes: list[list[Box]] = []
    values: list[tuple[OutputTensor | Blob, Item]] = []
    for name, entry in metadata.state_dict_metadata.items():
        path = path_of(paths.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            grad = bool(entry.properties.requires_grad)
            shape = tuple(entry.size)
            tensors.append(OutputTensor(name, dtype, shape, path, requires_grad=grad))
            boxes.append([box_of(chunk) for chunk in entry.chunks])
        else:
            place = places[name]
            item = Item(place.relative_path, place.offset, place.length)
            values.append((Blob(name, path), item))
    meta = metadata.storage_meta
    origin = Origin(meta.save_id or "" if meta else "", world)
    located = (
        (index.fqn, (tuple(index.offset), place.relative_path, place.offset, place.length))
        for index, place in metadata.storage_data.items()
        if index.offset is not None
    )
    items = (
        (name, (item for _, item in some)) for name, some in groupby(located, key=itemgetter(0))
    )
    return encode_tensors(tensors, boxes, items).add_values(values, origin)
