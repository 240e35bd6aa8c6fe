"""``torch.distributed.checkpoint`` directories that every rank wrote for itself.

Source: ``torch/distributed/checkpoint/filesystem.py`` (``_FileSystemWriter.finish``) with
``dcp.save(use_collectives=False)``: rank N writes ``__N.metadata`` and ``__N_*.distcp``. Its
metadata has the global size of every tensor and the chunks of that rank alone; there is no
``.metadata``, and nothing records how many ranks there were.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Catalog, Extent, TensorEntry
from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.formats import dcp
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff, absent
from ckptctl.formats.dcp_metadata import METADATA, Item, decode
from ckptctl.formats.dcp_union import Union
from ckptctl.storage.files import SourceFiles

_RANK = re.compile(r"__(0|[1-9]\d*)\.metadata")
_UNFINISHED = re.compile(r"__(0|[1-9]\d*)\.metadata\.tmp")
_DATA = re.compile(r"__(0|[1-9]\d*)_\d+\.distcp")
UNRECORDED = "a save without collectives does not record how many ranks there were"


class DcpRankLocalFormat(Format):
    """A directory with one ``__N.metadata`` per rank."""

    name = "dcp-rank-local"
    title = "torch.distributed.checkpoint directory saved with use_collectives=False (read only)"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if not path.is_dir() or (path / METADATA).is_file():
            return None
        ranks = _numbers(path, _RANK)
        return Sniff(f"the metadata of {len(ranks)} ranks, no {METADATA}") if ranks else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        with SourceFiles(path) as files, _no_collection():
            found = _union(files)
            found.require_whole()
            return dcp.catalog_of(files, found.leaves(), self.name, _notes(found))

    def resolve(self, catalog: Catalog) -> Catalog:
        """See :meth:`Format.resolve`."""
        return dcp.FORMAT.resolve(catalog)


def replicas(path: Path) -> Catalog:
    """Return what more than one rank wrote, for a comparison of the replicas.

    Args:
        path: A directory of this format.

    Returns:
        A catalog with the tensors of which a box was written more than once. Their extents are all
        of its copies, one after the other, in order of rank: what is read is the first of each.
        They do not tile the tensors; :func:`ckptctl.formats.resolve` makes them ``raw``.

    Raises:
        DamagedError: A rank's file is missing, damaged or contradicts another's.
    """
    with SourceFiles(path) as files, _no_collection():
        found = _union(files, repeated=True)
        catalog = dcp.catalog_of(files, found.leaves(), DcpRankLocalFormat.name)
        return _repeated(catalog, found)


def _repeated(catalog: Catalog, found: Union) -> Catalog:
    tensors: dict[str, TensorEntry] = {}
    for name, copies in found.copies.items():
        entry = catalog.tensors[name]
        extents: list[Extent] = []
        for first in entry.extents:
            if first.box in copies:
                extents += (first, *(_copy_of(first, item) for item in copies[first.box]))
        tensors[name] = replace(entry, extents=tuple(extents))
    return replace(catalog, tensors=tensors, blobs={})


def _copy_of(extent: Extent, item: Item) -> Extent:
    return replace(extent, file=item.file, offset=item.offset, nbytes=item.nbytes)


def _union(files: SourceFiles, *, repeated: bool = False) -> Union:
    """Read the metadata of every rank, one at a time."""
    ranks = _ranks(files.root)
    found = Union(str(files.root), len(ranks), repeated=repeated)
    for rank in ranks:
        name = metadata_name(rank)
        found.add(rank, decode(dcp.read_metadata(files, name), str(files.root / name)))
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the search for cycles: there are none, and it walks all chunks again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def rank_files(path: Path) -> list[str]:
    """Return the names of the metadata of all ranks.

    Raises:
        DamagedError: One is missing.
        FormatError: There are none.
    """
    return [metadata_name(rank) for rank in _ranks(path)]


def metadata_name(rank: int) -> str:
    """Return the name of the metadata of *rank*."""
    return f"__{rank}{METADATA}"


def _ranks(path: Path) -> list[int]:
    """Return the numbers of the ranks, 0 to the last.

    Raises:
        DamagedError: One is missing.
        FormatError: There are none.
    """
    ranks = _numbers(path, _RANK)
    if not ranks:
        raise FormatError(
            "this is no DCP checkpoint of single ranks",
            where=str(path),
            why=f"expected a directory with {metadata_name(0)} and .distcp files",
        )
    known = ranks | _numbers(path, _UNFINISHED) | _numbers(path, _DATA)
    last = max(known)
    if len(ranks) > last:
        return sorted(ranks)
    count, missing = absent(ranks, 0, last, metadata_name)
    raise DamagedError(
        f"the metadata of {count:,} of {last + 1:,} ranks is missing",
        where=str(path),
        why=f"there is no {missing}",
        hint="copy these ranks' files; if they were never written, the save did not finish",
    )


def _numbers(path: Path, pattern: re.Pattern[str]) -> set[int]:
    matches = (pattern.fullmatch(item.name) for item in path.glob("__*"))
    return {int(match[1]) for match in matches if match}


def _notes(found: Union) -> tuple[str, ...]:
    blobs = found.blobs() if found.ranks > 1 else []
    return (
        f"{found.ranks} ranks; {UNRECORDED}",
        *((f"rank 0's is used where every rank has its own: {listed(blobs)}",) if blobs else ()),
    )


FORMAT = DcpRankLocalFormat()
