"""Merge the metadata of ranks that saved without collectives.

Every rank lists the tensors that it has a part of, with the global size and its own chunks. If
several ranks have a chunk, the lowest rank's is used, and the others are replicas. Every rank also
writes all of its non-tensor values with ``torch.save``, one after another. They are compared byte
by byte, without being interpreted.
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
from ckptctl.formats.dcp import metadata_name
from ckptctl.formats.dcp.metadata import UNKNOWN, Item, MetadataLeaf, Origin, refuse_twins
from ckptctl.formats.shared.findings import UNUSABLE, Faults
from ckptctl.formats.shared.joined_tensors import ONE_SAVE, ranks_disagree_error
from ckptctl.formats.shared.leaves import below_rank, join
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.files import SourceFiles
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from hashlib import blake2b

RUN = 1 << 20
_Value = tuple[MetadataLeaf, Item]


class _Held:
    """A leaf as described by the first rank that has it, with the chunks found so far."""

    __slots__ = ("chunks", "leaf", "rank")

    def __init__(self, leaf: MetadataLeaf, rank: int) -> None:
        self.leaf = leaf
        self.rank = rank
        self.chunks: dict[Vector, Row] = {}


class Union:
    """Merger of the leaves of all ranks, one rank after another.

    Attributes:
        ranks: Number of ranks.
        ends: End of the last item of each data file, including copies.
        copies: Further copies of each tensor's chunks, by offsets; empty unless *repeated*.
        world: Recorded world size; 0 if not recorded.
    """

    def __init__(self, where: str, ranks: int, *, repeated: bool = False) -> None:
        self.ranks = ranks
        self.ends: dict[str, int] = {}
        self.copies: dict[str, dict[Vector, list[Row]]] = {}
        self.world = 0
        self._save_ids: list[str] = []
        self._where = where
        self._repeated = repeated
        self._held: dict[str, _Held] = {}

    def add(self, rank: int, leaves: Mapping[str, MetadataLeaf], origin: Origin = UNKNOWN) -> None:
        """Add the leaves of *rank* and the origin of its save."""
        self._of_one_save(rank, origin)
        own = f"__{rank}_"
        for name, leaf in leaves.items():
            held = self._held.get(name)
            if held is None:
                held = self._held[name] = _Held(leaf, rank)
            elif (leaf.dtype, leaf.shape, leaf.path) != (
                held.leaf.dtype,
                held.leaf.shape,
                held.leaf.path,
            ):
                why = (
                    f"it is {_described(leaf)} in this file and {_described(held.leaf)} for "
                    f"rank {held.rank}"
                )
                raise ranks_disagree_error(name, self._file(rank), why)
            for file, _, end in leaf.ranges:
                if not file.startswith(own):
                    raise UnsupportedError(
                        f"`{metadata_name(rank)}` is not the metadata of rank {rank}",
                        where=self._file(rank),
                        why=f"it states that `{name}` is stored in `{file}`",
                        hint="restore the original file names (files were renamed or overwritten)",
                    )
                self.ends[file] = max(self.ends.get(file, 0), end)
            for row in leaf.extents.iterate_rows():
                self._add(rank, held, row)

    def _add(self, rank: int, held: _Held, row: Row) -> None:
        offsets, sizes = row[:2]
        if 0 in sizes and 0 not in held.leaf.shape:
            return  # an empty chunk of a rank after the last row
        before = held.chunks.setdefault(offsets, row)
        if before is row:
            return
        if before[1] != sizes:
            raise UnsupportedError(
                f"two ranks disagree on a chunk of `{held.leaf.name}`",
                where=self._file(rank),
                why=f"this file has {Box(offsets, sizes)}, `{before[2]}` has {Box(*before[:2])}",
                hint=ONE_SAVE,
            )
        if self._repeated:
            self.copies.setdefault(held.leaf.name, {}).setdefault(offsets, []).append(row)

    def with_holes(self, *, refused: bool) -> list[str]:
        """Return the tensors with missing parts, or raise if *refused*.

        Always raises if chunks overlap. The check counts elements; whether these are the right ones
        is proven when the tensors are used.
        """
        names = []
        for name, held in self._held.items():
            rows = held.chunks.values()
            count = sum(math.prod(sizes) for _, sizes, *_ in rows)
            if held.leaf.dtype and count != math.prod(held.leaf.shape):
                boxes = ExtentColumns.from_rows(rows).boxes
                found = compute_coverage(held.leaf.shape, boxes)
                if refused or not found.holes or found.overlaps or found.outside:
                    raise self._incomplete(held.leaf, boxes)
                names.append(name)
        return names

    def leaves(self) -> dict[str, MetadataLeaf]:
        """Return every leaf with the chunks of all ranks, followed by copies, if recorded."""
        found = {}
        for name, held in self._held.items():
            copies = chain.from_iterable(self.copies.get(name, {}).values())
            rows = chain(held.chunks.values(), copies)
            found[name] = replace(held.leaf, extents=ExtentColumns.from_rows(rows))
        refuse_twins(found, self._where)
        return found

    def saved(self, catalog: Catalog) -> Catalog:
        """Add the world size and an id made of all ranks' save ids to *catalog*."""
        ids = "\n".join(self._save_ids) if all(self._save_ids) else ""
        save_id = _hash(ids.encode()).hexdigest() if ids else ""
        return replace(catalog, save_id=save_id, world=self.world)

    def _of_one_save(self, rank: int, origin: Origin) -> None:
        self._save_ids.append(origin.save_id)
        if not origin.world:
            return
        if rank >= origin.world or self.world not in (0, origin.world):
            said = f"rank {rank} of {origin.world}"
            raise UnsupportedError(
                "the files belong to different saves",
                where=self._file(rank),
                why=f"this file belongs to {said}"
                + (
                    ", but the file of a lower rank belongs to a save of "
                    f"{pluralize(self.world, 'rank')}"
                    if self.world
                    else ""
                ),
                hint=ONE_SAVE,
            )
        self.world = origin.world

    def blobs(self) -> list[str]:
        """Return the names of the non-tensor values."""
        return [name for name, held in self._held.items() if not held.leaf.dtype]

    def _incomplete(
        self, leaf: MetadataLeaf, boxes: Sequence[Box]
    ) -> CoverageError | UnsupportedError:
        found = compute_coverage(leaf.shape, boxes)
        there = f"rank{'s 0 to ' if self.ranks > 1 else ' '}{self.ranks - 1}"
        if found.holes and not found.overlaps:
            next_one = metadata_name(self.ranks)
            return CoverageError(
                f"parts of `{leaf.name}` are missing",
                where=f"{self._where}, tensor `{leaf.name}`, shape {list(leaf.shape)}",
                why=f"found {there}; none of them has {quote_names([str(b) for b in found.holes])}",
                hint=f"copy the files of the remaining ranks, such as `{next_one}`",
            )
        wrong = found.outside or found.overlaps
        return UnsupportedError(
            f"the ranks' chunks of `{leaf.name}` overlap or exceed its shape",
            where=f"{self._where}, tensor `{leaf.name}`, shape {list(leaf.shape)}",
            why=f"found {there}; {quote_names([str(box) for box in wrong])} "
            + ("are outside its shape" if found.outside else "are covered more than once"),
            hint="remove the files of other saves",
        )

    def _file(self, rank: int) -> str:
        return f"{self._where}/{metadata_name(rank)}"


def _described(leaf: MetadataLeaf) -> str:
    kind = f"{leaf.dtype} {list(leaf.shape)}" if leaf.dtype else "not a tensor"
    return f"{kind} at {'/'.join(map(str, leaf.path))}"


@dataclass(slots=True)
class RankValues:
    """Comparison of the non-tensor values of all ranks, in ascending order of rank.

    Attributes:
        files: The directory's files.
        faults: Collector of unreadable files.
        apart: Values that differ from the lowest rank's, by their new names.
        differing: Original names of these values.
    """

    files: SourceFiles
    faults: Faults
    apart: dict[str, MetadataLeaf] = field(default_factory=dict)
    differing: dict[str, None] = field(default_factory=dict)
    _first: dict[str, bytes] = field(default_factory=dict)

    def add(self, rank: int, leaves: Mapping[str, MetadataLeaf]) -> None:
        """Compare the values of *rank* with those of lower ranks."""
        held = [(leaf, leaf.item) for leaf in leaves.values() if leaf.item is not None]
        held.sort(key=lambda value: (value[1].file, value[1].offset))
        for run in _runs(held):
            try:
                for leaf, digest in _digests(self.files, run):
                    if self._first.setdefault(leaf.name, digest) != digest:
                        path = below_rank(rank, leaf.path)
                        self.apart[join(path)] = replace(leaf, name=join(path), path=path)
                        self.differing[leaf.name] = None
            except SourceNotFoundError:
                gone = DamagedError(
                    "a data file is missing",
                    where=str(self.files.root),
                    why=f"`{run[0][1].file}`",
                    hint="copy the missing files from the nodes of the other ranks",
                )
                self.faults.unreadable(gone, run[0][1].file)
            except UNUSABLE as error:
                self.faults.unreadable(error, run[0][1].file)


def _runs(held: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """Group values that are adjacent in a file into runs of about a megabyte."""
    start = 0
    for at, (_, item) in enumerate(held):
        first, before = held[start][1], held[at - 1][1]
        touches = item.file == before.file and item.offset == before.offset + before.nbytes
        if at > start and not (touches and item.offset + item.nbytes - first.offset <= RUN):
            yield held[start:at]
            start = at
    if held:
        yield held[start:]


def _hash(data: bytes | memoryview = b"") -> blake2b:
    from hashlib import blake2b  # loads OpenSSL, which is slow to import

    return blake2b(data, digest_size=16)


def _digests(files: SourceFiles, run: Sequence[_Value]) -> Iterator[tuple[MetadataLeaf, bytes]]:
    first, last = run[0][1], run[-1][1]
    if len(run) == 1:
        found, end = _hash(), first.offset + first.nbytes
        for start in range(first.offset, end, RUN):
            found.update(files.read(first.file, start, min(RUN, end - start)))
        yield run[0][0], found.digest()
        return
    data = memoryview(
        files.read(first.file, first.offset, last.offset + last.nbytes - first.offset)
    )
    for leaf, item in run:
        start = item.offset - first.offset
        yield leaf, _hash(data[start : start + item.nbytes]).digest()
