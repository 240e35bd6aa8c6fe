"""Lay out formats with one file per model-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.catalog import row_major
from ckptctl.formats.base import OutputLayout, OutputRequest, OutputTensor, TensorPlace
from ckptctl.planner.plan import OutputFile, Record

if TYPE_CHECKING:
    from ckptctl.planner.model_parallel import RankShard
    from ckptctl.planner.plan import CrcOf, Frame


def lay_out(
    request: OutputRequest,
    one_rank: Callable[[int, Sequence[OutputTensor]], OutputLayout],
    reason: str,
) -> OutputLayout:
    """Combine the layouts of all ranks' files, made by *one_rank*."""
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
        own = [(one, share) for one in request.tensors if (share := shares[one.name][rank])]
        shard = one_rank(rank, [replace(tensor, shape=share.shape) for tensor, share in own])
        for tensor, share in own:
            if found := shard.boxes.get(tensor.name):
                places = _places(share, len(records) + found[0].record)
                boxes.setdefault(tensor.name, []).extend(places)
        before = len(records)
        files += [replace(f, frame=partial(_shifted, f.frame, before)) for f in shard.files]
        records += shard.records
    request.notes.explain("skipped", {blob.name: reason for blob in request.blobs})
    placed = {name: tuple(found) for name, found in boxes.items()}
    return OutputLayout(tuple(files), tuple(records), placed)


def _places(share: RankShard, record: int) -> Iterator[TensorPlace]:
    strides = row_major(share.shape)
    for piece in share.pieces:
        if piece.box.sizes == share.shape:
            yield TensorPlace(piece.box, record)
        else:
            start = sum(n * step for n, step in zip(piece.offsets, strides, strict=True))
            yield TensorPlace(piece.box, record, start, strides)


def _shifted(frame: Frame, by: int, crc_of: CrcOf) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of *frame*, with its record numbers shifted by *by*."""
    return frame(lambda record: crc_of(record + by))
