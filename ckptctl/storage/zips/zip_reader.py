"""Reader of ``torch.save`` zips.

The layout is that of ``caffe2/serialize/inline_container.cc``. Ambiguous zips are rejected; see
:mod:`ckptctl.storage.zips.directory`. Legacy files (``torch<1.6``), tar files and bare pickles are
recognized and rejected with a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptctl.catalog import Checksum
from ckptctl.errors import DamagedError, ForeignFileError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Builder, Global
from ckptctl.storage.pickles.pickle_reader import GlobalsTable, Unknown, load_pickle
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import (
    REBUILDERS,
    StorageRef,
    TensorView,
    UnreadableTensorError,
    parse_storage_id,
)
from ckptctl.storage.stand_ins import describe_zeros, raise_if_placeholder
from ckptctl.storage.zips.directory import FileRange, ZipDirectory, ZipRecord, read_zip_directory
from ckptctl.units import pluralize

MAX_PICKLE_BYTES = 1 << 30
BYTES_PER_VALUE = 16
"""Maximum size in bytes of a pickle per value, if the maximum number of values is given."""
_TORCH_UTILS = "torch._utils"
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file that a torch version before 1.6 has saved."""
_SAVE_AGAIN_HINT = "load it once with torch and save it again with `torch.save`"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a file, described by dtype, layout and byte range of its elements.

    Attributes:
        dtype: Dtype, by its torch name.
        shape: Shape of the tensor.
        strides: Strides in elements, or None if the tensor is contiguous.
        offset: File offset of the first element.
        nbytes: Bytes from the start of the first to the end of the last element.
        crc32: CRC-32 of these bytes, or None if they are not a complete, contiguous record or the
            file has no checksums.
        storage: Key of the storage, which is the same for tensors that share memory.
        requires_grad: Recorded value of ``requires_grad``.
        within: Checksum of the record that contains these bytes, or None if *crc32* is set or the
            file has no checksums.
        unsupported: Reason why the elements cannot be read, or None. If set, *nbytes* is 0.
        base: The same tensor without *flags*, or None if it is not supported for another reason.
        flags: Unsupported flags of the view, by their torch names.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    nbytes: int
    crc32: int | None
    storage: str
    requires_grad: bool
    within: Checksum | None = None
    unsupported: str | None = None
    base: StoredTensor | None = None
    flags: frozenset[str] = frozenset()


def _return_unread_tensors(build: Callable[..., object]) -> Callable[..., object]:
    """Wrap *build* to return a tensor without bytes instead of raising `UnreadError`."""

    def build_or_keep(*args: object) -> object:
        try:
            return build(*args)
        except UnreadableTensorError as error:
            base = error.base if isinstance(error.base, StoredTensor) else None
            grad = base is not None and base.requires_grad
            return StoredTensor(
                error.dtype,
                error.shape,
                None,
                0,
                0,
                None,
                "",
                grad,
                unsupported=error.unsupported_message,
                base=base,
                flags=error.flags,
            )

    return build_or_keep


TABLE_WITH_UNREAD_TENSORS: GlobalsTable = {
    **TORCH_TABLE,
    **{
        (_TORCH_UTILS, name): Builder(
            _return_unread_tensors(build), source=Global(_TORCH_UTILS, name)
        )
        for name, build in REBUILDERS.items()
    },
}
"""Table of globals for readers that also list tensors whose elements cannot be read."""


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """Content of one ``torch.save`` zip.

    Attributes:
        root: Saved object, of plain values, inert records and :class:`StoredTensor` leaves. It may
            be walked recursively (:func:`ckptctl.storage.pickles.inert.check_tree` accepted it).
        checksums: Whether the zip has checksums, which its writer may have disabled.
        storages: Zip records of all storages by key, including storages without tensors.
        pickle_nbytes: Size of ``data.pkl`` in bytes, which limits the number of values in *root*.
        folder: Folder of the entries: the stem of the file name passed to ``torch.save``, or
            ``archive`` if it was passed an open file.
    """

    root: object
    checksums: bool
    storages: Mapping[str, ZipRecord]
    pickle_nbytes: int
    folder: str = "archive"


def read_archive(
    files: SourceFiles,
    name: str,
    offset: int = 0,
    length: int | None = None,
    unknown: Unknown = "refuse",
    table: GlobalsTable = TORCH_TABLE,
    max_values: int | None = None,
) -> TorchArchive:
    """Read the directory and the pickle of one zip, but no tensor data.

    Args:
        files: Files of the checkpoint.
        name: File name.
        offset: File offset of the first byte of the zip.
        length: Size of the zip in bytes, or None if it ends with the file.
        unknown: Whether to raise for a global that is not in *table* (``refuse``) or to create
            records of it (``inert``).
        table: Replacements of globals, usually ``TORCH_TABLE`` with additions.
        max_values: Maximum number of values, which also limits the size of the pickle
            (:data:`BYTES_PER_VALUE`), or None to derive it from the size of the pickle.

    Raises:
        ForeignFileError: The file was not written by ``torch.save``, or uses unsupported
            features such as compression or big-endian order.
        DamagedError: The zip is truncated, or a checksum differs.
        UnsupportedError: The zip is inconsistent or hostile, or has tensors that cannot be read
            and that *table* does not keep, such as quantized, sparse or conjugate ones.
    """
    span = FileRange(files, name, offset, files.size(name) - offset if length is None else length)
    if offset == 0 and length is None:
        _require_zip(span)
    directory = read_zip_directory(span)
    storages = _StorageResolver(directory, span)
    pickle = read_zip_pickle(
        span, directory, MAX_PICKLE_BYTES if max_values is None else max_values * BYTES_PER_VALUE
    )
    root = load_pickle(
        pickle,
        where=span.where,
        table=table,
        unknown=unknown,
        persistent_load=storages.load_storage,
        max_values=max_values,
    )
    folder = directory.folder.rstrip("/")
    return TorchArchive(root, directory.checksums, storages.list_records(), len(pickle), folder)


class _StorageResolver:
    """Resolver of the persistent ids in the pickle of one zip."""

    __slots__ = ("directory", "known", "span")

    def __init__(self, directory: ZipDirectory, span: FileRange) -> None:
        self.directory = directory
        self.span = span
        self.known: dict[str, StorageRef] = {}

    def load_storage(self, pid: object) -> object:
        """Return the storage for a persistent id, or raise if the zip does not contain it.

        torch gives all empty storages the same key, whatever their dtypes.
        """
        key, dtype, nbytes = parse_storage_id(pid)
        storage = self.known.get(key)
        if storage is None or nbytes == storage.nbytes == 0:
            _require_record(key, nbytes, self.directory, self.span)
            storage = self.known[key] = StorageRef(key, dtype, nbytes, self.locate_tensor)
        if (storage.dtype, storage.nbytes) != (dtype, nbytes):
            raise UnsupportedError(
                f"storage `{key}` is declared in two different ways", where=self.span.where
            )
        return storage

    def locate_tensor(self, view: TensorView) -> object:
        """Return the tensor that *view* describes, with its byte range in the file."""
        return locate_tensor(view, self.directory, self.span)

    def list_records(self) -> dict[str, ZipRecord]:
        """Return the zip records of all storages, by storage key."""
        prefix = self.directory.folder + "data/"
        return {
            name[len(prefix) :]: record
            for name, record in self.directory.records.items()
            if name.startswith(prefix)
        }


def _require_record(key: str, nbytes: int, directory: ZipDirectory, span: FileRange) -> ZipRecord:
    record = directory.records.get(f"{directory.folder}data/{key}")
    if record is None:
        raise DamagedError(
            f"storage `{key[:100]}` is missing",
            where=span.where,
            why="the pickle refers to it, but the zip has no such record",
        )
    if record.nbytes != nbytes:
        error_type = DamagedError if record.nbytes < nbytes else UnsupportedError
        raise error_type(
            f"storage `{key}` has the wrong size",
            where=span.where,
            why=f"the pickle declares {pluralize(nbytes, 'byte')}, but the record has "
            f"{record.nbytes:,}",
        )
    return record


def locate_tensor(view: TensorView, directory: ZipDirectory, span: FileRange) -> StoredTensor:
    """Return the tensor that *view* describes, with its byte range in the file.

    Raises an error if the storage of the tensor is missing or has the wrong size.
    """
    record = _require_record(view.storage, view.storage_nbytes, directory, span)
    is_complete = view.strides is None and view.nbytes == record.nbytes
    begin = span.base + record.offset
    return StoredTensor(
        view.dtype,
        view.shape,
        view.strides,
        begin + view.offset,
        view.nbytes,
        record.crc32 if is_complete and directory.checksums else None,
        view.storage,
        view.requires_grad,
        None
        if is_complete or not directory.checksums
        else Checksum(begin, record.nbytes, record.crc32),
    )


def read_zip_pickle(
    span: FileRange, directory: ZipDirectory, limit: int = MAX_PICKLE_BYTES
) -> bytes:
    """Read ``data.pkl`` of a zip that ``torch.save`` has written.

    Raises an error if ``data.pkl`` exceeds *limit* bytes, or if the zip is a big-endian file or a
    TorchScript archive.
    """
    name = directory.folder + "data.pkl"
    order = directory.records.get(directory.folder + "byteorder")
    if order is not None and span.read_record(order, directory.checksums, limit=16) != b"little":
        raise ForeignFileError("the file is big-endian", where=span.where, hint=_SAVE_AGAIN_HINT)
    if directory.folder + "constants.pkl" in directory.records:
        raise ForeignFileError(
            "this is a TorchScript archive",
            where=span.where,
            hint="load it with `torch.jit.load` and save its `state_dict()`",
        )
    record = directory.records.get(name)
    if record is None:
        raise ForeignFileError(
            "not a `torch.save` file: the zip does not contain data.pkl", where=span.where
        )
    return span.read_record(record, directory.checksums, limit=limit)


def _require_zip(span: FileRange) -> None:
    """Raise an error that names the kind of the file if it is not a zip."""
    head = span.read_bytes(0, min(span.length, 512))
    if head.startswith(b"PK\3\4"):
        return
    if head.startswith(LEGACY_MAGIC):
        kind = "a legacy torch file (from before torch 1.6)"
    elif head[257:262] == b"ustar":
        kind = "a tar archive (perhaps from before torch 0.1.10)"
    elif len(head) > 1 and head[0] == 0x80 and head[1] in range(2, 6):
        kind = "a bare pickle"
    elif span.length >= 22 and span.read_bytes(span.length - 22, 4) == b"PK\5\6":
        raise UnsupportedError(
            "bytes before the zip", where=span.where, why="the zip must start at byte 0"
        )
    else:
        raise_if_placeholder(span.files, span.name)
        if b"PK\3\4".startswith(head) or not any(head):
            why = (
                f"the file has {pluralize(span.length, 'byte')}"
                if len(head) < 4
                else describe_zeros(span.files, span.name)
            )
            raise DamagedError("the file was not written completely", where=span.where, why=why)
        raise ForeignFileError("not a `torch.save` file", where=span.where)
    raise ForeignFileError(f"this is {kind}", where=span.where, hint=_SAVE_AGAIN_HINT)
