"""Assign file offsets for formats that have one file per model-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.catalog import compute_row_major_strides
from ckptctl.formats.base import OutputLayout, OutputRequest, OutputTensor, TensorPlace
from ckptctl.planner.plan import OutputFile, Record

if TYPE_CHECKING:
    from ckptctl.planner.model_parallel import RankShard
    from ckptctl.planner.plan import CrcLookup, Frame


def lay_out_ranks(
    request: OutputRequest,
    lay_out_rank: Callable[[int, Sequence[OutputTensor]], OutputLayout],
    reason: str,
) -> OutputLayout:
    """Call *lay_out_rank* with each rank and its local tensors, and combine the results.

    *reason* is the reason in the note that non-tensor values are skipped.
    """
    from ckptctl.planner.model_parallel import RankShard

    files: list[OutputFile] = []
    records: list[Record] = []
    boxes: dict[str, list[TensorPlace]] = {}
    shares: dict[str, Sequence[RankShard | None]] = {
        tensor.name: request.rank_boxes(tensor)
        if request.rank_boxes
        else (RankShard.from_shape(tensor.shape),) * request.mp
        for tensor in request.tensors
    }
    for rank in range(request.mp):
        rank_tensors = [
            (candidate, share)
            for candidate in request.tensors
            if (share := shares[candidate.name][rank])
        ]
        shard = lay_out_rank(
            rank, [replace(tensor, shape=share.shape) for tensor, share in rank_tensors]
        )
        for tensor, share in rank_tensors:
            if tensor_places := shard.boxes.get(tensor.name):
                places = _place_pieces(share, len(records) + tensor_places[0].record)
                boxes.setdefault(tensor.name, []).extend(places)
        record_offset = len(records)
        files += [
            replace(f, frame=partial(_shift_records, f.frame, record_offset)) for f in shard.files
        ]
        records += shard.records
    request.notes.explain("skipped", {blob.name: reason for blob in request.blobs})
    placed = {name: tuple(tensor_places) for name, tensor_places in boxes.items()}
    return OutputLayout(tuple(files), tuple(records), placed)


def _place_pieces(share: RankShard, record: int) -> Iterator[TensorPlace]:
    strides = compute_row_major_strides(share.shape)
    for piece in share.pieces:
        if piece.box.sizes == share.shape:
            yield TensorPlace(piece.box, record)
        else:
            start = sum(n * step for n, step in zip(piece.offsets, strides, strict=True))
            yield TensorPlace(piece.box, record, start, strides)


def _shift_records(frame: Frame, offset: int, crc_of: CrcLookup) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of *frame*, which numbers its records from 0 instead of from *offset*."""
    return frame(lambda record: crc_of(record + offset))
