"""Lay out ``.distcp`` files, which contain one zip for each chunk of a tensor."""

from __future__ import annotations

import math
from functools import lru_cache

from ckptctl.catalog import Blob, Box, compute_row_major_strides
from ckptctl.formats.base import SPLIT_BYTES, OutputRequest, OutputTensor, TensorPlace
from ckptctl.formats.dcp.metadata import Item
from ckptctl.formats.torch_file import ZipFrame
from ckptctl.planner.balance import group_into_shards, group_names_by_file
from ckptctl.planner.boxes import split_rows
from ckptctl.planner.plan import OutputFile, RawCopy, Record
from ckptctl.storage.pickles.pickle_writer import StorageTensor, dump_pickle
from ckptctl.storage.zips.zip_writer import ZipLayout, compute_zip_layout


def assign_boxes_to_files(request: OutputRequest) -> list[list[tuple[OutputTensor, Box]]]:
    """Split large tensors into chunks, and assign all chunks to data files.

    Returns the ``(tensor, box)`` pairs of each data file.
    """
    chunks: dict[tuple[str, tuple[int, ...]], tuple[OutputTensor, Box]] = {}
    for tensor in request.tensors:
        box_count = min(-(-tensor.nbytes // SPLIT_BYTES), tensor.shape[0] if tensor.shape else 1)
        full_box = [Box.whole(tensor.shape)]
        for box in split_rows(tensor.shape, box_count) if box_count > 1 else full_box:
            chunks[tensor.name, box.offsets] = tensor, box
    chunks_by_key = {f"{position}": chunk for position, chunk in enumerate(chunks.values())}
    if request.like is not None:
        file_by_key = {key: request.like[tensor.name] for key, (tensor, _) in chunks_by_key.items()}
        shards = group_names_by_file(chunks_by_key, file_by_key, len(request.like_files))
    else:
        shards = group_into_shards(
            ((key, _box_nbytes(*chunk)) for key, chunk in chunks_by_key.items()),
            request.max_shard_size,
        )
    return [[chunks_by_key[key] for key in shard] for shard in shards]


class DataFileBuilder:
    """Builder of data files that appends items and records their byte ranges.

    Attributes:
        files: The finished files.
        records: Byte range of each chunk's elements in *files*.
        places_by_name: Boxes of each tensor, with the indices of their records.
        items: File and byte range of each item by ``(name, offsets)``. The offsets are None for
            non-tensor values.
        raw_copies: Non-tensor values whose bytes are copied unchanged from the source.
    """

    def __init__(self) -> None:
        self.files: list[OutputFile] = []
        self.records: list[Record] = []
        self.places_by_name: dict[str, list[TensorPlace]] = {}
        self.items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
        self.raw_copies: list[RawCopy] = []

    def begin_file(self, file: str) -> None:
        """Start a new data file *file*, to which the following items are appended."""
        self.file = file
        self.size = 0
        self.zips: list[tuple[ZipLayout, int, int]] = []

    def add_tensor(self, tensor: OutputTensor, box: Box) -> None:
        """Append *box* of a tensor to the current file, as a zip with one record."""
        nbytes = _box_nbytes(tensor, box)
        content = _encode_item_pickle(tensor.dtype, box.sizes, nbytes, tensor.requires_grad)
        layout = compute_zip_layout(content, [("0", nbytes)], base=self.size)
        record = len(self.records)
        self.records.append(Record(tensor.name, self.file, layout.data_offsets[0], nbytes))
        self.places_by_name.setdefault(tensor.name, []).append(TensorPlace(box, record))
        self._append_zip((tensor.name, box.offsets), layout, record, 1)

    def add_blob(self, blob: Blob) -> None:
        """Append a non-tensor value to the current file."""
        if blob.file is None:
            layout = compute_zip_layout(dump_pickle(blob.value), [], base=self.size)
            self._append_zip((blob.name, None), layout, 0, 0)
            return
        self.raw_copies.append(RawCopy(blob.file, blob.offset, blob.nbytes, self.file, self.size))
        self.items[blob.name, None] = Item(self.file, self.size, blob.nbytes)
        self.size += blob.nbytes

    def finish_file(self) -> None:
        """Finish the current file, and add it to *files*."""
        self.files.append(OutputFile(self.file, self.size, ZipFrame(self.zips)))

    def _append_zip(
        self, key: tuple[str, tuple[int, ...] | None], layout: ZipLayout, first: int, count: int
    ) -> None:
        self.zips.append((layout, first, count))
        self.items[key] = Item(self.file, self.size, layout.size)
        self.size += layout.size


@lru_cache(maxsize=1024)
def _encode_item_pickle(
    dtype: str, sizes: tuple[int, ...], nbytes: int, requires_grad: bool
) -> bytes:
    """Encode the ``data.pkl`` of an item, which is cached because experts have equal shapes."""
    stored = StorageTensor(
        storage_key="0",
        storage_nbytes=nbytes,
        dtype=dtype,
        offset=0,
        shape=sizes,
        strides=compute_row_major_strides(sizes),
        requires_grad=requires_grad,
    )
    return dump_pickle(stored)


def _box_nbytes(tensor: OutputTensor, box: Box) -> int:
    return box.numel * (tensor.nbytes // max(math.prod(tensor.shape), 1))
