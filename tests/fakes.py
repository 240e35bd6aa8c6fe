"""A format of our own, so that commands can be tested without any real one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ckptctl.catalog import Blob, Box, Catalog, Extent, TensorEntry
from ckptctl.errors import DamagedError
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions
from ckptctl.tree import TreePath

DATA = "data.raw"


class FakeFormat(Format):
    """Reads what :meth:`save` wrote in the same process."""

    name = "fake"
    title = "a directory with one file of raw tensors"

    def __init__(self) -> None:
        self.known: dict[Path, Catalog] = {}

    def sniff(self, listing: Listing) -> str | None:
        return "data.raw" if DATA in listing.names else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        if path not in self.known:
            raise DamagedError("the index is unreadable", where=str(path))
        return self.known[path]

    def save(
        self,
        path: Path,
        tensors: dict[str, torch.Tensor],
        aliases: dict[str, str] | None = None,
        blobs: Iterable[str] = (),
    ) -> Catalog:
        """Write *tensors* back to back into one file and remember its catalog."""
        path.mkdir(parents=True)
        entries = {}
        content = bytearray()
        for name, tensor in tensors.items():
            raw = bytes(tensor.contiguous().untyped_storage())
            shape = tuple(tensor.shape)
            extent = Extent(Box.whole(shape), DATA, len(content), len(raw))
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(name, dtype, shape, (extent,), tuple(name.split(".")))
            content += raw
        for name, other in (aliases or {}).items():
            e = entries[other]
            entries[name] = TensorEntry(name, e.dtype, e.shape, e.extents, (name,), alias_of=other)
        (path / DATA).write_bytes(content)
        self.known[path] = Catalog(
            root=path,
            path=path,
            format=self.name,
            files={DATA: len(content)},
            tensors=entries,
            blobs={name: Blob(name, (name,), value=1) for name in blobs},
            metadata={"format": "pt"},
        )
        return self.known[path]
