"""Construction of ``torch.distributed.checkpoint`` metadata from catalogs and save plans."""

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
from ckptctl.distributed.state import keys_to_path, path_to_keys
from ckptctl.errors import CkptError, RefusedError
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.metadata import Item, Origin
from ckptctl.formats.dcp.metadata_writer import encode_tensor_metadata
from ckptctl.keywords import show_options_as_keywords
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.state_mapping import (
    MappingRequest,
    StateMapping,
    map_state,
    replace_prefix,
)
from ckptctl.save_load.saving.global_plan import GlobalPlan
from ckptctl.save_load.saving.local_shards import TensorMeta

P = ParamSpec("P")
R = TypeVar("R")
DEFAULT_SOURCE = "the checkpoint"


def add_error_notes(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap *method* to add the details of a `CkptError` as exception notes.

    The notes contain the location, the reason and the hint, with Python names of options.
    """

    @wraps(method)
    def call_with_notes(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with show_options_as_keywords(LoadOptions, SaveOptions):
                return method(*args, **kwargs)
        except CkptError as error:
            existing_notes = getattr(error, "__notes__", ())
            for title in ("where", "why", "hint"):
                text = getattr(error, title)
                note = f"{title}: {text}"
                if text and note not in existing_notes:
                    error.add_note(note)
            raise

    return call_with_notes


def build_metadata(global_plan: GlobalPlan) -> Metadata:
    """Build torch's metadata from a global plan, but do not add the file positions of its items."""

    def build_entry(tensor: OutputTensor, boxes: Sequence[Box]) -> TensorStorageMetadata:
        size, chunks = torch.Size(tensor.shape), [to_chunk(box) for box in boxes]
        return TensorStorageMetadata(build_properties(tensor), size, chunks)

    separate_tensors = global_plan.rank_tensors.values()
    written = zip(global_plan.tensors, global_plan.boxes, strict=True)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        **{tensor.name: build_entry(tensor, boxes) for tensor, boxes in written},
        **{name: BytesStorageMetadata() for name in global_plan.paths},
        **{
            tensor.name: build_entry(tensor, [Box.whole(tensor.shape)])
            for tensor in separate_tensors
        },
    }
    paths = {
        tensor.name: path_to_keys(tensor.path)
        for tensor in (*global_plan.tensors, *separate_tensors)
    }
    return Metadata(
        entries, paths | {n: path_to_keys(path) for n, path in global_plan.paths.items()}
    )


def build_properties(tensor: OutputTensor) -> TensorProperties:
    """Build torch's ``TensorProperties`` for an output tensor."""
    return TensorProperties(getattr(torch, tensor.dtype), requires_grad=tensor.requires_grad)


def to_chunk(box: Box) -> ChunkStorageMetadata:
    """Convert a box to torch's chunk metadata."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def to_box(chunk: ChunkStorageMetadata) -> Box:
    """Convert torch's chunk metadata to a box."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


class CatalogMetadata(Metadata):
    """torch metadata of a checkpoint of any format, with the tensor names of the state to load."""

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
            self._set_mapping(
                map_state(catalog, {}, MappingRequest(source=ModelRequest(root=options.root)))
            )

    def require_mapping(self) -> StateMapping:
        """Return the mapping to the state, or raise the error of opening the checkpoint."""
        if self._problem:
            raise self._problem
        assert self.mapping
        return self.mapping

    def adapt_to_state(self, state: Mapping[str, TensorMeta]) -> None:
        """Convert the tensor metadata of the checkpoint to the names and the layout of *state*."""
        self.require_mapping()
        assert self._catalog
        self._set_mapping(map_state(self._catalog, state, self._options.mapping))

    def _set_mapping(self, mapping: StateMapping) -> None:
        self.mapping = mapping
        catalog = mapping.catalog
        kinds: dict[str, str] = {}
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        paths: dict[str, Keys] = {}
        for name, composed in mapping.tensors.items():
            source = catalog.tensors[composed.sources[0].key]
            kinds[name] = source.dtype
            boxes = [extent.box for extent in source.extents] if composed.is_rename else []
            chunks[name] = [to_chunk(box) for box in boxes or [Box.whole(composed.shape)]]
            paths[name] = source.path if source.name == name else (name,)
        self.state_dict_metadata = {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, kind)),
                torch.Size(mapping.tensors[name].shape),
                chunks[name],
            )
            for name, kind in kinds.items()
        }
        for blob in catalog.blobs.values():
            name = replace_prefix(blob.name, mapping.root, mapping.prefix)
            if name not in kinds:
                self.state_dict_metadata[name] = BytesStorageMetadata()
                paths[name] = blob.path if blob.name == name else (name,)
        self.planner_data = {name: path_to_keys(keys) for name, keys in paths.items()}


def build_mapping(metadata: Metadata) -> StateMapping:
    """Return the mapping from the checkpoint to the state.

    For metadata that another storage reader has created, every tensor is mapped to itself.
    """
    if isinstance(metadata, CatalogMetadata):
        return metadata.require_mapping()
    paths = metadata.planner_data or {}
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, Blob] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = keys_to_path(paths.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            extents = tuple(Extent(to_box(chunk), "", 0, 0) for chunk in entry.chunks)
            tensors[name] = TensorEntry(name, dtype, tuple(entry.size), extents, path)
        else:
            blobs[name] = Blob(name, path)
    catalog = Catalog(Path(), Path(DEFAULT_SOURCE), "dcp", {}, tensors, blobs)
    return map_state(catalog, {}, MappingRequest())


def encode_metadata(metadata: Metadata, world: int = 0) -> tuple[bytes, ...]:
    """Encode *metadata* as the contents of a ``.metadata`` file, in consecutive chunks of bytes.

    Raises:
        RefusedError: The metadata has fields that would be lost.
    """
    if type(metadata) is not Metadata:
        raise RefusedError(
            f"metadata of class {type(metadata).__name__} cannot be written",
            why="only the fields of torch's own Metadata would be kept",
        )
    paths = metadata.planner_data or {}
    places = {index.fqn: info for index, info in metadata.storage_data.items() if not index.offset}
    tensors: list[OutputTensor] = []
    boxes: list[list[Box]] = []
    values: list[tuple[OutputTensor | Blob, Item]] = []
    for name, entry in metadata.state_dict_metadata.items():
        path = keys_to_path(paths.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            grad = bool(entry.properties.requires_grad)
            shape = tuple(entry.size)
            tensors.append(OutputTensor(name, dtype, shape, path, requires_grad=grad))
            boxes.append([to_box(chunk) for chunk in entry.chunks])
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
        (name, (item for _, item in group)) for name, group in groupby(located, key=itemgetter(0))
    )
    return encode_tensor_metadata(tensors, boxes, items).add_values(values, origin)
