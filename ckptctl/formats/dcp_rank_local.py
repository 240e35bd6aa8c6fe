"""``torch.distributed.checkpoint`` directories that each rank saved separately.

Source: ``torch/distributed/checkpoint/filesystem.py`` (``_FileSystemWriter.finish``) with
``dcp.save(use_collectives=False)``. Rank N writes ``__N.metadata`` and ``__N_*.distcp``, and no
rank writes ``.metadata``. The metadata of a rank lists the global size of every tensor, but only
the chunks of that rank. ckptctl also records the world size in it, which torch does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ckptctl.catalog import Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.columns import get_boxes, get_offsets_and_sizes
from ckptctl.errors import FormatError, quote_names
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Listing, ReadOptions
from ckptctl.formats.dcp import METADATA, ItemFormat, format_metadata_name
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, FaultCollector
from ckptctl.formats.shared.leaves import list_differing_value_notes
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.read_ahead import prefetch_items
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

_RANK_METADATA_NAME = re.compile(r"__(0|[1-9]\d*)\.metadata")
_UNFINISHED_METADATA_NAME = re.compile(r"__(0|[1-9]\d*)\.metadata\.tmp")
_DATA_FILE_NAME = re.compile(r"__(0|[1-9]\d*)_\d+\.distcp")
WORLD_SIZE_UNRECORDED = (
    "torch does not record the world size for saves without collectives, so missing ranks cannot "
    "be detected"
)


class DcpRankLocalFormat(ItemFormat):
    """A DCP directory with one ``__N.metadata`` file per rank and no ``.metadata``."""

    name = "dcp-rank-local"
    title = "torch.distributed.checkpoint directory saved with use_collectives=False"
    recognized = "`__N.metadata` of every rank, without `.metadata`"
    marks = _RANK_METADATA_NAME
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
        if not listing.is_folder or listing.has_file(METADATA):
            return None
        ranks = _parse_ranks(listing.names, _RANK_METADATA_NAME)
        return f"metadata of {pluralize(len(ranks), 'rank')}, without {METADATA}" if ranks else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`.

        In a partial read, chunks in unusable files are read from another rank's copy, if it exists.
        """
        from ckptctl.formats.dcp.dcp_reader import build_catalog, read_metadata
        from ckptctl.formats.dcp.union import RankMetadataMerger, RankValueComparison

        with source_files(path) as files, pause_gc():
            faults, value_faults = (
                FaultCollector(path, options.partial),
                FaultCollector(path, options.partial),
            )
            ranks = _find_ranks(files, faults)
            merger = RankMetadataMerger(
                str(path), len(ranks), repeated=options.partial or options.replicas
            )
            value_comparison, readable = RankValueComparison(files, value_faults), set[int]()
            for rank in prefetch_items(
                files, ranks, lambda rank: ((format_metadata_name(rank), 0),)
            ):
                metadata = faults.try_read(
                    format_metadata_name(rank), lambda name: read_metadata(files, name)
                )
                if metadata is None:
                    continue
                readable.add(rank)
                merger.add_rank(rank, metadata.leaves, metadata.origin)
                if options.partial or len(ranks) > 1:
                    value_comparison.compare_rank(rank, metadata.leaves)
            incomplete_names = merger.list_incomplete_tensors(should_raise=not options.partial)
            if incomplete_names and not faults.findings:  # no other finding explains the holes
                message = "files of further ranks may be missing"
                why, next_file = (
                    f"parts of {quote_names(incomplete_names)} are missing",
                    format_metadata_name(merger.ranks),
                )
                faults.findings.append(Finding(message, why, "unknown", next_file))
            leaves = merger.merge_leaves() | (value_comparison.rank_values if 0 in readable else {})
            for name in merger.list_blob_names() if options.partial and 0 not in readable else ():
                why = "the value of rank 0, which is used for per-rank values, cannot be read"
                faults.findings.append(Finding("a value is missing", why, tensor=name))
                del leaves[name]
            note = f"found {pluralize(merger.ranks, 'rank')} ({WORLD_SIZE_UNRECORDED})"
            notes = (
                *(() if merger.world else (note,)),
                *list_differing_value_notes(value_comparison.differing_names),
            )
            catalog = build_catalog(files, leaves, self.name, faults, notes, merger.file_ends)
            reported_files = {finding.file for finding in catalog.findings}
            value_findings = (
                finding for finding in value_faults.findings if finding.file not in reported_files
            )
            catalog = replace(catalog, findings=(*catalog.findings, *value_findings))
            return _separate_replicas(merger.add_origin(catalog), options.replicas)


def _separate_replicas(catalog: Catalog, should_list: bool) -> Catalog:
    """Retain the first copy of each chunk, and list further copies as replicas if *should_list*."""
    tensors: dict[str, TensorEntry] = {}
    replicas: dict[str, tuple[Extent, ...]] = {}
    lost: dict[str, tuple[tuple[Box, str], ...]] = {}
    for name, entry in catalog.tensors.items():
        boxes = list(zip(*get_offsets_and_sizes(get_boxes(entry.extents)), strict=True))
        if len({*boxes}) == len(boxes) and name not in catalog.lost:
            tensors[name] = entry
            continue
        used: dict[Box, Extent] = {}
        copies = tuple(
            extent for extent in entry.extents if used.setdefault(extent.box, extent) is not extent
        )
        tensors[name] = replace(entry, extents=tuple(used.values())) if copies else entry
        if copies and should_list:
            replicas[name] = copies
        lost_boxes = tuple(pair for pair in catalog.lost.get(name, ()) if pair[0] not in used)
        if lost_boxes:
            lost[name] = lost_boxes
    return replace(catalog, tensors=tensors, replicas=replicas, lost=lost)


def read_rank_catalog(path: TreePath, rank: int) -> Catalog | None:
    """Read the catalog of the files that *rank* wrote, or return None if it wrote no metadata.

    The tensors of the catalog are incomplete, because the files contain only chunks of that rank.
    """
    if not (path / format_metadata_name(rank)).is_file():
        return None
    from ckptctl.formats.dcp.dcp_reader import build_catalog, read_metadata

    with source_files(path) as files, pause_gc():
        note = f"only the files of rank {rank} are read"
        leaves, origin, notes = read_metadata(files, format_metadata_name(rank))
        catalog = build_catalog(
            files, leaves, DcpRankLocalFormat.name, FaultCollector(path), (note, *notes)
        )
        return replace(catalog, save_id=origin.save_id, world=origin.world)


def list_metadata_files(path: TreePath) -> list[str]:
    """Return the names of the ``__N.metadata`` files in rank order, or raise if one is missing."""
    with source_files(path) as files:
        return [format_metadata_name(rank) for rank in _find_ranks(files, FaultCollector(path))]


def _find_ranks(files: SourceFiles, faults: FaultCollector) -> list[int]:
    """Return the ranks that have a metadata file, in ascending order.

    A missing metadata file raises an error, or becomes a finding in a partial read.
    """
    path = files.root
    names = [item.name for item in path.iterdir()]
    ranks = _parse_ranks(names, _RANK_METADATA_NAME)
    if not ranks:
        raise FormatError(
            "this is not a per-rank DCP checkpoint",
            where=str(path),
            why=f"expected a directory with {format_metadata_name(0)} and .distcp files",
        )
    referenced_ranks = (
        ranks
        | _parse_ranks(names, _UNFINISHED_METADATA_NAME)
        | _parse_ranks(names, _DATA_FILE_NAME)
    )
    last = max(*referenced_ranks, _read_world_size(files, min(ranks)) - 1)
    noun = "ranks' metadata files"
    hint = "copy the files of these ranks (if they do not exist, the save did not finish)"
    faults.require_files(ranks, range(last + 1), format_metadata_name, noun, hint)
    return sorted(ranks)


def _read_world_size(files: SourceFiles, rank: int) -> int:
    """Return the world size that the metadata of *rank* records, or 0 if it cannot be read.

    Damaged metadata is reported when the metadata of all ranks is read.
    """
    from ckptctl.formats.dcp.dcp_reader import read_metadata

    try:
        return read_metadata(files, format_metadata_name(rank)).origin.world
    except UNUSABLE_ERRORS:
        return 0


def _parse_ranks(names: Iterable[str], pattern: re.Pattern[str]) -> set[int]:
    matches = map(pattern.fullmatch, names)
    return {int(match[1]) for match in matches if match}


FORMAT = DcpRankLocalFormat()
