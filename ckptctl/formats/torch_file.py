"""One zip file written by ``torch.save``: a state dict, flat or nested among other things.

Source: ``torch/serialization.py`` (``_save``, ``_load``); the zip itself is read and written by
:mod:`ckptctl.storage.zips.reader` and :mod:`ckptctl.storage.zips.writer`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.catalog import Blob, Box, Catalog, Computed, Extent, Input, TensorEntry, computed_name
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import (
    ForeignFileError,
    FormatError,
    UnsafePickleError,
    UnsupportedError,
    excluding,
    listed,
)
from ckptctl.formats.base import (
    AS_IT_IS,
    Output,
    OutputRequest,
    OutputTensor,
    Place,
    ReadOptions,
    Sniff,
    WritableFormat,
)
from ckptctl.formats.shared.leaves import flatten, join, nest
from ckptctl.planner.plan import CrcOf, OutputFile, Record
from ckptctl.storage.compare import row_major
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.pickles.inert import walk
from ckptctl.storage.pickles.reader import Unknown
from ckptctl.storage.stand_ins import only_zeros
from ckptctl.storage.zips.reader import KEEPING_TABLE, StoredTensor, read_archive

if TYPE_CHECKING:
    from ckptctl.storage.pickles.writer import StorageTensor
    from ckptctl.storage.zips.writer import ZipLayout

NO_CHECKSUMS = "written without checksums"
_ZIP = b"PK\x03\x04"
SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
"""What trainers call such files."""

META_SHARD = re.compile(r"consolidated(?:\.(\d+))?\.pth")
HF_BIN = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")


class TorchFormat(WritableFormat):
    """One ``torch.save`` file."""

    name = "torch"
    title = "one torch.save file, flat or nested"
    recognised = (
        "a file that is a zip, not called `consolidated.NN.pth` or `pytorch_model*.bin`; "
        "Lightning's `*.ckpt` is one; or one called `*.bin`, `*.ckpt`, `*.pt` or `*.pth` with "
        "nothing but zeros, which was never written"
    )
    wholeness = (
        "a zip lists its records at its end, so that a file that is cut has no list; records have "
        "CRC-32 checksums unless they were left out"
    )
    proof = (
        "read: files of torch 2.13 with every dtype and with views; written: `torch.load` finds "
        "every dtype and ties (tests/contract/test_dtypes.py), and maps the file "
        "(tests/integration/test_stock_dcp.py)"
    )
    single_file = True
    nested = True
    ties = "kept"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        others = (META_SHARD, HF_BIN)
        if not path.is_file() or any(pattern.fullmatch(path.name) for pattern in others):
            return None
        with path.open("rb") as file:
            head = file.read(4)
        if head == _ZIP:
            return Sniff("a zip file")
        written = any(head) or path.suffix not in SUFFIXES or not only_zeros(path)
        return None if written else Sniff("only zeros where a zip would be")

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        if path.is_dir():
            raise FormatError(
                "this is a directory", where=str(path), why="expected one file of `torch.save`"
            )
        with source_files(path.parent) as files:
            try:
                found = read_leaves(files, path.name, computed=True)
            except UnsafePickleError as error:
                raise _one_of_many(error) from error
            except ForeignFileError as error:  # there is no other file
                said = {"where": error.where, "why": error.why, "hint": error.hint}
                raise FormatError(error.what, **said) from error
            return Catalog(
                root=str(path.parent),
                path=str(path),
                format=self.name,
                files={path.name: files.size(path.name)},
                tensors=found.tensors,
                blobs=found.blobs,
                notes=tuple(found.notes),
                computed=found.computed,
            )

    def lay_out(self, request: OutputRequest) -> Output:
        """See :meth:`WritableFormat.lay_out`."""
        from ckptctl.storage.pickles.writer import dumps  # which only those that write need
        from ckptctl.storage.zips.writer import lay_out

        stored = [tensor for tensor in request.tensors if tensor.alias_of is None]
        key_of = {tensor.name: str(position) for position, tensor in enumerate(stored)}
        leaves: list[tuple[tuple[str | int, ...], object]] = [
            (tensor.path, stored_leaf(tensor, key_of[tensor.alias_of or tensor.name]))
            for tensor in request.tensors
        ]
        leaves += [(blob.path, blob.value) for blob in request.blobs]
        storages = [(key_of[tensor.name], tensor.nbytes) for tensor in stored]
        folder = request.name.encode(errors="replace").decode().partition(".")[0] or "archive"
        layout = lay_out(dumps(nest(leaves)), storages, folder=folder)
        records = [
            Record(tensor.name, request.name, offset, tensor.nbytes)
            for tensor, offset in zip(stored, layout.data_offsets, strict=True)
        ]
        boxes = {
            tensor.name: (Place(Box.whole(tensor.shape), position),)
            for position, tensor in enumerate(stored)
        }
        file = OutputFile(request.name, layout.size, ZipFrame([(layout, 0, len(records))]))
        return Output((file,), tuple(records), boxes)


def _one_of_many(error: UnsafePickleError) -> UnsafePickleError | FormatError:
    """Return what to tell about a file of DTensors or ShardedTensors, or *error* for others."""
    if "`torch.distributed." not in error.what:
        return error
    return FormatError(
        "this file holds one rank's part of its tensors",
        where=error.where,
        why=error.what,
        hint="name the directory that holds the files of all ranks",
    )


class ZipFrame:
    """The bytes of a file of ``torch.save`` zips that are not records.

    *zips* has each with its first record and its number of records.
    """

    def __init__(self, zips: Sequence[tuple[ZipLayout, int, int]]) -> None:
        self.zips = zips

    def __call__(self, crc_of: CrcOf) -> Iterator[tuple[int, bytes]]:
        """See :data:`ckptctl.planner.plan.Frame`."""
        for layout, first, count in self.zips:
            yield from layout.frame([crc_of(record) for record in range(first, first + count)])


@dataclass(slots=True)
class Leaves:
    """The tensors and other leaves of a file or of a part of one, or those of all ranks."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    computed: dict[str, Computed] = field(default_factory=dict)

    def add(self, value: object, path: KeyPath, file: str, where: str) -> None:
        """Add all leaves of *value*, none of which may be there already."""
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


def read_leaves(
    files: SourceFiles, name: str, unknown: Unknown = "refuse", *, computed: bool = False
) -> Leaves:
    """Return the tensors and other leaves of one ``torch.save`` file."""
    archive = read_archive(files, name, unknown=unknown, table=KEEPING_TABLE)
    found = leaves_in(archive.root, name, home=str(files.root) if computed else None)
    found.notes[:0] = () if archive.checksums else (NO_CHECKSUMS,)
    return found


def leaves_in(root: object, name: str, path: KeyPath = (), home: str | None = None) -> Leaves:
    """Return the tensors and other leaves of *root*, an object in the file *name*, below *path*.

    Without *home*, the checkpoint's root, views that have to be computed are not read.
    """
    tensors: dict[str, TensorEntry] = {}
    blobs: dict[str, Blob] = {}
    computed: dict[str, Computed] = {}
    seen: dict[object, str] = {}
    sharing: dict[str, dict[str, None]] = {}
    for place, leaf in flatten(root, is_stored, path):
        key = join(place)
        if key in tensors or key in blobs:
            key = _another(key, tensors, blobs)
            dtype, shape = (leaf.dtype, leaf.shape) if isinstance(leaf, StoredTensor) else ("", ())
            why = f"another leaf is called `{join(place)}`, too"
            tensors[key] = TensorEntry.unread(key, dtype, shape, place, why)
        elif isinstance(leaf, StoredTensor) and leaf.base is not None and home is not None:
            stored = TensorEntry(key, leaf.dtype, leaf.shape, (extent_of(leaf.base, name),), place)
            tensors[key], computed[computed_name(key)] = _mirrored(key, place, leaf, stored, home)
        elif isinstance(leaf, StoredTensor) and leaf.unsupported:
            tensors[key] = TensorEntry.unread(key, leaf.dtype, leaf.shape, place, leaf.unsupported)
        elif isinstance(leaf, StoredTensor):
            identity = (leaf.storage, leaf.offset, leaf.dtype, leaf.shape, leaf.strides)
            alias = seen.setdefault(identity, key) if leaf.nbytes else key
            if leaf.nbytes:
                sharing.setdefault(leaf.storage, {})[alias] = None
            tensors[key] = TensorEntry(
                key,
                leaf.dtype,
                leaf.shape,
                (extent_of(leaf, name),),
                place,
                alias_of=None if alias == key else alias,
                requires_grad=leaf.requires_grad,
            )
        else:
            blobs[key] = Blob(key, place, value=leaf)
    notes = [*_apart(sharing.values()), *_inside(blobs.values())]
    return Leaves(tensors, blobs, notes, computed)


def _another(key: str, *known: Collection[str]) -> str:
    """Return a name like *key* that is not known."""
    names = (f"{key} ({number})" for number in range(2, sum(map(len, known)) + 3))
    return next(name for name in names if not any(name in others for others in known))


def _mirrored(
    key: str, place: KeyPath, leaf: StoredTensor, stored: TensorEntry, root: str
) -> tuple[TensorEntry, Computed]:
    """Return a conjugate or negative view, and the virtual file that its elements lie in."""
    flags = dict.fromkeys(sorted(leaf.flags), 1)
    computed = Computed("mirrored", leaf.dtype, leaf.shape, {"base": Input(root, stored)}, flags)
    extents = (computed.extent(computed_name(key)),)
    grad = leaf.requires_grad
    return TensorEntry(key, leaf.dtype, leaf.shape, extents, place, requires_grad=grad), computed


def _inside(blobs: Iterable[Blob]) -> tuple[str, ...]:
    """Return a note on leaves that are no containers and hold tensors."""
    names = [blob.name for blob in blobs if any(is_stored(node) for node in walk(blob.value))]
    return (f"objects that hold tensors are not taken apart: {listed(names)}",) * bool(names)


def _apart(sharing: Iterable[Collection[str]]) -> tuple[str, ...]:
    """Return a note on tensors over one storage that are not the same tensor."""
    names = [name for group in sharing if len(group) > 1 for name in group]
    return (f"tensors that share memory in part are written apart: {listed(names)}",) * bool(names)


def extent_of(stored: StoredTensor, file: str, box: Box | None = None) -> Extent:
    """Return the extent of a tensor found in a ``torch.save`` zip."""
    return Extent(
        box or Box.whole(stored.shape),
        file,
        stored.offset,
        stored.nbytes,
        strides=stored.strides,
        crc32=stored.crc32,
        within=stored.within,
    )


def is_stored(node: object) -> bool:
    """Return whether *node* is a tensor of an archive."""
    return isinstance(node, StoredTensor)


def refuse_hidden_tensors(leaf: object, key: str, where: str) -> None:
    """Refuse a leaf with tensors inside something that cannot be flattened (a set, an object)."""
    if any(is_stored(node) for node in walk(leaf)):
        raise UnsupportedError(
            f"`{key}` holds tensors inside an object that cannot be taken apart",
            where=where,
            hint=excluding(key),
        )


def stored_leaf(tensor: OutputTensor, key: str) -> StorageTensor:
    """Return what is pickled of a tensor whose elements are the record *key* of the same zip."""
    from ckptctl.storage.pickles.writer import StorageTensor

    strides = row_major(tensor.shape)
    return StorageTensor(
        storage_key=key,
        storage_nbytes=tensor.nbytes,
        dtype=tensor.dtype,
        offset=0,
        shape=tensor.shape,
        strides=strides,
        requires_grad=tensor.requires_grad,
    )


def stored_entry(path: KeyPath, tensor: StoredTensor, file: str) -> TensorEntry:
    """Return the entry of a tensor that lies whole in one file."""
    boxes = (extent_of(tensor, file),)
    return TensorEntry(join(path), tensor.dtype, tensor.shape, boxes, path)


FORMAT = TorchFormat()
