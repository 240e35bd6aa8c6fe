"""Merge the metadata of ranks that saved without collectives.

The metadata of a rank lists its chunks and the global shapes of their tensors. If several ranks
saved the same chunk, the chunk of the lowest rank is used, and the other copies are replicas.
Every rank also writes all of its non-tensor values with ``torch.save``, one after another. These
values are compared byte by byte, without unpickling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from ckptctl.catalog import Box, Catalog
from ckptctl.columns import ExtentColumns, Row, Vector
from ckptctl.errors import (
    CoverageError,
    DamagedError,
    SourceNotFoundError,
    UnsupportedError,
    quote_names,
)
from ckptctl.formats.dcp import format_metadata_name
from ckptctl.formats.dcp.metadata import (
    UNKNOWN_ORIGIN,
    Item,
    MetadataLeaf,
    Origin,
    refuse_duplicate_paths,
)
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, FaultCollector
from ckptctl.formats.shared.joined_tensors import ONE_SAVE_HINT, ranks_disagree_error
from ckptctl.formats.shared.leaves import add_rank_prefix, join_path
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.files import SourceFiles
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from hashlib import blake2b

MAX_RUN_BYTES = 1 << 20
_Value = tuple[MetadataLeaf, Item]


class _MergedLeaf:
    """A leaf, as described by the first rank that has it, and its chunks from all ranks so far."""

    __slots__ = ("chunks", "leaf", "rank")

    def __init__(self, leaf: MetadataLeaf, rank: int) -> None:
        self.leaf = leaf
        self.rank = rank
        self.chunks: dict[Vector, Row] = {}


class RankMetadataMerger:
    """Merger of the leaves of all ranks, which are added one rank after another.

    Args:
        where: Path of the directory for error messages.
        ranks: Number of ranks.
        repeated: Whether to record further copies of a chunk that several ranks saved.

    Attributes:
        ranks: Number of ranks.
        file_ends: End of the last item of each data file, including copies.
        chunk_copies: Further copies of chunks, by tensor name and offsets. Empty unless *repeated*.
        world: Recorded world size, or 0 if not recorded.
    """

    def __init__(self, where: str, ranks: int, *, repeated: bool = False) -> None:
        self.ranks = ranks
        self.file_ends: dict[str, int] = {}
        self.chunk_copies: dict[str, dict[Vector, list[Row]]] = {}
        self.world = 0
        self._save_ids: list[str] = []
        self._where = where
        self._keep_copies = repeated
        self._merged: dict[str, _MergedLeaf] = {}

    def add_rank(
        self, rank: int, leaves: Mapping[str, MetadataLeaf], origin: Origin = UNKNOWN_ORIGIN
    ) -> None:
        """Add the leaves of *rank*, or raise if they contradict the ranks added before.

        *origin* identifies the save that wrote the metadata of *rank*.
        """
        self._record_origin(rank, origin)
        file_prefix = f"__{rank}_"
        for name, leaf in leaves.items():
            merged = self._merged.get(name)
            if merged is None:
                merged = self._merged[name] = _MergedLeaf(leaf, rank)
            elif (leaf.dtype, leaf.shape, leaf.path) != (
                merged.leaf.dtype,
                merged.leaf.shape,
                merged.leaf.path,
            ):
                why = (
                    f"it is {_format_leaf(leaf)} in this file and {_format_leaf(merged.leaf)} for "
                    f"rank {merged.rank}"
                )
                raise ranks_disagree_error(name, self._format_metadata_path(rank), why)
            for file, _, end in leaf.ranges:
                if not file.startswith(file_prefix):
                    raise UnsupportedError(
                        f"`{format_metadata_name(rank)}` is not the metadata of rank {rank}",
                        where=self._format_metadata_path(rank),
                        why=f"it states that `{name}` is stored in `{file}`",
                        hint="restore the original file names (files were renamed or overwritten)",
                    )
                self.file_ends[file] = max(self.file_ends.get(file, 0), end)
            for row in leaf.extents.iterate_rows():
                self._add_chunk(rank, merged, row)

    def _add_chunk(self, rank: int, merged: _MergedLeaf, row: Row) -> None:
        offsets, sizes = row[:2]
        if 0 in sizes and 0 not in merged.leaf.shape:
            return  # ranks beyond the last row have empty chunks
        earlier = merged.chunks.setdefault(offsets, row)
        if earlier is row:
            return
        if earlier[1] != sizes:
            raise UnsupportedError(
                f"two ranks disagree on a chunk of `{merged.leaf.name}`",
                where=self._format_metadata_path(rank),
                why=f"this file has {Box(offsets, sizes)}, `{earlier[2]}` has {Box(*earlier[:2])}",
                hint=ONE_SAVE_HINT,
            )
        if self._keep_copies:
            self.chunk_copies.setdefault(merged.leaf.name, {}).setdefault(offsets, []).append(row)

    def list_incomplete_tensors(self, *, should_raise: bool) -> list[str]:
        """Return the names of tensors with missing elements, or raise if *should_raise*.

        Always raises if chunks overlap or exceed the shape. Only the numbers of elements are
        compared. The positions of chunks are checked when the tensors are used.
        """
        names = []
        for name, merged in self._merged.items():
            rows = merged.chunks.values()
            count = sum(math.prod(sizes) for _, sizes, *_ in rows)
            if merged.leaf.dtype and count != math.prod(merged.leaf.shape):
                boxes = ExtentColumns.from_rows(rows).boxes
                report = compute_coverage(merged.leaf.shape, boxes)
                if should_raise or not report.holes or report.overlaps or report.outside:
                    raise self._incomplete_error(merged.leaf, boxes)
                names.append(name)
        return names

    def merge_leaves(self) -> dict[str, MetadataLeaf]:
        """Return each leaf by name, with the chunks of all ranks, then any recorded copies."""
        leaves = {}
        for name, merged in self._merged.items():
            copies = chain.from_iterable(self.chunk_copies.get(name, {}).values())
            rows = chain(merged.chunks.values(), copies)
            leaves[name] = replace(merged.leaf, extents=ExtentColumns.from_rows(rows))
        refuse_duplicate_paths(leaves, self._where)
        return leaves

    def add_origin(self, catalog: Catalog) -> Catalog:
        """Add the world size and a hash of all ranks' save ids to *catalog*."""
        ids = "\n".join(self._save_ids) if all(self._save_ids) else ""
        save_id = _make_hash(ids.encode()).hexdigest() if ids else ""
        return replace(catalog, save_id=save_id, world=self.world)

    def _record_origin(self, rank: int, origin: Origin) -> None:
        self._save_ids.append(origin.save_id)
        if not origin.world:
            return
        if rank >= origin.world or self.world not in (0, origin.world):
            description = f"rank {rank} of {origin.world}"
            raise UnsupportedError(
                "the files belong to different saves",
                where=self._format_metadata_path(rank),
                why=f"this file belongs to {description}"
                + (
                    ", but the file of a lower rank belongs to a save of "
                    f"{pluralize(self.world, 'rank')}"
                    if self.world
                    else ""
                ),
                hint=ONE_SAVE_HINT,
            )
        self.world = origin.world

    def list_blob_names(self) -> list[str]:
        """Return the names of all leaves that are non-tensor values."""
        return [name for name, merged in self._merged.items() if not merged.leaf.dtype]

    def _incomplete_error(
        self, leaf: MetadataLeaf, boxes: Sequence[Box]
    ) -> CoverageError | UnsupportedError:
        report = compute_coverage(leaf.shape, boxes)
        present = f"rank{'s 0 to ' if self.ranks > 1 else ' '}{self.ranks - 1}"
        if report.holes and not report.overlaps:
            next_file = format_metadata_name(self.ranks)
            return CoverageError(
                f"parts of `{leaf.name}` are missing",
                where=f"{self._where}, tensor `{leaf.name}`, shape {list(leaf.shape)}",
                why=f"found {present}; none of them has "
                f"{quote_names([str(b) for b in report.holes])}",
                hint=f"copy the files of the remaining ranks, such as `{next_file}`",
            )
        bad_boxes = report.outside or report.overlaps
        return UnsupportedError(
            f"the ranks' chunks of `{leaf.name}` overlap or exceed its shape",
            where=f"{self._where}, tensor `{leaf.name}`, shape {list(leaf.shape)}",
            why=f"found {present}; {quote_names([str(box) for box in bad_boxes])} "
            + ("are outside its shape" if report.outside else "are covered more than once"),
            hint="remove the files of other saves",
        )

    def _format_metadata_path(self, rank: int) -> str:
        return f"{self._where}/{format_metadata_name(rank)}"


def _format_leaf(leaf: MetadataLeaf) -> str:
    kind = f"{leaf.dtype} {list(leaf.shape)}" if leaf.dtype else "not a tensor"
    return f"{kind} at {'/'.join(map(str, leaf.path))}"


@dataclass(slots=True)
class RankValueComparison:
    """Comparison of the non-tensor values of all ranks, which are added in ascending order.

    Attributes:
        files: Files of the checkpoint directory.
        faults: Collector of unreadable files.
        rank_values: Values that differ from the same value of the lowest rank. They have new names
            with the rank as a prefix.
        differing_names: Original names of the values in *rank_values*.
    """

    files: SourceFiles
    faults: FaultCollector
    rank_values: dict[str, MetadataLeaf] = field(default_factory=dict)
    differing_names: dict[str, None] = field(default_factory=dict)
    _first_digests: dict[str, bytes] = field(default_factory=dict)

    def compare_rank(self, rank: int, leaves: Mapping[str, MetadataLeaf]) -> None:
        """Compare each non-tensor value of *rank* with the value of the lowest rank that has it."""
        values = [(leaf, leaf.item) for leaf in leaves.values() if leaf.item is not None]
        values.sort(key=lambda value: (value[1].file, value[1].offset))
        for run in _group_adjacent_values(values):
            try:
                for leaf, digest in _compute_digests(self.files, run):
                    if self._first_digests.setdefault(leaf.name, digest) != digest:
                        path = add_rank_prefix(rank, leaf.path)
                        self.rank_values[join_path(path)] = replace(
                            leaf, name=join_path(path), path=path
                        )
                        self.differing_names[leaf.name] = None
            except SourceNotFoundError:
                missing_error = DamagedError(
                    "a data file is missing",
                    where=str(self.files.root),
                    why=f"`{run[0][1].file}`",
                    hint="copy the missing files from the nodes of the other ranks",
                )
                self.faults.add_or_raise(missing_error, run[0][1].file)
            except UNUSABLE_ERRORS as error:
                self.faults.add_or_raise(error, run[0][1].file)


def _group_adjacent_values(values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """Group values that are adjacent in a file into runs of at most :data:`MAX_RUN_BYTES`."""
    start = 0
    for index, (_, item) in enumerate(values):
        first, previous = values[start][1], values[index - 1][1]
        touches = item.file == previous.file and item.offset == previous.offset + previous.nbytes
        if index > start and not (
            touches and item.offset + item.nbytes - first.offset <= MAX_RUN_BYTES
        ):
            yield values[start:index]
            start = index
    if values:
        yield values[start:]


def _make_hash(data: bytes | memoryview = b"") -> blake2b:
    from hashlib import blake2b  # loads OpenSSL, which is slow to import

    return blake2b(data, digest_size=16)


def _compute_digests(
    files: SourceFiles, run: Sequence[_Value]
) -> Iterator[tuple[MetadataLeaf, bytes]]:
    first, last = run[0][1], run[-1][1]
    if len(run) == 1:
        hasher, end = _make_hash(), first.offset + first.nbytes
        for start in range(first.offset, end, MAX_RUN_BYTES):
            hasher.update(files.read(first.file, start, min(MAX_RUN_BYTES, end - start)))
        yield run[0][0], hasher.digest()
        return
    data = memoryview(
        files.read(first.file, first.offset, last.offset + last.nbytes - first.offset)
    )
    for leaf, item in run:
        start = item.offset - first.offset
        yield leaf, _make_hash(data[start : start + item.nbytes]).digest()
