"""What one rank sees under the path of a checkpoint, small enough to be compared with all others.

Ranks with disks of their own, or a mount that is stale, can see different checkpoints under one
path. Two copies of one checkpoint are the same, whatever their times and inodes: what tells saves
apart is the id that each of them has, with the names and sizes of the files. Where there is none
(safetensors, files of ``torch.save``), the index, the manifest with its checksums and some of the
bytes stand for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptctl.catalog import Catalog
from ckptctl.errors import RefusedError
from ckptctl.formats.checksums import MANIFEST
from ckptctl.ops.saving.holdings import digest
from ckptctl.storage.files import SourceFiles

SAMPLES = 16
SAMPLE = 256
SHOWN = 12
"""Characters of an id in messages."""


class Sight(NamedTuple):
    """What one rank sees.

    Attributes:
        digest: Equal where two ranks see the same.
        words: The same for people.
    """

    digest: bytes
    words: str


def sight_of(catalog: Catalog) -> Sight:
    """Return what a rank sees that has opened *catalog*.

    Raises:
        CkptError: A file cannot be read.
    """
    files = sorted(catalog.files.items())
    found = digest((catalog.format, files, catalog.save_id or _content(catalog)))
    name = (
        f"save {catalog.save_id[:SHOWN]}" if catalog.save_id else f"content {found.hex()[:SHOWN]}"
    )
    return Sight(found, f"{name} ({len(files):,} files, {sum(catalog.files.values()):,} bytes)")


def require_one_sight(seen: Sequence[Sight], path: str) -> None:
    """Make sure that all ranks see the same.

    Args:
        seen: By all ranks, in order.
        path: Under which path.

    Raises:
        RefusedError: They do not.
    """
    ranks: dict[Sight, list[int]] = {}
    for rank, one in enumerate(seen):
        ranks.setdefault(one, []).append(rank)
    if len({one.digest for one in seen}) > 1:
        raise RefusedError(
            "the ranks see different checkpoints under one path",
            where=path,
            why="; ".join(f"{_ranks(who)}: {one.words}" for one, who in ranks.items()),
            hint="is it on disks of single machines, or is a mount stale? All ranks have to see "
            "the same files, or copies of them",
        )


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}"


def _content(catalog: Catalog) -> bytes:
    """Return a digest of what tells two checkpoints apart that have no id."""
    tensors = [
        (name, one.dtype, one.shape, [(e.box, e.file, e.offset, e.nbytes) for e in one.extents])
        for name, one in sorted(catalog.tensors.items())
    ]
    values = [(name, one.file, one.offset) for name, one in sorted(catalog.blobs.items())]
    found = hashlib.blake2b(digest((tensors, values)), digest_size=16)
    with SourceFiles(catalog.root) as files:
        if files.local:
            for name, offset, nbytes in _samples(catalog, files):
                found.update(files.read(name, offset, nbytes))
    return found.digest()


def _samples(catalog: Catalog, files: SourceFiles) -> Iterator[tuple[str, int, int]]:
    """Yield ranges of files that are compared: all of the manifest, spots of the data."""
    if (files.root / MANIFEST).is_file():
        yield MANIFEST, 0, files.size(MANIFEST)
        return
    total, start = sum(catalog.files.values()), 0
    step = max(total // SAMPLES, 1)
    for name, size in sorted(catalog.files.items()):
        for place in range(-(-start // step) * step, start + size, step):
            yield name, place - start, min(SAMPLE, start + size - place)
        start += size
