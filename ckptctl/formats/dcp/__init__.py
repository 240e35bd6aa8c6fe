"""``torch.distributed.checkpoint`` directories.

Source: ``torch/distributed/checkpoint/filesystem.py`` (file names, write items) and
``metadata.py``. A ``.distcp`` file is a concatenation of write items. Each item is a
``torch.save`` zip with one tensor chunk or one non-tensor value. ``.metadata`` records the byte
range of each item, and the shape and dtype of each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ckptctl.catalog import Blob, Catalog, Index, TupleIndex
from ckptctl.errors import DamagedError, FormatError, quote_names
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Format,
    Listing,
    OutputLayout,
    OutputRequest,
    OutputTensor,
    ReadOptions,
    WritableFormat,
    make_content_file,
)
from ckptctl.formats.shared.leaves import flatten_mappings, is_empty_dict, join_path
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"


class ItemFormat(Format):
    """Format that stores each tensor chunk as an item, such as a zip, around the raw elements.

    Items must be read to find the byte ranges of the elements.
    """

    stores_empty_dicts = False

    def resolve_codecs(self, catalog: Catalog) -> Catalog:
        """See :meth:`Format.resolve_codecs`."""
        from ckptctl.formats.dcp.dcp_reader import resolve_dcp_items

        return resolve_dcp_items(catalog)


class DcpFormat(ItemFormat, WritableFormat):
    """DCP checkpoint directory with one ``.metadata`` file for all ranks."""

    name = "dcp"
    other_names = ("fsdp", "fsdp2", "torchtitan")
    title = "torch.distributed.checkpoint directory"
    recognized = "`.metadata`, unless it is ByteCheckpoint's or Megatron-Core's"
    marks = re.compile(re.escape(METADATA))
    part_names = re.compile(rf"{re.escape(METADATA)}|.*{re.escape(DATA_SUFFIX)}", re.DOTALL)
    wholeness = (
        "the chunks in `.metadata` tile every tensor; the file of every chunk exists and is long "
        "enough"
    )
    tested = "torch 2.13 (1-4 ranks), Lightning, accelerate, FSDP1/2, HSDP, TP"
    proof = (
        "reading: checkpoints of torch 2.13 on 2 and 4 ranks equal the output of "
        "`dcp_to_torch_save` (tests/integration/test_stock_dcp.py); reading: checkpoints of "
        "Lightning and accelerate equal the output of their own tools "
        "(tests/unit/formats/test_wrappers.py); reading: checkpoints of FSDP1, FSDP2, HSDP and "
        "tensor parallelism on 1 to 4 ranks equal the live weights "
        "(tests/oracle/trainers/test_torch.py); reading: compressed checkpoints equal the saved "
        "tensors (tests/unit/formats/dcp/test_extensions.py); reading: safetensors data files "
        "equal the saved tensors (tests/unit/formats/dcp/test_safetensors_items.py); writing: "
        "stock `dcp.load` loads the output with other world sizes, and `dcp_to_torch_save` in one"
        " process (tests/integration/test_stock_dcp.py)"
    )
    nested = True
    verbatim = True
    sharded = True
    ties = "written in full"

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if not listing.has_file(METADATA):
            return None
        count = sum(name.endswith(DATA_SUFFIX) for name in listing.names)
        return f"{METADATA} and {pluralize(count, f'{DATA_SUFFIX} file')}"

    def is_interrupted(self, listing: Listing) -> bool:
        """Return whether data files exist without ``.metadata``, which a save writes last."""
        names = [name for name in listing.names if name.endswith((METADATA, DATA_SUFFIX))]
        if not listing.is_folder or listing.has_file(METADATA):
            return False
        if any(name.endswith(METADATA) and name != METADATA for name in names):
            return False  # each rank has its own metadata
        return any(name != METADATA or (listing.path / name).is_symlink() for name in names)

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        listing = Listing(path)
        if self.is_interrupted(listing):
            raise DamagedError(
                f"`{METADATA}` is missing",
                where=str(path / METADATA),
                why="this file is written last, so the save was interrupted",
            )
        if not listing.has_file(METADATA):
            raise FormatError(
                "this is not a DCP checkpoint",
                where=str(path),
                why=f"expected a directory with {METADATA} and .distcp files",
            )
        from ckptctl.formats.dcp.dcp_reader import read_catalog

        return read_catalog(path, METADATA, options, self.name)

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        # Only writing needs these modules.
        from ckptctl.formats.dcp.data_files import DataFileBuilder, assign_boxes_to_files
        from ckptctl.formats.dcp.metadata_writer import encode_metadata

        request = _skip_empty_dicts(_flatten_mappings(request))
        writer = DataFileBuilder()
        for position, shard in enumerate(assign_boxes_to_files(request)):
            writer.begin_file(f"__0_{position}.distcp")
            if not position:
                for blob in request.blobs:
                    writer.add_blob(blob)
            for tensor, box in shard:
                writer.add_tensor(tensor, box)
            writer.finish_file()
        content = encode_metadata(
            request.tensors, request.blobs, writer.places_by_name, writer.items
        )
        writer.files.append(make_content_file(METADATA, content))
        request.notes.add(*_list_unsupported_notes(request))
        boxes = {name: tuple(places) for name, places in writer.places_by_name.items()}
        files, records = tuple(writer.files), tuple(writer.records)
        return OutputLayout(files, records, boxes, tuple(writer.raw_copies))


def format_metadata_name(rank: int) -> str:
    """Return the metadata file name of *rank* in a save where each rank writes its own metadata."""
    return f"__{rank}{METADATA}"


def _flatten_mappings(request: OutputRequest) -> OutputRequest:
    """Return *request* with one value for each item of dictionaries that are values.

    ``dcp.save`` flattens every mapping, whatever its keys are, and ``dcp.load`` expects that.
    Dictionaries that a save of torch 2.3 or earlier stores as values are kept.
    """
    if any(blob.file and isinstance(blob.value, dict) for blob in request.blobs):
        return request
    blobs = list(flatten_mappings(request.blobs))
    if flattened := {blob.name for blob in request.blobs} - {blob.name for blob in blobs}:
        names = quote_names(sorted(flattened))
        request.notes.add(f"DCP stores the keys of these as strings: {names}")
    return replace(request, blobs=blobs)


def _skip_empty_dicts(request: OutputRequest) -> OutputRequest:
    """Return *request* without empty dictionaries, and add notes on them.

    Stock ``dcp.load`` takes a checkpoint with a dictionary as a value for one of torch 2.3 or
    earlier, in which every dictionary without tensors is a value. In such a checkpoint, empty
    dictionaries are values, too.
    """
    names = [blob.name for blob in request.blobs if is_empty_dict(blob)]
    if any(isinstance(blob.value, dict) and blob.value for blob in request.blobs):
        return request
    request.notes.explain("skipped", dict.fromkeys(names, "DCP stores no empty dictionaries"))
    return replace(request, blobs=[blob for blob in request.blobs if not is_empty_dict(blob)])


def _list_unsupported_notes(request: OutputRequest) -> Iterator[str]:
    """Yield notes on tied tensors and integer keys, which DCP cannot express."""
    leaves: list[OutputTensor | Blob] = [*request.tensors, *request.blobs]
    aliases = [tensor.name for tensor in request.tensors if tensor.alias_of]
    if aliases:
        yield f"DCP does not support tied tensors; each is written in full: {quote_names(aliases)}"
    integer_keyed = [
        leaf.name for leaf in leaves if not all(isinstance(key, str | Index) for key in leaf.path)
    ]
    if integer_keyed:
        yield (
            f"DCP does not support integer keys; they become strings: {quote_names(integer_keyed)}"
        )
    tuples = dict.fromkeys(
        join_path(leaf.path[:depth])
        for leaf in leaves
        for depth, key in enumerate(leaf.path)
        if isinstance(key, TupleIndex)
    )
    if tuples:
        yield f"DCP does not support tuples of tensors; they become lists: {quote_names([*tuples])}"


FORMAT = DcpFormat()
