"""Reading what was published again, and comparing it with what was written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import StorageError
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.ops.ranks.sharing import portion
from ckptctl.planner.plan import Plan, RawCopy
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.paths import path_at
from ckptctl.storage.ranges import crc_of

WINDOW = 4 << 20
"""Bytes that are compared at a time."""


def require_published(plan: Plan, crcs: Sequence[int], ranks: Coordinator | None = None) -> None:
    """Read what was published and compare every byte that was written.

    Records are compared with their checksums, headers and the like with what they were made of,
    raw copies with their sources.

    Args:
        plan: What was carried out.
        crcs: CRC-32 of each record.
        ranks: Those that share the work, each of which proves its part; None: there are no others.

    Raises:
        StorageError: The output holds other bytes than were written.
    """
    ranks = ranks or Alone()
    target = path_at(plan.target)
    root = target.parent if plan.single_file else target
    records = list(zip(plan.records, crcs, strict=True))
    with source_files(root) as files:
        for file in plan.files:
            _drop_cache(files, file.path)
            if files.size(file.path) != file.size:
                why = f"it has {files.size(file.path):,} bytes instead of {file.size:,}"
                raise _unlike(file.path, root / file.path, why)
        for record, expected in portion(ranks, records, lambda pair: pair[0].nbytes):
            if crc_of(files, record.file, record.offset, record.nbytes) != expected:
                place = _range(record.offset, record.nbytes)
                raise _unlike(record.name, root / record.file, place)
        for file in portion(ranks, plan.files, lambda file: file.size):
            for offset, data in file.frame(crcs.__getitem__):
                if not _holds(files, file.path, offset, data):
                    raise _unlike(file.path, root / file.path, _range(offset, len(data)))
        for raw in portion(ranks, plan.raw_copies, lambda raw: raw.nbytes):
            with source_files(raw.root or plan.source_root) as sources:
                if not _copied(files, sources, raw):
                    place = _range(raw.target_offset, raw.nbytes)
                    raise _unlike(raw.target, root / raw.target, place)


def _unlike(name: str, where: Path, why: str) -> StorageError:
    return StorageError(
        f"`{name}` cannot be read back as it was written",
        where=str(where),
        why=why,
        hint="the storage is not reliable; convert again to another place",
    )


def _range(offset: int, nbytes: int) -> str:
    return f"bytes {offset:,} to {offset + nbytes:,} differ"


def _holds(files: SourceFiles, name: str, offset: int, data: bytes) -> bool:
    return all(
        files.read(name, offset + start, len(part)) == part
        for start in range(0, len(data), WINDOW)
        for part in (data[start : start + WINDOW],)
    )


def _copied(files: SourceFiles, sources: SourceFiles, raw: RawCopy) -> bool:
    return all(
        files.read(raw.target, raw.target_offset + start, size)
        == sources.read(raw.source, raw.offset + start, size)
        for start in range(0, raw.nbytes, WINDOW)
        for size in (min(WINDOW, raw.nbytes - start),)
    )


def _drop_cache(files: SourceFiles, name: str) -> None:
    """Ask the system to forget the file's pages, so that the disk itself is read."""
    if not files.local:
        return
    descriptor = files.descriptor(name)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
