"""What has to hold before a conversion starts and after it is published."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError, UsageError
from ckptctl.formats.base import GB, WritableFormat
from ckptctl.ops.options import ConversionOptions
from ckptctl.planner.plan import Plan
from ckptctl.storage import publish
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import SourceFiles

WINDOW = 4 << 20


def options(asked: ConversionOptions, target: WritableFormat) -> None:
    """Refuse options that contradict each other or have no meaning for the target.

    Raises:
        UsageError: Naming the option.
    """
    problems = {
        "--mp goes with --to meta": asked.mp > 1 and target.name != "meta",
        "--max-shard-size has no meaning for one file per rank": (
            asked.max_shard_size != 5 * GB and target.name in ("meta", "torch")
        ),
        "--like has no meaning for a single file": asked.like is not None and target.single_file,
        "--like and --mp both say how many shards": asked.like is not None and asked.mp > 1,
        "--like and --max-shard-size both say how to cut files": (
            asked.like is not None and asked.max_shard_size != 5 * GB
        ),
        "--only all needs a target that holds more than a model: dcp or torch": (
            asked.only == "all" and not target.nested
        ),
        "--verify compares checksums, which --no-checksum leaves out": (
            asked.verify and not asked.checksum
        ),
        f"--to {target.name} always has layout {target.layout}": (
            target.layout is not None and asked.to_layout not in (None, target.layout)
        ),
    }
    found = next((problem for problem, holds in problems.items() if holds), None)
    if found:
        raise UsageError(found)


def destination(
    source: Path, target: Path, overwrite: bool, recognise: Callable[[Path], Mapping[str, object]]
) -> Path:
    """Return the absolute destination.

    Raises:
        RefusedError: It exists and may not be replaced, or lies inside the source or around it.
    """
    found = publish.destination(target.expanduser().absolute())
    real, origin = found.resolve(), source.resolve()
    if real == origin:
        raise RefusedError("source and destination are the same", where=str(target))
    if origin.is_dir() and real.is_relative_to(origin):
        raise RefusedError(
            "the destination lies inside the source",
            where=str(target),
            why=f"{source} is read-only",
        )
    if origin.is_relative_to(real):
        raise RefusedError("the source lies inside the destination", where=str(target))
    publish.check_target(
        found, overwrite=overwrite, is_checkpoint=lambda path: bool(recognise(path))
    )
    return found


def free(path: Path) -> int:
    """Return the free bytes of the file system that *path* is, or will be, on."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def published(plan: Plan, crcs: Sequence[int]) -> None:
    """Read what was published and compare each record with its checksum.

    Raises:
        StorageError: A record holds other bytes than were written.
    """
    root = Path(plan.target).parent if plan.single_file else Path(plan.target)
    with SourceFiles(root) as files:
        for file in plan.files:
            _drop_cache(files, file.path)
        for record, expected in zip(plan.records, crcs, strict=True):
            if _crc(files, record.file, record.offset, record.nbytes) != expected:
                raise StorageError(
                    f"`{record.name}` cannot be read back as it was written",
                    where=str(root / record.file),
                    why=f"bytes {record.offset:,} to {record.offset + record.nbytes:,} differ",
                    hint="the storage is not reliable; convert again to another place",
                )


def _crc(files: SourceFiles, name: str, offset: int, nbytes: int) -> int:
    buffer = memoryview(bytearray(min(WINDOW, nbytes)))
    crc = 0
    for start in range(0, nbytes, WINDOW):
        view = buffer[: min(WINDOW, nbytes - start)]
        files.readv(name, [view], offset + start)
        crc = crc32(view, crc)
    return crc


def _drop_cache(files: SourceFiles, name: str) -> None:
    """Ask the system to forget the file's pages, so that the disk itself is read."""
    descriptor = files.descriptor(name)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
