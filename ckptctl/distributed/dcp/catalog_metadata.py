"""A catalog as the metadata that torch's load planners look at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptctl.catalog import Blob, Box, Catalog, Extent, Index, TensorEntry
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.dcp.plans import chunk_of, keys_of
from ckptctl.distributed.state import State
from ckptctl.errors import CkptError
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.loading.state_mapping import Leaf, StateMapping, map_state, moved
from ckptctl.planner.mapping.mapped import stored_shapes

STOCK = "the checkpoint"


class CatalogMetadata(Metadata):
    """What a checkpoint of any format offers, under the names of the state.

    Args:
        catalog: The checkpoint; None: it cannot be read.
        options: What is known of it.
        problem: Why it cannot be read.

    Attributes:
        mapping: How it becomes the state; before :meth:`adapt` under its own names.
    """

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
            self._offer(map_state(catalog, {}, LoadOptions(root=options.root)))

    def require(self) -> StateMapping:
        """Return the mapping.

        Raises:
            CkptError: The checkpoint cannot be read.
        """
        if self._problem:
            raise self._problem
        assert self.mapping
        return self.mapping

    def adapt(self, state: Mapping[str, Leaf]) -> None:
        """Offer what *state* can be filled with, renamed and in its layout.

        Args:
            state: The tensors that are wanted, by name.

        Raises:
            CkptError: The checkpoint cannot be read, or does not fit.
        """
        self.require()
        assert self._catalog
        self._offer(map_state(self._catalog, state, self._options))

    def _offer(self, mapping: StateMapping) -> None:
        self.mapping = mapping
        catalog = mapping.catalog
        shapes = stored_shapes(mapping.tensors)
        kinds: dict[str, str] = {}
        whole: dict[str, list[ChunkStorageMetadata]] = {}
        paths: dict[str, Keys] = {}
        for one in mapping.tensors:
            source = catalog.tensors[one.sources[0].key]
            for view in one.targets:
                name = view.key
                kinds[name] = source.dtype
                same = one.renames and source.shape == shapes[name]
                boxes = [extent.box for extent in source.extents] if same else []
                whole[name] = [chunk_of(box) for box in boxes or [Box.whole(shapes[name])]]
                paths[name] = source.path if source.name == name else (name,)
        self.state_dict_metadata = {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, kind)), torch.Size(shapes[name]), whole[name]
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
    """Return what any metadata offers, as if it were a mapping of names to themselves."""
    if isinstance(metadata, CatalogMetadata):
        return metadata.require()
    paths = metadata.planner_data or {}
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, Blob] = {}
    for name, entry in metadata.state_dict_metadata.items():
        found = paths.get(name, (name,))
        path = tuple(Index(key) if isinstance(key, int) else key for key in found)
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            boxes = (Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
            extents = tuple(Extent(box, "", 0, 0) for box in boxes)
            tensors[name] = TensorEntry(name, dtype, tuple(entry.size), extents, path)
        else:
            blobs[name] = Blob(name, path)
    catalog = Catalog("", STOCK, "dcp", {}, tensors, blobs)
    return map_state(catalog, {}, LoadOptions())


def leaves_of(state: State) -> dict[str, Leaf]:
    """Return the tensors of a state as a mapping looks at them."""
    return {
        name: Leaf(one.described.dtype, one.described.shape, one.described.path)
        for name, one in state.tensors.items()
    }
