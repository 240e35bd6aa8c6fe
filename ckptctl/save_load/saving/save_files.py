"""Layout of the files of each rank in a DCP directory, and encoding of the metadata.

Every rank describes its shards (:mod:`ckptctl.save_load.saving.local_shards`), one rank plans the
save (:mod:`ckptctl.save_load.saving.global_plan`), each rank lays out and writes its files
(:func:`lay_out_rank_files`), and one rank writes the metadata (:func:`make_tensor_metadata`). torch
is not used here: plans refer to memory by name.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry, build_memory_name, compute_row_major_strides
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.data_files import DataFileBuilder
from ckptctl.formats.dcp.metadata import Item
from ckptctl.formats.dcp.metadata_writer import (
    EncodedTensorMetadata,
    LocatedChunk,
    encode_tensor_metadata,
)
from ckptctl.planner.balance import assign_chunks
from ckptctl.planner.plan import CrcLookup, OutputFile, Plan, TargetBox, Transfer
from ckptctl.planner.strided import StridedTensor
from ckptctl.save_load.saving.global_plan import GlobalPlan, RankShare, make_output_tensor
from ckptctl.save_load.saving.local_shards import LocalChunk, LocalShards
from ckptctl.storage.threads import pause_gc

FileCount = Callable[[int], int]
"""Function that returns the number of files into which a rank divides a number of bytes."""


@dataclass(frozen=True, slots=True)
class RankItems:
    """File positions of the boxes that a rank writes, in the order of the rank's share."""

    files: tuple[str, ...]
    file: Sequence[int]  # for each item, the index into *files*
    offset: Sequence[int]
    nbytes: Sequence[int]

    def iterate_positions(self) -> Iterator[tuple[str, int, int]]:
        """Yield the file, offset and size in bytes of each item."""
        return zip((self.files[n] for n in self.file), self.offset, self.nbytes, strict=True)


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Write plan for the tensors of one rank, and the file positions of their boxes."""

    plan: Plan
    items: RankItems


@dataclass(frozen=True, slots=True)
class RankOutput:
    """Write plan for all files of one rank, with the positions of tensors and values."""

    plan: Plan
    tensors: TensorFiles
    items: Mapping[str, Item]


class WrittenBox(NamedTuple):
    """Box that a rank writes as one item, and the index of the chunk that contains it."""

    chunk: int
    box: Box


def lay_out_tensors(
    rank: int,
    shards: LocalShards,
    share: RankShare,
    strides: Sequence[tuple[int, ...]],
    file_count: FileCount = lambda _: 1,
) -> TensorFiles:
    """Assign the tensors that *rank* writes to files and byte offsets.

    Args:
        rank: Rank that writes the files.
        shards: Shards in the rank's memory.
        share: Chunks that the rank writes.
        strides: Strides of each chunk in memory, in elements.
        file_count: Function that returns the number of files for a number of bytes.
    """
    boxes = list(iterate_boxes(shards, share))
    names = [shards.chunks[index].name for index, _ in boxes]
    tensors = [make_output_tensor(name, shards.tensors[name]) for name in names]
    sizes = [
        math.prod(box.sizes) * dtypes.get_itemsize(tensor.dtype)
        for (_, box), tensor in zip(boxes, tensors, strict=True)
    ]
    files = file_count(sum(sizes))
    file_numbers = assign_chunks([(nbytes, range(files)) for nbytes in sizes], files, small_bytes=0)
    writer = DataFileBuilder()
    transfers: list[Transfer] = []
    for number in sorted(set(file_numbers)):
        writer.begin_file(format_data_file_name(rank, number))
        for written_box, tensor, file_number in zip(boxes, tensors, file_numbers, strict=True):
            if file_number == number:
                writer.add_tensor(tensor, written_box.box)
                chunk = shards.chunks[written_box.chunk]
                transfers.append(
                    _make_transfer(chunk, tensor, strides[written_box.chunk], written_box, writer)
                )
        writer.finish_file()
    plan = Plan(
        source_root=Path("/"),
        sources={},
        target=Path(),
        single_file=False,
        files=tuple(writer.files),
        records=tuple(writer.records),
        transfers=tuple(transfers),
        raw_copies=(),
        digest="",
    )
    paths = tuple(file.path for file in writer.files)
    numbers = {path: number for number, path in enumerate(paths)}
    items = [writer.items[name, box.offsets] for name, (_, box) in zip(names, boxes, strict=True)]
    places = RankItems(
        paths,
        array("H", [numbers[item.file] for item in items]),
        array("Q", [item.offset for item in items]),
        array("Q", [item.nbytes for item in items]),
    )
    return TensorFiles(plan, places)


def format_data_file_name(rank: int, number: int) -> str:
    """Return the name of a data file, as ``torch.distributed.checkpoint.save`` names it."""
    return f"__{rank}_{number}.distcp"


def iterate_boxes(shards: LocalShards, share: RankShare) -> Iterator[WrittenBox]:
    """Yield the boxes that a rank writes, in the order of *share*."""
    for position, index in enumerate(share.chunks):
        chunk = shards.chunks[index]
        yield WrittenBox(index, share.parts.get(position) or Box(chunk.offsets, chunk.sizes))


def _make_transfer(
    chunk: LocalChunk,
    tensor: OutputTensor,
    steps: tuple[int, ...],
    written_box: WrittenBox,
    writer: DataFileBuilder,
) -> Transfer:
    sizes, size = written_box.box.sizes, dtypes.get_itemsize(tensor.dtype)
    record = len(writer.records) - 1
    place = writer.records[record]
    positions = zip(written_box.box.offsets, chunk.offsets, steps, strict=True)
    first = sum((low - base) * step for low, base, step in positions) * size
    reach = sum((count - 1) * step for count, step in zip(sizes, steps, strict=True))
    full_box = Box.whole(sizes)
    nbytes = (reach + 1) * size if full_box.numel else 0
    extent = Extent(
        full_box, build_memory_name(str(written_box.chunk)), first, nbytes, strides=steps
    )
    entry = TensorEntry(chunk.name, tensor.dtype, sizes, (extent,), (chunk.name,))
    strides = tuple(step * size for step in compute_row_major_strides(sizes))
    target = TargetBox(place.file, place.offset, full_box.offsets, sizes, strides, record)
    return Transfer(chunk.name, StridedTensor.from_entry(entry), (target,))


def append_values(
    rank: int, files: TensorFiles, written_names: Mapping[str, str], values: Mapping[str, bytes]
) -> RankOutput:
    """Append the non-tensor values of *rank* to the first of its files."""
    if not written_names:
        return RankOutput(files.plan, files, {})
    first_file = files.plan.files[0] if files.plan.files else None
    first = first_file or OutputFile(format_data_file_name(rank, 0), 0, lambda _: iter(()))
    items: dict[str, Item] = {}
    contents: list[tuple[int, bytes]] = []
    size = first.size
    for name, written_name in written_names.items():
        items[written_name] = Item(first.path, size, len(values[name]))
        contents.append((size, values[name]))
        size += len(values[name])

    def yield_frame(crc_of: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield from first.frame(crc_of)
        yield from contents

    longer = OutputFile(first.path, size, yield_frame)
    plan = replace(files.plan, files=(longer, *files.plan.files[1:]))
    return RankOutput(plan, files, items)


def lay_out_rank_files(
    rank: int,
    shards: LocalShards,
    share: RankShare,
    strides: Sequence[tuple[int, ...]],
    values: Mapping[str, bytes],
    file_count: FileCount,
) -> RankOutput:
    """Assign all tensors and values that *rank* writes to files and byte offsets."""
    files = lay_out_tensors(rank, shards, share, strides, file_count)
    return append_values(rank, files, share.values, values)


def make_tensor_metadata(
    global_plan: GlobalPlan, items: Sequence[RankItems]
) -> EncodedTensorMetadata:
    """Encode the tensor entries of the global ``.metadata`` file.

    Entries of non-tensor values are added later.
    """
    tensors, boxes = global_plan.tensors, global_plan.boxes
    places = [rank_items.iterate_positions() for rank_items in items]

    def locate_boxes(boxes: Sequence[Box], writers: Sequence[int]) -> Iterator[LocatedChunk]:
        for box, rank in zip(boxes, writers, strict=True):
            yield box.offsets, *next(places[rank])

    with pause_gc():
        items_of_tensors = (
            (tensor.name, locate_boxes(tensor_boxes, writers))
            for tensor, tensor_boxes, writers in zip(
                tensors, boxes, global_plan.writers, strict=True
            )
        )
        return encode_tensor_metadata(tensors, boxes, items_of_tensors)
