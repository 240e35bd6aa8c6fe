"""What has to hold before a conversion starts and after it is published."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError, UsageError
from ckptctl.formats.base import GB, WritableFormat
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.ops.ranks.sharing import portion
from ckptctl.planner.plan import Plan, RawCopy
from ckptctl.storage import destinations
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.options import LEAST
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.remote.path import path_at
from ckptctl.storage.remote.urls import is_url
from ckptctl.units import format_bytes

WINDOW = 4 << 20


def options(asked: ConversionOptions, target: WritableFormat) -> None:
    """Refuse options that contradict each other or have no meaning for the target.

    Raises:
        UsageError: Naming the option.
    """
    threads = asked.execution().threads
    least = LEAST * threads
    those = f"{threads} threads need" if threads > 1 else "1 thread needs"
    problems = {
        f"--memory is less than the {format_bytes(least)} that {those}": (
            asked.memory is not None and asked.memory < least
        ),
        "--mp goes with --to meta and --to deepseek": asked.mp > 1 and not target.parallel,
        f"--max-shard-size has no meaning for --to {target.name}": (
            asked.max_shard_size != 5 * GB and not target.sharded
        ),
        f"--like has no meaning for --to {target.name}": (
            asked.like is not None and not target.cut_by
        ),
        "--like and --mp both say how many shards": asked.like is not None and asked.mp > 1,
        "--like and --max-shard-size both say how to cut files": (
            asked.like is not None and asked.max_shard_size != 5 * GB
        ),
        "--only all, or --optimizer, needs a target that holds more than a model: dcp or torch": (
            asked.only == "all" and not target.nested
        ),
        "--verify compares checksums, which --no-checksum leaves out": (
            asked.verify and not asked.checksum
        ),
        "--dtype and --dequantize name different dtypes": (
            asked.dequantize is not None and asked.dtype not in (None, asked.dequantize)
        ),
        "--untie keeps what --tied drop leaves out": asked.untie and asked.tied == "drop",
        "--dequantize needs all of the source, and --allow-missing does without": (
            asked.dequantize is not None and asked.allow_missing
        ),
        "--dequantize takes bf16 or fp32": (asked.dequantize not in (None, "bfloat16", "float32")),
        f"--to {target.name} always has layout {target.layout}": (
            target.layout is not None
            and not target.other_layouts
            and asked.to_layout not in (None, target.layout)
        ),
    }
    found = next((problem for problem, holds in problems.items() if holds), None)
    if found:
        raise UsageError(found)


def destination(
    source: Path, target: Path, overwrite: bool, is_checkpoint: Callable[[Path], bool]
) -> Path:
    """Return the absolute destination.

    Raises:
        RefusedError: It exists and may not be replaced, or lies inside the source or around it.
        UsageError: It is a path, and looks like a URL.
        StorageError: Nothing can be made there.
    """
    if is_url(target):
        return _remote_destination(source, target)
    found = destinations.destination(target.expanduser().absolute())
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
    destinations.check_target(found, overwrite=overwrite, is_checkpoint=is_checkpoint)
    destinations.require_writable(found)
    return found


def _remote_destination(source: Path, target: Path) -> Path:
    """Return a destination behind a URL; what is there is looked at when the run begins."""
    same = source == target or source in target.parents or target in source.parents
    if same:
        raise RefusedError("source and destination lie in each other", where=str(target))
    if not target.name or len(target.parts) < 2:
        raise RefusedError("the destination needs a name of its own", where=str(target))
    return target


def free(path: Path) -> int:
    """Return the free bytes of the file system that *path* is, or will be, on.

    Of a URL it is that of the files on their way there.
    """
    return destinations.free_bytes(Path(tempfile.gettempdir()) if is_url(path) else path)


def published(plan: Plan, crcs: Sequence[int], ranks: Coordinator | None = None) -> None:
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
    with SourceFiles(root) as files:
        for file in plan.files:
            _drop_cache(files, file.path)
            if files.size(file.path) != file.size:
                why = f"it has {files.size(file.path):,} bytes instead of {file.size:,}"
                raise _unlike(file.path, root / file.path, why)
        for record, expected in portion(ranks, records, lambda pair: pair[0].nbytes):
            if _crc(files, record.file, record.offset, record.nbytes) != expected:
                place = _range(record.offset, record.nbytes)
                raise _unlike(record.name, root / record.file, place)
        for file in portion(ranks, plan.files, lambda file: file.size):
            for offset, data in file.frame(crcs.__getitem__):
                if not _holds(files, file.path, offset, data):
                    raise _unlike(file.path, root / file.path, _range(offset, len(data)))
        for raw in portion(ranks, plan.raw_copies, lambda raw: raw.nbytes):
            with SourceFiles(raw.root or plan.source_root) as sources:
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
    if not files.local:
        return
    descriptor = files.descriptor(name)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
