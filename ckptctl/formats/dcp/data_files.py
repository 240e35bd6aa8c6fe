"""Laying out ``.distcp`` files: which boxes lie in which file, each in a zip of its own."""

from __future__ import annotations

import math
from functools import lru_cache

from ckptctl.catalog import Blob, Box, row_major
from ckptctl.formats.base import SPLIT_BYTES, OutputRequest, OutputTensor, TensorPlace
from ckptctl.formats.dcp.metadata import Item
from ckptctl.formats.torch_file import ZipFrame
from ckptctl.planner.balance import fill, grouped
from ckptctl.planner.boxes import split_rows
from ckptctl.planner.plan import OutputFile, RawCopy, Record
from ckptctl.storage.pickles.pickle_writer import StorageTensor, dumps
from ckptctl.storage.zips.zip_writer import ZipLayout, lay_out


def shards(request: OutputRequest) -> list[list[tuple[OutputTensor, Box]]]:
    """Return the boxes of each data file of an output."""
    chunks: dict[tuple[str, tuple[int, ...]], tuple[OutputTensor, Box]] = {}
    for tensor in request.tensors:
        pieces = min(-(-tensor.nbytes // SPLIT_BYTES), tensor.shape[0] if tensor.shape else 1)
        whole = [Box.whole(tensor.shape)]
        for box in split_rows(tensor.shape, pieces) if pieces > 1 else whole:
            chunks[tensor.name, box.offsets] = tensor, box
    keys = {f"{position}": chunk for position, chunk in enumerate(chunks.values())}
    if request.like is not None:
        file_of = {key: request.like[tensor.name] for key, (tensor, _) in keys.items()}
        names = grouped(keys, file_of, len(request.like_files))
    else:
        names = fill(
            ((key, _nbytes(*chunk)) for key, chunk in keys.items()), request.max_shard_size
        )
    return [[keys[key] for key in shard] for shard in names]


class DataFiles:
    """Appends items to data files and remembers where they lie.

    Attributes:
        files: The finished files.
        records: The bytes of tensors in them.
        boxes: For each tensor its boxes.
        items: Where the item of each ``(name, offsets)`` lies; offsets None for other leaves.
        raw_copies: Leaves that are copied as they are.
    """

    def __init__(self) -> None:
        self.files: list[OutputFile] = []
        self.records: list[Record] = []
        self.boxes: dict[str, list[TensorPlace]] = {}
        self.items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
        self.raw_copies: list[RawCopy] = []

    def begin(self, file: str) -> None:
        """Start a file; what is added next lies in it."""
        self.file = file
        self.size = 0
        self.zips: list[tuple[ZipLayout, int, int]] = []

    def add_tensor(self, tensor: OutputTensor, box: Box) -> None:
        """Append a box of a tensor, as one record of a zip of its own."""
        nbytes = _nbytes(tensor, box)
        content = _pickled(tensor.dtype, box.sizes, nbytes, tensor.requires_grad)
        layout = lay_out(content, [("0", nbytes)], base=self.size)
        record = len(self.records)
        self.records.append(Record(tensor.name, self.file, layout.data_offsets[0], nbytes))
        self.boxes.setdefault(tensor.name, []).append(TensorPlace(box, record))
        self._append((tensor.name, box.offsets), layout, record, 1)

    def add_blob(self, blob: Blob) -> None:
        """Append a leaf that is no tensor."""
        if blob.file is None:
            layout = lay_out(dumps(blob.value), [], base=self.size)
            self._append((blob.name, None), layout, 0, 0)
            return
        self.raw_copies.append(RawCopy(blob.file, blob.offset, blob.nbytes, self.file, self.size))
        self.items[blob.name, None] = Item(self.file, self.size, blob.nbytes)
        self.size += blob.nbytes

    def finish(self) -> None:
        """End the file."""
        self.files.append(OutputFile(self.file, self.size, ZipFrame(self.zips)))

    def _append(
        self, key: tuple[str, tuple[int, ...] | None], layout: ZipLayout, first: int, count: int
    ) -> None:
        self.zips.append((layout, first, count))
        self.items[key] = Item(self.file, self.size, layout.size)
        self.size += layout.size


@lru_cache(maxsize=1024)
def _pickled(dtype: str, sizes: tuple[int, ...], nbytes: int, requires_grad: bool) -> bytes:
    """Return the ``data.pkl`` of an item; experts have the same by the thousand."""
    stored = StorageTensor(
        storage_key="0",
        storage_nbytes=nbytes,
        dtype=dtype,
        offset=0,
        shape=sizes,
        strides=row_major(sizes),
        requires_grad=requires_grad,
    )
    return dumps(stored)


def _nbytes(tensor: OutputTensor, box: Box) -> int:
    return box.numel * (tensor.nbytes // max(math.prod(tensor.shape), 1))
