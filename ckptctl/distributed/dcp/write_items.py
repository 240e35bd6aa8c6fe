"""Write items of any save planner as what one rank holds and writes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckptctl import dtypes
from ckptctl.distributed.compat import StorageInfo
from ckptctl.errors import MappingError, RefusedError
from ckptctl.ops.saving.decision import Share
from ckptctl.ops.saving.files import RankFiles, rank_files
from ckptctl.ops.saving.holdings import Chunk, Described, Holding


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the items of a plan stand for.

    Attributes:
        tensors: Items of tensors, in order.
        values: Other items likewise.
        pieces: Memory of each of the former.
        files: What is written of all of them.
    """

    tensors: Sequence[WriteItem]
    values: Sequence[WriteItem]
    pieces: Sequence[torch.Tensor]
    files: RankFiles

    def results(self) -> list[WriteResult]:
        """Return where each item lies."""
        places = self.files.tensors.items
        found = [
            _result(item, places.files[file], offset, nbytes)
            for item, file, offset, nbytes in zip(
                self.tensors, places.file, places.offset, places.nbytes, strict=True
            )
        ]
        return found + [_result(item, *self.files.items[item.index.fqn]) for item in self.values]


def resolve(plan: SavePlan, planner: SavePlanner, rank: int, files: int) -> Resolved:
    """Ask *planner* for all that *plan* writes, and lay out the files of *rank*.

    Args:
        plan: The final plan of this rank.
        planner: Of any kind.
        rank: Its number.
        files: Among how many files its tensors are spread.

    Raises:
        MappingError: What the planner gives is not what its plan says.
        RefusedError: It cannot be kept in a checkpoint.
    """
    values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
    described: dict[str, Described] = {}
    chunks: list[Chunk] = []
    pieces: list[torch.Tensor] = []
    for item in tensors:
        name = item.index.fqn
        piece = _piece(item, planner)
        described[name] = _described(item, described.get(name))
        assert item.tensor_data
        chunk = item.tensor_data.chunk
        chunks.append(Chunk(name, tuple(chunk.offsets), tuple(chunk.sizes)))
        pieces.append(piece)
    contents = {item.index.fqn: _content(item, planner) for item in values}
    steps = [tuple(piece.stride()) for piece in pieces]
    share = Share(range(len(chunks)), {name: name for name in contents})
    laid_out = rank_files(rank, Holding(described, chunks), share, steps, contents, files)
    return Resolved(tensors, values, pieces, laid_out)


def _piece(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    found = planner.resolve_data(item)
    data = item.tensor_data
    if not isinstance(found, torch.Tensor) or data is None:
        raise MappingError(f"`{item.index.fqn}` is planned as a tensor and is none")
    piece = found.detach()
    if piece.layout is not torch.strided or piece.is_quantized or piece.is_meta:
        raise RefusedError(f"`{item.index.fqn}` has no plain memory", why=f"it is {piece.layout}")
    planned = (data.properties.dtype, tuple(data.chunk.sizes))
    if (piece.dtype, tuple(piece.shape)) != planned:
        raise MappingError(
            f"`{item.index.fqn}` is not what the plan says",
            where=f"tensor `{item.index.fqn}`",
            why=f"it is {piece.dtype} {list(piece.shape)}, the plan says "
            f"{planned[0]} {list(planned[1])}",
            hint="the plan was made for another state",
        )
    return piece.resolve_conj().resolve_neg()


def _described(item: WriteItem, known: Described | None) -> Described:
    name, data = item.index.fqn, item.tensor_data
    assert data
    dtype = str(data.properties.dtype).removeprefix("torch.")
    if dtype not in dtypes.BY_NAME:
        raise RefusedError(f"`{name}` has dtype {dtype}, which no format here can hold")
    found = Described(dtype, tuple(data.size), (name,), bool(data.properties.requires_grad))
    if known not in (None, found):
        raise MappingError(f"two boxes of `{name}` are planned as parts of different tensors")
    return found


def _content(item: WriteItem, planner: SavePlanner) -> bytes:
    found = planner.resolve_data(item)
    if not isinstance(found, io.BytesIO):
        raise MappingError(f"`{item.index.fqn}` is planned as bytes and is none")
    return found.getvalue()


def _result(item: WriteItem, file: str, offset: int, nbytes: int) -> WriteResult:
    return WriteResult(item.index, nbytes, StorageInfo(file, offset, nbytes))
