"""Read tensors and non-tensor values from ``torch.save`` files."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from ckptctl.catalog import (
    Blob,
    Box,
    ComputedTensor,
    ComputeInput,
    Extent,
    TensorEntry,
    build_computed_name,
    compute_row_major_strides,
)
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import UnsupportedError, exclude_hint, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.shared.leaves import flatten_object, join_path
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import walk_values
from ckptctl.storage.pickles.pickle_reader import Unknown
from ckptctl.storage.pickles.pickle_writer import StorageTensor
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, StoredTensor, read_archive
from ckptctl.tree import TreePath

NO_CHECKSUMS = "written without checksums"


@dataclass(slots=True)
class Leaves:
    """Tensors and non-tensor values of one file, or of the files of all ranks.

    Attributes:
        tensors: Catalog entries of the tensors by name.
        blobs: Non-tensor values by name.
        notes: Messages for the user.
        computed: Conjugate and negative views by virtual file, which are computed when read.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    computed: dict[str, ComputedTensor] = field(default_factory=dict)

    def add_object(self, value: object, path: KeyPath, file: str, where: str) -> None:
        """Flatten *value*, and add its leaves below *path*, or raise if a name already exists."""
        for leaf_path, leaf in flatten_object(value, is_stored_tensor, path, where=where):
            name = join_path(leaf_path)
            if name in self.tensors or name in self.blobs:
                raise UnsupportedError(f"two values have the name `{name}`", where=where)
            if isinstance(leaf, StoredTensor):
                self.tensors[name] = make_stored_entry(leaf_path, leaf, file)
            else:
                self.blobs[name] = Blob(name, leaf_path, value=leaf)

    def add_leaf(self, leaf: TensorEntry | Blob) -> None:
        """Add a tensor or value, and replace an existing one with the same name."""
        if isinstance(leaf, Blob):
            self.blobs[leaf.name] = leaf
        else:
            self.tensors[leaf.name] = leaf


def read_leaves(
    files: SourceFiles, name: str, unknown: Unknown = "refuse", *, computed: bool = False
) -> Leaves:
    """Read the tensors and non-tensor values of one ``torch.save`` file.

    Args:
        files: Files of the checkpoint.
        name: Name of the file.
        unknown: How to handle unknown classes in the pickle.
        computed: Whether conjugate and negative views are supported.
    """
    archive = read_archive(files, name, unknown=unknown, table=TABLE_WITH_UNREAD_TENSORS)
    leaves = extract_leaves(archive.root, name, checkpoint_root=files.root if computed else None)
    leaves.notes[:0] = () if archive.checksums else (NO_CHECKSUMS,)
    return leaves


def extract_leaves(
    root: object, name: str, path: KeyPath = (), checkpoint_root: TreePath | None = None
) -> Leaves:
    """Flatten *root*, an object in the file *name*, into leaves below *path*.

    *checkpoint_root* is the folder of the checkpoint, which is required to read conjugate and
    negative views. If it is None, these views are listed as unreadable.
    """
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, Blob] = {}
    computed: dict[str, ComputedTensor] = {}
    first_names: dict[object, str] = {}
    names_by_storage: dict[str, dict[str, None]] = {}
    for leaf_path, leaf in flatten_object(root, is_stored_tensor, path, where=name):
        key = join_path(leaf_path)
        if key in tensors or key in blobs:
            numbered_names = (f"{join_path(leaf_path)} ({number})" for number in count(2))
            key = next(name for name in numbered_names if name not in tensors and name not in blobs)
            dtype, shape = (leaf.dtype, leaf.shape) if isinstance(leaf, StoredTensor) else ("", ())
            why = f"another value has the name `{join_path(leaf_path)}`"
            tensors[key] = TensorEntry.build_unreadable(key, dtype, shape, leaf_path, why)
        elif (
            isinstance(leaf, StoredTensor) and leaf.base is not None and checkpoint_root is not None
        ):
            stored = TensorEntry(
                key, leaf.dtype, leaf.shape, (make_extent(leaf.base, name),), leaf_path
            )
            tensors[key], computed[build_computed_name(key)] = _make_mirrored_view(
                key, leaf_path, leaf, stored, checkpoint_root
            )
        elif isinstance(leaf, StoredTensor) and leaf.unsupported:
            tensors[key] = TensorEntry.build_unreadable(
                key, leaf.dtype, leaf.shape, leaf_path, leaf.unsupported
            )
        elif isinstance(leaf, StoredTensor):
            identity = (leaf.storage, leaf.offset, leaf.dtype, leaf.shape, leaf.strides)
            alias = first_names.setdefault(identity, key) if leaf.nbytes else key
            if leaf.nbytes:
                names_by_storage.setdefault(leaf.storage, {})[alias] = None
            tensors[key] = TensorEntry(
                key,
                leaf.dtype,
                leaf.shape,
                (make_extent(leaf, name),),
                leaf_path,
                alias_of=None if alias == key else alias,
                requires_grad=leaf.requires_grad,
            )
        else:
            blobs[key] = Blob(key, leaf_path, value=leaf)
    notes: list[str] = []
    overlapping = [key for group in names_by_storage.values() if len(group) > 1 for key in group]
    if overlapping:
        shared = "tensors that share part of their memory are written separately"
        notes.append(f"{shared}: {quote_names(overlapping)}")
    names_with_tensors = [
        key for key, blob in blobs.items() if any(map(is_stored_tensor, walk_values(blob.value)))
    ]
    if names_with_tensors:
        notes.append(f"tensors inside objects are not extracted: {quote_names(names_with_tensors)}")
    return Leaves(tensors, blobs, notes, computed)


def _make_mirrored_view(
    key: str, place: KeyPath, leaf: StoredTensor, stored: TensorEntry, root: TreePath
) -> tuple[TensorEntry, ComputedTensor]:
    """Build the catalog entry of a conjugate or negative view, and the tensor that computes it."""
    flags, inputs = tuple(sorted(leaf.flags)), (ComputeInput(root, stored),)
    computed = ComputedTensor("mirrored", leaf.dtype, leaf.shape, inputs, flags)
    extents = (computed.to_extent(build_computed_name(key)),)
    grad = leaf.requires_grad
    return TensorEntry(key, leaf.dtype, leaf.shape, extents, place, requires_grad=grad), computed


def make_extent(stored: StoredTensor, file: str, box: Box | None = None) -> Extent:
    """Return the extent of the tensor *stored* in the ``torch.save`` zip *file*.

    *box* is the box of a global tensor that it contains, or None if it is not a shard.
    """
    return Extent(
        box or Box.whole(stored.shape),
        file,
        stored.offset,
        stored.nbytes,
        strides=stored.strides,
        crc32=stored.crc32,
        within=stored.within,
    )


def is_stored_tensor(node: object) -> bool:
    """Return whether *node* is a tensor in a ``torch.save`` zip."""
    return isinstance(node, StoredTensor)


def refuse_hidden_tensors(leaf: object, key: str, where: str) -> None:
    """Raise UnsupportedError if the value *leaf* contains tensors, for example in a set."""
    if any(is_stored_tensor(node) for node in walk_values(leaf)):
        raise UnsupportedError(
            f"`{key}` contains tensors inside an object that cannot be decomposed",
            where=where,
            hint=exclude_hint(key),
        )


def make_pickled_tensor(tensor: OutputTensor, key: str) -> StorageTensor:
    """Build the pickle record of a tensor whose elements are in the storage *key* of the zip."""
    return StorageTensor(
        storage_key=key,
        storage_nbytes=tensor.nbytes,
        dtype=tensor.dtype,
        offset=0,
        shape=tensor.shape,
        strides=compute_row_major_strides(tensor.shape),
        requires_grad=tensor.requires_grad,
    )


def make_stored_entry(path: KeyPath, tensor: StoredTensor, file: str) -> TensorEntry:
    """Build the catalog entry of a tensor that is stored in full in *file*."""
    boxes = (make_extent(tensor, file),)
    return TensorEntry(join_path(path), tensor.dtype, tensor.shape, boxes, path)
