"""The identity of a checkpoint's files, and the fingerprint that ranks compare."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import MANIFEST, Catalog
from ckptctl.errors import RefusedError
from ckptctl.file_identity import FileIdentity
from ckptctl.ranks.coordinator import format_ranks
from ckptctl.save_load.saving.local_shards import digest
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

SETTLED_NS = 100_000_000
MOST_FILES = 100_000
Stamp = tuple[str, FileIdentity]
SAMPLES = 16
SAMPLE = 256
SHOWN = 12
"""Characters of an ID shown in messages."""


class _UnsettledError(Exception):
    """There are too many files to compute an identity."""


def identity(paths: Iterable[str | TreePath | None]) -> bytes | None:
    """Compute the identity of the files below *paths*, without opening them.

    It covers the name, size, times, inode and device of every file. A file that was just written
    could be written again without a change of these, as the clocks of file systems tick every few
    milliseconds. Such a checkpoint has no identity yet; git treats its index in the same way
    (``Documentation/technical/racy-git.adoc``).

    Args:
        paths: Directories, including all their contents, and files, including the other files of
            their directory. None is ignored.

    Returns:
        A digest, or None if there is no reliable identity, for example for URLs.
    """
    found: list[Stamp] = []
    try:
        for path in paths:
            if path is not None and is_url(path):
                return None
            if path is not None:
                found += sorted(_stamps(Path(path).expanduser().absolute()))
    except (_UnsettledError, OSError):
        return None
    newest = max((max(one.mtime_ns, one.ctime_ns) for _, one in found), default=0)
    return digest(found) if found and newest < time.time_ns() - SETTLED_NS else None


def _stamps(path: Path) -> Iterator[Stamp]:
    stamps = _below(path, set()) if path.is_dir() else _beside(path)
    for count, stamp in enumerate(stamps):
        if count >= MOST_FILES:
            raise _UnsettledError
        yield stamp


def _below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Stamp]:
    """Yield the stamps of all files below *folder*, following symbolic links."""
    own = folder.stat()
    if (own.st_dev, own.st_ino) in seen:
        return
    seen.add((own.st_dev, own.st_ino))
    yield str(folder), FileIdentity.from_stat(own)
    with os.scandir(folder) as entries:
        for entry in entries:
            yield from _below(Path(entry.path), seen) if entry.is_dir() else [_stamp(entry)]


def _beside(path: Path) -> Iterator[Stamp]:
    """Yield the stamps of a file and of the files in its directory."""
    yield str(path), FileIdentity.from_stat(path.stat())
    with os.scandir(path.parent) as entries:
        yield from (_stamp(entry) for entry in entries if not entry.is_dir())


def _stamp(entry: os.DirEntry[str]) -> Stamp:
    try:
        return entry.path, FileIdentity.from_stat(entry.stat())
    except FileNotFoundError:  # a dangling symbolic link
        return entry.path, FileIdentity.from_stat(entry.stat(follow_symlinks=False))


class Fingerprint(NamedTuple):
    """Fingerprint of the checkpoint that one rank sees, for comparison with other ranks.

    Ranks with local disks or stale mounts can see different checkpoints at the same path. Copies
    of a checkpoint have equal fingerprints, whatever their times and inodes: saves are identified
    by their ID and the names and sizes of their files. Checkpoints without an ID (safetensors,
    files of ``torch.save``) are identified by the index, the manifest and samples of the data.
    """

    digest: bytes
    words: str


def fingerprint_of(catalog: Catalog) -> Fingerprint:
    """Compute the fingerprint of a checkpoint."""
    files = sorted(catalog.files.items())
    found = digest((catalog.format, files, catalog.save_id or _content(catalog)))
    name = (
        f"save {catalog.save_id[:SHOWN]}" if catalog.save_id else f"content {found.hex()[:SHOWN]}"
    )
    return Fingerprint(
        found,
        f"{name} ({pluralize(len(files), 'file')}, {pluralize(sum(catalog.files.values()), 'byte')})",
    )


def require_same_checkpoint(seen: Sequence[Fingerprint], path: str) -> None:
    """Raise if the ranks see different checkpoints."""
    ranks: dict[Fingerprint, list[int]] = {}
    for rank, one in enumerate(seen):
        ranks.setdefault(one, []).append(rank)
    if len({one.digest for one in seen}) > 1:
        raise RefusedError(
            "the ranks see different checkpoints at the same path",
            where=path,
            why="; ".join(f"{format_ranks(who)}: {one.words}" for one, who in ranks.items()),
            hint="make the same files, or copies of them, visible to all ranks (check for "
            "local disks and stale mounts)",
        )


def _content(catalog: Catalog) -> bytes:
    """Compute a digest of the index and samples of the data, for a checkpoint without an ID."""
    tensors = [
        (name, one.dtype, one.shape, [(e.box, e.file, e.offset, e.nbytes) for e in one.extents])
        for name, one in sorted(catalog.tensors.items())
    ]
    values = [(name, one.file, one.offset) for name, one in sorted(catalog.blobs.items())]
    found = hashlib.blake2b(digest((tensors, values)), digest_size=16)
    with source_files(catalog.root) as files:
        if files.local:
            for name, offset, nbytes in _samples(catalog, files):
                found.update(files.read(name, offset, nbytes))
    return found.digest()


def _samples(catalog: Catalog, files: SourceFiles) -> Iterator[tuple[str, int, int]]:
    """Yield the byte ranges to compare, from the manifest or as samples of the data."""
    if (files.root / MANIFEST).is_file():
        yield MANIFEST, 0, files.size(MANIFEST)
        return
    total, start = sum(catalog.files.values()), 0
    step = max(total // SAMPLES, 1)
    for name, size in sorted(catalog.files.items()):
        for place in range(-(-start // step) * step, start + size, step):
            yield name, place - start, min(SAMPLE, start + size - place)
        start += size
