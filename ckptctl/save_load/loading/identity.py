"""Identities of a checkpoint's files, and fingerprints of checkpoints that ranks compare."""

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
from ckptctl.save_load.saving.local_shards import compute_digest
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

SETTLED_AGE_NS = 100_000_000
MAX_FILES = 100_000
Stamp = tuple[str, FileIdentity]
SAMPLE_COUNT = 16
SAMPLE_BYTES = 256
SHOWN_ID_CHARACTERS = 12
"""Number of characters of an ID that messages show."""


class _TooManyFilesError(Exception):
    """Error for a folder that contains too many files to compute an identity."""


def compute_identity(paths: Iterable[str | TreePath | None]) -> bytes | None:
    """Compute the identity of the files below *paths*, without opening them.

    The identity covers the name, size, times, inode and device of every file. A file that was just
    written could be rewritten without a change of any of them, because file systems count time in
    steps of a few milliseconds. A checkpoint with such a file has no identity yet. git treats its
    index in the same way (``Documentation/technical/racy-git.adoc``).

    Args:
        paths: Directories and files. All files below a directory are included, and for a file, all
            files in its directory. Elements that are None are ignored.

    Returns:
        A digest, or None if there is no reliable identity, for example for URLs.
    """
    stamps: list[Stamp] = []
    try:
        for path in paths:
            if path is not None and is_url(path):
                return None
            if path is not None:
                stamps += sorted(_list_stamps(Path(path).expanduser().absolute()))
    except (_TooManyFilesError, OSError):
        return None
    newest = max(
        (max(file_identity.mtime_ns, file_identity.ctime_ns) for _, file_identity in stamps),
        default=0,
    )
    return compute_digest(stamps) if stamps and newest < time.time_ns() - SETTLED_AGE_NS else None


def _list_stamps(path: Path) -> Iterator[Stamp]:
    stamps = _iterate_tree(path, set()) if path.is_dir() else _iterate_siblings(path)
    for count, stamp in enumerate(stamps):
        if count >= MAX_FILES:
            raise _TooManyFilesError
        yield stamp


def _iterate_tree(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Stamp]:
    """Yield the path and file identity of every file below *folder*, following symbolic links."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    yield str(folder), FileIdentity.from_stat(status)
    with os.scandir(folder) as entries:
        for entry in entries:
            yield from (
                _iterate_tree(Path(entry.path), seen) if entry.is_dir() else [_make_stamp(entry)]
            )


def _iterate_siblings(path: Path) -> Iterator[Stamp]:
    """Yield the path and file identity of *path* and of all files in its directory."""
    yield str(path), FileIdentity.from_stat(path.stat())
    with os.scandir(path.parent) as entries:
        yield from (_make_stamp(entry) for entry in entries if not entry.is_dir())


def _make_stamp(entry: os.DirEntry[str]) -> Stamp:
    try:
        return entry.path, FileIdentity.from_stat(entry.stat())
    except FileNotFoundError:  # a dangling symbolic link
        return entry.path, FileIdentity.from_stat(entry.stat(follow_symlinks=False))


class Fingerprint(NamedTuple):
    """Fingerprint of the checkpoint that one rank sees, for comparison with other ranks.

    Ranks with local disks or stale mounts can see different checkpoints at the same path. Copies of
    a checkpoint have equal fingerprints, even if times and inodes differ: saves are identified by
    the save ID and the names and sizes of their files. Checkpoints without an ID (safetensors,
    files of ``torch.save``) are identified by the index, the manifest and samples of the data.
    """

    digest: bytes
    description: str


def make_fingerprint(catalog: Catalog) -> Fingerprint:
    """Compute the fingerprint of a checkpoint."""
    files = sorted(catalog.files.items())
    content_digest = compute_digest(
        (catalog.format, files, catalog.save_id or _digest_content(catalog))
    )
    name = (
        f"save {catalog.save_id[:SHOWN_ID_CHARACTERS]}"
        if catalog.save_id
        else f"content {content_digest.hex()[:SHOWN_ID_CHARACTERS]}"
    )
    return Fingerprint(
        content_digest,
        f"{name} ({pluralize(len(files), 'file')}, "
        f"{pluralize(sum(catalog.files.values()), 'byte')})",
    )


def require_same_checkpoint(seen: Sequence[Fingerprint], path: str) -> None:
    """Raise if the ranks see different checkpoints."""
    ranks: dict[Fingerprint, list[int]] = {}
    for rank, fingerprint in enumerate(seen):
        ranks.setdefault(fingerprint, []).append(rank)
    if len({fingerprint.digest for fingerprint in seen}) > 1:
        raise RefusedError(
            "the ranks see different checkpoints at the same path",
            where=path,
            why="; ".join(
                f"{format_ranks(rank_numbers)}: {fingerprint.description}"
                for fingerprint, rank_numbers in ranks.items()
            ),
            hint="make the same files, or copies of them, visible to all ranks (check for "
            "local disks and stale mounts)",
        )


def _digest_content(catalog: Catalog) -> bytes:
    """Compute a digest of the tensor index and of samples of the data.

    It identifies a checkpoint that has no save ID.
    """
    tensors = [
        (
            name,
            entry.dtype,
            entry.shape,
            [(e.box, e.file, e.offset, e.nbytes) for e in entry.extents],
        )
        for name, entry in sorted(catalog.tensors.items())
    ]
    values = [(name, entry.file, entry.offset) for name, entry in sorted(catalog.blobs.items())]
    hasher = hashlib.blake2b(compute_digest((tensors, values)), digest_size=16)
    with source_files(catalog.root) as files:
        if files.local:
            for name, offset, nbytes in _list_samples(catalog, files):
                hasher.update(files.read(name, offset, nbytes))
    return hasher.digest()


def _list_samples(catalog: Catalog, files: SourceFiles) -> Iterator[tuple[str, int, int]]:
    """Yield the file, offset and size in bytes of each sample to compare.

    If the checkpoint has a manifest, the manifest is the only sample.
    """
    if (files.root / MANIFEST).is_file():
        yield MANIFEST, 0, files.size(MANIFEST)
        return
    total, start = sum(catalog.files.values()), 0
    step = max(total // SAMPLE_COUNT, 1)
    for name, size in sorted(catalog.files.items()):
        for place in range(-(-start // step) * step, start + size, step):
            yield name, place - start, min(SAMPLE_BYTES, start + size - place)
        start += size
