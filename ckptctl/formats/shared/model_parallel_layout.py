"""Formats with one file per model-parallel rank: what each file holds, and where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.catalog import row_major
from ckptctl.errors import DamagedError
from ckptctl.formats.base import Output, OutputRequest, OutputTensor, Place, absent
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.units import counted

if TYPE_CHECKING:
    from ckptctl.planner.model_parallel import RankShard


def require_all(found: Collection[int], total: int, name: Callable[[int], str], root: Path) -> None:
    """Refuse that the files of some ranks are missing."""
    if len(found) != total:
        count, names = absent(found, 0, total - 1, name)
        raise DamagedError(
            f"{count:,} of {counted(total, 'shard is', 'shards are')} missing",
            where=str(root),
            why=names,
        )


def lay_out(
    request: OutputRequest, one: Callable[[int, Sequence[OutputTensor]], Output], reason: str
) -> Output:
    """Return the layout of one file per rank."""
    files: list[OutputFile] = []
    records: list[Record] = []
    boxes: dict[str, list[Place]] = {}
    shares = {tensor.name: _shares_of(tensor, request) for tensor in request.tensors}
    for rank in range(request.mp):
        held = {name: found[rank] for name, found in shares.items()}
        shard = one(rank, list(_parts(request.tensors, held)))
        for name, share in held.items():
            if share is not None and name in shard.boxes:
                record = len(records) + shard.boxes[name][0].record
                boxes.setdefault(name, []).extend(_places(share, record))
        files += [_shifted(file, len(records)) for file in shard.files]
        records += shard.records
    request.notes.explain("skipped", {blob.name: reason for blob in request.blobs})
    placed = {name: tuple(found) for name, found in boxes.items()}
    return Output(tuple(files), tuple(records), placed)


def _shares_of(tensor: OutputTensor, request: OutputRequest) -> Sequence[RankShard | None]:
    from ckptctl.planner.model_parallel import RankShard

    if request.rank_boxes is None:
        return (RankShard.whole(tensor.shape),) * request.mp
    return request.rank_boxes(tensor)


def _parts(
    tensors: Sequence[OutputTensor], held: Mapping[str, RankShard | None]
) -> Iterator[OutputTensor]:
    for tensor in tensors:
        share = held[tensor.name]
        if share is not None:
            yield replace(tensor, shape=share.shape)


def _places(share: RankShard, record: int) -> Iterator[Place]:
    strides = row_major(share.shape)
    for piece in share.pieces:
        if piece.box.sizes == share.shape:
            yield Place(piece.box, record)
        else:
            start = sum(n * step for n, step in zip(piece.offsets, strides, strict=True))
            yield Place(piece.box, record, start, strides)


def _shifted(file: OutputFile, by: int) -> OutputFile:
    frame = file.frame
    return replace(file, frame=lambda crc_of: frame(lambda record: crc_of(record + by)))
