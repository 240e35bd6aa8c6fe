"""The files of a rank written from front to back, where they cannot be filled by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import IO

import torch

from ckptctl import dtypes
from ckptctl.catalog import memory_key
from ckptctl.distributed.state import memory
from ckptctl.planner.copying.tile import MIB
from ckptctl.planner.plan import OutputFile, Plan, Transfer
from ckptctl.storage.crc import crc32
from ckptctl.storage.remote.store import FsspecStore

BLOCK = 16 * MIB


def stream(
    plan: Plan, pieces: Sequence[torch.Tensor], store: FsspecStore, *, checksum: bool
) -> None:
    """Write a rank's files into *store*, one after the other.

    Args:
        plan: Of :func:`ckptctl.ops.saving.files.rank_files`.
        pieces: Memory of each chunk.
        store: The folder behind a URL.
        checksum: Whether records carry CRC-32; then each is read twice.

    Raises:
        StorageError: A file cannot be written.
    """
    sources = {_record(one): _source(one, pieces) for one in plan.transfers}
    for file in plan.files:
        inside = (n for n, record in enumerate(plan.records) if record.file == file.path)
        records = sorted(inside, key=lambda number: plan.records[number].offset)
        with store.create(file.path) as target:
            _write(file, [sources[number] for number in records], records, target, checksum)


def _write(
    file: OutputFile,
    sources: Sequence[torch.Tensor],
    records: Sequence[int],
    target: IO[bytes],
    checksum: bool,
) -> None:
    known = dict(zip(records, sources, strict=True))
    pending, position = iter(sources), 0

    @cache
    def crc_of(record: int) -> int:
        crc = 0
        for block in _blocks(known[record]) if checksum else ():
            crc = crc32(block, crc)
        return crc

    for offset, part in file.frame(crc_of):
        while position < offset:
            for block in _blocks(next(pending)):
                target.write(block)
                position += len(block)
        target.write(part)
        position += len(part)
    assert position == file.size


def _record(transfer: Transfer) -> int:
    return transfer.target.operands[0].record


def _source(transfer: Transfer, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    (operand,) = transfer.source.operands
    piece = pieces[int(memory_key(operand.file))]
    size = dtypes.itemsize(transfer.source_dtype)
    start = piece.storage_offset() + operand.offset // size
    return piece.as_strided(operand.sizes, [step // size for step in operand.strides], start)


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the row-major elements of *tensor*, a part at a time, in host memory."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return
    if nbytes <= BLOCK or tensor.ndim == 0:
        block = tensor.to("cpu").contiguous()
        yield memory(block)
        return
    rows = BLOCK // (math.prod(tensor.shape[1:]) * tensor.element_size())
    for start in range(0, tensor.shape[0], max(rows, 1)):
        part = tensor[start : start + max(rows, 1)]
        yield from _blocks(part if rows else part[0])
