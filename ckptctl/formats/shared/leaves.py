"""Tensors and other leaves of a trainer's files of states that are not the model's."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptctl.catalog import Blob, TensorEntry
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import UnsupportedError
from ckptctl.formats.shared.structure import flatten, join
from ckptctl.formats.torch_file import extent_of, is_stored
from ckptctl.storage.zips.reader import StoredTensor


@dataclass(slots=True)
class Leaves:
    """Tensors and other leaves outside the model.

    Attributes:
        tensors: By name.
        blobs: By name.
        notes: What is not carried along.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, value: object, path: KeyPath, file: str, where: str) -> None:
        """Add all leaves of *value*.

        Args:
            value: Anything in a file of states.
            path: Where it lies in the checkpoint.
            file: That file, relative to the checkpoint's root.
            where: The same, for errors.

        Raises:
            UnsupportedError: Two leaves have one name.
        """
        for place, leaf in flatten(value, is_stored, path):
            name = join(place)
            if name in self.tensors or name in self.blobs:
                raise UnsupportedError(f"two leaves are both called `{name}`", where=where)
            if isinstance(leaf, StoredTensor):
                self.tensors[name] = stored_entry(place, leaf, file)
            else:
                self.blobs[name] = Blob(name, place, value=leaf)

    def put(self, leaf: TensorEntry | Blob) -> None:
        """Add one leaf as it is."""
        if isinstance(leaf, Blob):
            self.blobs[leaf.name] = leaf
        else:
            self.tensors[leaf.name] = leaf


def stored_entry(path: KeyPath, tensor: StoredTensor, file: str) -> TensorEntry:
    """Return the entry of a tensor that lies whole in one file."""
    boxes = (extent_of(tensor, file),)
    return TensorEntry(join(path), tensor.dtype, tensor.shape, boxes, path)
