"""A single ``torch.save`` zip file, with a flat or nested state dict.

Source: ``torch/serialization.py`` (``_save``, ``_load``). The zip is read and written by
:mod:`ckptctl.storage.zips.zip_reader` and :mod:`ckptctl.storage.zips.zip_writer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.catalog import Box, Catalog
from ckptctl.errors import ForeignFileError, FormatError, UnsafePickleError
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Listing,
    OutputLayout,
    OutputRequest,
    ReadOptions,
    TensorPlace,
    WritableFormat,
)
from ckptctl.formats.shared.leaves import build_nested_object
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.files import source_files
from ckptctl.storage.stand_ins import has_only_zeros
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.planner.plan import CrcLookup
    from ckptctl.storage.zips.zip_writer import ZipLayout

_ZIP_MAGIC = b"PK\x03\x04"
SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
"""File name suffixes that trainers use for ``torch.save`` files."""

META_SHARD = re.compile(r"consolidated(?:\.(\d+))?\.pth")
HF_BIN = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")


class TorchFormat(WritableFormat):
    """A single ``torch.save`` zip file."""

    name = "torch"
    other_names = ("pt", "pth", "pytorch")
    title = "single torch.save file, flat or nested"
    recognized = (
        "a zip file not named `consolidated.NN.pth` or `pytorch_model*.bin` (Lightning's `*.ckpt`"
        " is one); a file named `*.bin`, `*.ckpt`, `*.pt` or `*.pth` with only zeros, which was "
        "never written"
    )
    wholeness = (
        "the list of records is at the end of the zip, so it is missing from a truncated file; "
        "records have CRC-32 checksums, unless these were omitted"
    )
    tested = "torch 2.13"
    proof = (
        "reading: files of torch 2.13 with every dtype and with views "
        "(tests/contract/test_dtypes.py); writing: `torch.load` reads every dtype and tied "
        "tensors (tests/contract/test_dtypes.py); writing: `torch.load` memory-maps the output "
        "(tests/integration/test_stock_dcp.py)"
    )
    single_file = True
    nested = True
    ties = "kept"

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        path = listing.path
        other_formats = (META_SHARD, HF_BIN)
        if not path.is_file() or any(pattern.fullmatch(path.name) for pattern in other_formats):
            return None
        with path.open("rb") as file:
            head = file.read(4)
        if head == _ZIP_MAGIC:
            return "a zip file"
        is_written = any(head) or path.suffix not in SUFFIXES or not has_only_zeros(path)
        return None if is_written else "only zeros instead of a zip"

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        if path.is_dir():
            raise FormatError(
                "this is a directory", where=str(path), why="expected a single `torch.save` file"
            )
        from ckptctl.formats.shared.stored_leaves import read_leaves

        with source_files(path.parent) as files:
            try:
                contents = read_leaves(files, path.name, computed=True)
            except UnsafePickleError as error:
                if "`torch.distributed." not in error.what:
                    raise
                raise FormatError(
                    "this file contains the shards of a single rank",
                    where=error.where,
                    why=error.what,
                    hint="pass the directory with the files of all ranks",
                ) from error
            except ForeignFileError as error:  # the only file
                fields = {"where": error.where, "why": error.why, "hint": error.hint}
                raise FormatError(error.what, **fields) from error
            return Catalog(
                root=path.parent,
                path=path,
                format=self.name,
                files={path.name: files.size(path.name)},
                tensors=contents.tensors,
                blobs=contents.blobs,
                notes=tuple(contents.notes),
                computed=contents.computed,
            )

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        # Only writing needs these modules.
        from ckptctl.formats.shared.stored_leaves import make_pickled_tensor
        from ckptctl.storage.pickles.pickle_writer import dump_pickle
        from ckptctl.storage.zips.zip_writer import compute_zip_layout

        stored = [tensor for tensor in request.tensors if tensor.alias_of is None]
        storage_keys = {tensor.name: str(position) for position, tensor in enumerate(stored)}
        leaves: list[tuple[tuple[str | int, ...], object]] = [
            (tensor.path, make_pickled_tensor(tensor, storage_keys[tensor.alias_of or tensor.name]))
            for tensor in request.tensors
        ]
        leaves += [(blob.path, blob.value) for blob in request.blobs]
        storages = [(storage_keys[tensor.name], tensor.nbytes) for tensor in stored]
        folder = request.name.encode(errors="replace").decode().partition(".")[0] or "archive"
        layout = compute_zip_layout(
            dump_pickle(build_nested_object(leaves)), storages, folder=folder
        )
        records = [
            Record(tensor.name, request.name, offset, tensor.nbytes)
            for tensor, offset in zip(stored, layout.data_offsets, strict=True)
        ]
        boxes = {
            tensor.name: (TensorPlace(Box.whole(tensor.shape), position),)
            for position, tensor in enumerate(stored)
        }
        file = OutputFile(request.name, layout.size, ZipFrame([(layout, 0, len(records))]))
        return OutputLayout((file,), tuple(records), boxes)


class ZipFrame:
    """Function that yields the bytes of ``torch.save`` zips in one file, except tensor data.

    *zips* lists each zip with the index of its first record and its number of records.
    """

    def __init__(self, zips: Sequence[tuple[ZipLayout, int, int]]) -> None:
        self.zips = zips

    def __call__(self, crc_of: CrcLookup) -> Iterator[tuple[int, bytes]]:
        """See :data:`ckptctl.planner.plan.Frame`."""
        for layout, first, count in self.zips:
            yield from layout.iterate_frame(
                [crc_of(record) for record in range(first, first + count)]
            )


FORMAT = TorchFormat()
