"""``torch.distributed.checkpoint`` directories that each rank saved separately.

Source: ``torch/distributed/checkpoint/filesystem.py`` (``_FileSystemWriter.finish``) with
``dcp.save(use_collectives=False)``: rank N writes ``__N.metadata`` and ``__N_*.distcp``. Its
metadata has the global size of every tensor and only the chunks of that rank. There is no
``.metadata``. ckptctl records the world size in every rank's metadata; torch does not record it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ckptctl.catalog import Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.columns import boxes_of, vectors_of
from ckptctl.errors import FormatError, quote_names
from ckptctl.formats.base import AS_IT_IS, Listing, ReadOptions
from ckptctl.formats.dcp import METADATA, ItemFormat, metadata_name
from ckptctl.formats.shared.findings import UNUSABLE, Faults
from ckptctl.formats.shared.leaves import kept_apart
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.read_ahead import prefetch_items
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

_RANK = re.compile(r"__(0|[1-9]\d*)\.metadata")
_UNFINISHED = re.compile(r"__(0|[1-9]\d*)\.metadata\.tmp")
_DATA = re.compile(r"__(0|[1-9]\d*)_\d+\.distcp")
UNRECORDED = (
    "torch does not record the world size for saves without collectives, so missing ranks cannot "
    "be detected"
)


class DcpRankLocalFormat(ItemFormat):
    """A directory with one ``__N.metadata`` per rank."""

    name = "dcp-rank-local"
    title = "torch.distributed.checkpoint directory saved with use_collectives=False"
    recognized = "`__N.metadata` of every rank, without `.metadata`"
    marks = _RANK
    wholeness = (
        "rank numbers start at 0 and have no gap; there are no `__N_*.distcp` or unfinished "
        "`__N.metadata.tmp` files of other ranks; the chunks of all ranks tile every tensor; if "
        "the files record the world size, as ckptctl's files do, the files of all ranks exist"
    )
    tested = "torch 2.13 (1-4 ranks)"
    proof = (
        "reading: checkpoints of torch 2.13 on 2 and 4 ranks equal the live tensors "
        "(tests/integration/test_rank_local.py); reading: checkpoints saved on 1 to 4 ranks equal"
        " the live weights (tests/oracle/trainers/test_torch.py); consolidating: with `.metadata`"
        " from `consolidate --metadata-only`, stock `dcp.load` works on 1, 2 and 3 ranks "
        "(tests/integration/test_rank_local.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if not listing.is_folder or listing.has(METADATA):
            return None
        ranks = _numbers(listing.names, _RANK)
        return f"metadata of {pluralize(len(ranks), 'rank')}, without {METADATA}" if ranks else None

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`.

        In a partial read, chunks that one rank has lost are taken from another rank's copy.
        """
        from ckptctl.formats.dcp.dcp_reader import catalog_of, read_metadata
        from ckptctl.formats.dcp.union import RankValues, Union

        with source_files(path) as files, pause_gc():
            faults, of_values = Faults(path, asked.partial), Faults(path, asked.partial)
            ranks = _ranks(files, faults)
            joined = Union(str(path), len(ranks), repeated=asked.partial or asked.replicas)
            values, readable = RankValues(files, of_values), set[int]()
            for rank in prefetch_items(files, ranks, lambda rank: ((metadata_name(rank), 0),)):
                said = faults.read(metadata_name(rank), lambda name: read_metadata(files, name))
                if said is None:
                    continue
                readable.add(rank)
                joined.add(rank, said.leaves, said.origin)
                if asked.partial or len(ranks) > 1:
                    values.add(rank, said.leaves)
            torn = joined.with_holes(refused=not asked.partial)
            if torn and not faults.findings:  # no other finding explains the holes
                what = "files of further ranks may be missing"
                why, further = (
                    f"parts of {quote_names(torn)} are missing",
                    metadata_name(joined.ranks),
                )
                faults.findings.append(Finding(what, why, "unknown", further))
            kept = joined.leaves() | (values.apart if 0 in readable else {})
            for name in joined.blobs() if asked.partial and 0 not in readable else ():
                why = "the value of rank 0, which is used for per-rank values, cannot be read"
                faults.findings.append(Finding("a value is missing", why, tensor=name))
                del kept[name]
            found = f"found {pluralize(joined.ranks, 'rank')} ({UNRECORDED})"
            notes = (*(() if joined.world else (found,)), *kept_apart(values.differing))
            catalog = catalog_of(files, kept, self.name, faults, notes, joined.ends)
            known = {one.file for one in catalog.findings}
            others = (one for one in of_values.findings if one.file not in known)
            catalog = replace(catalog, findings=(*catalog.findings, *others))
            return _with_replicas(joined.saved(catalog), asked.replicas)


def _with_replicas(catalog: Catalog, asked: bool) -> Catalog:
    """Use the first copy of each chunk and list the others as replicas."""
    tensors: dict[str, TensorEntry] = {}
    replicas: dict[str, tuple[Extent, ...]] = {}
    lost: dict[str, tuple[tuple[Box, str], ...]] = {}
    for name, entry in catalog.tensors.items():
        boxes = list(zip(*vectors_of(boxes_of(entry.extents)), strict=True))
        if len({*boxes}) == len(boxes) and name not in catalog.lost:
            tensors[name] = entry
            continue
        used: dict[Box, Extent] = {}
        copies = tuple(one for one in entry.extents if used.setdefault(one.box, one) is not one)
        tensors[name] = replace(entry, extents=tuple(used.values())) if copies else entry
        if copies and asked:
            replicas[name] = copies
        gone = tuple(pair for pair in catalog.lost.get(name, ()) if pair[0] not in used)
        if gone:
            lost[name] = gone
    return replace(catalog, tensors=tensors, replicas=replicas, lost=lost)


def read_rank(path: TreePath, rank: int) -> Catalog | None:
    """Read the files of one rank, which contain only parts of tensors.

    Returns None if the rank wrote no metadata.
    """
    if not (path / metadata_name(rank)).is_file():
        return None
    from ckptctl.formats.dcp.dcp_reader import catalog_of, read_metadata

    with source_files(path) as files, pause_gc():
        note = f"only the files of rank {rank} are read"
        leaves, origin = read_metadata(files, metadata_name(rank))
        catalog = catalog_of(files, leaves, DcpRankLocalFormat.name, Faults(path), (note,))
        return replace(catalog, save_id=origin.save_id, world=origin.world)


def rank_files(path: TreePath) -> list[str]:
    """Return the names of all ranks' metadata files."""
    with source_files(path) as files:
        return [metadata_name(rank) for rank in _ranks(files, Faults(path))]


def _ranks(files: SourceFiles, faults: Faults) -> list[int]:
    """Return all rank numbers from 0 on, or raise, or add findings, for missing ones."""
    path = files.root
    names = [item.name for item in path.iterdir()]
    ranks = _numbers(names, _RANK)
    if not ranks:
        raise FormatError(
            "this is not a per-rank DCP checkpoint",
            where=str(path),
            why=f"expected a directory with {metadata_name(0)} and .distcp files",
        )
    known = ranks | _numbers(names, _UNFINISHED) | _numbers(names, _DATA)
    last = max(*known, _world(files, min(ranks)) - 1)
    what = "ranks' metadata files"
    hint = "copy the files of these ranks (if they do not exist, the save did not finish)"
    faults.require_all(ranks, range(last + 1), metadata_name, what, hint)
    return sorted(ranks)


def _world(files: SourceFiles, rank: int) -> int:
    """Return the world size in the metadata of *rank*, or 0 if it is missing or unreadable.

    Damage is reported later, when all metadata is read.
    """
    from ckptctl.formats.dcp.dcp_reader import read_metadata

    try:
        return read_metadata(files, metadata_name(rank)).origin.world
    except UNUSABLE:
        return 0


def _numbers(names: Iterable[str], pattern: re.Pattern[str]) -> set[int]:
    matches = map(pattern.fullmatch, names)
    return {int(match[1]) for match in matches if match}


FORMAT = DcpRankLocalFormat()
