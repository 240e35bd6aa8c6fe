"""Merge the separate files of all ranks into one checkpoint.

Shards are boxes of one tensor and must have the same dtype and shape. Equal boxes are replicas, and
their checksums must match if recorded. A leaf that is not sharded and differs between ranks, such
as a random-number state, is kept per rank. The lowest rank's value keeps the name; values of other
ranks that differ from it get the prefix ``rank_N.``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl.catalog import Blob, Box, Extent, Path
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsupportedError, quote_names
from ckptctl.formats.shared.findings import Faults, Lost
from ckptctl.formats.shared.joined_tensors import (
    JoinedTensor,
    part_extent,
    ranks_disagree_error,
    separate_entry,
    tensor_entries,
)
from ckptctl.formats.shared.leaves import below_rank, join, kept_apart, unknown_notes
from ckptctl.formats.shared.rank_archive import Sharded, nothing_known
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.formats.shared.stored_leaves import Leaves, extent_of
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.zips.zip_reader import StoredTensor

_NEXT = "per-rank values are taken from the lowest rank that can be read"


class Gap(NamedTuple):
    """An unusable file of a rank, with the prefix of its leaves."""

    rank: int
    head: Path
    file: str


@dataclass(slots=True)
class _RankTensor(JoinedTensor):
    sharded: bool = False
    held_by: Callable[[int], tuple[Box, ...]] = nothing_known


class RankMerger:
    """Merger of leaves, which takes ranks in ascending order.

    Attributes:
        faults: Problems of the checkpoint.
        gaps: Unusable files of ranks.
        ranks: All ranks that took part in the save, as far as recorded.
    """

    def __init__(self, files: SourceFiles, faults: Faults, *, listed: bool = False) -> None:
        self.faults = faults
        self.gaps: list[Gap] = []
        self.ranks: set[int] = set()
        self._files, self._listed = files, listed
        self._tensors: dict[str, _RankTensor] = {}
        self._blobs: dict[str, Blob] = {}
        self._seen: dict[int, frozenset[int]] = {}
        self._copies = CopyComparison(files, deferred=listed)
        self._agreed = 0

    @property
    def replicas(self) -> dict[str, tuple[Extent, ...]]:
        """Further copies of each tensor's boxes, if these are to be listed."""
        tensors = self._tensors.items() if self._listed else ()
        return {key: tuple(tensor.copies) for key, tensor in tensors if tensor.copies}

    def require(
        self,
        head: Path,
        present: Collection[int],
        wanted: Collection[int],
        named: Callable[[int], str],
        of: str = "",
    ) -> None:
        """Raise, or add findings, for missing files of ranks."""
        for rank in self.faults.require_ranks(present, wanted, named, of):
            self._add_gap(Gap(rank, head, named(rank)))

    def take(self, rank: int, head: Path, file: str, leaves: Iterable[tuple[Path, object]]) -> None:
        """Add the leaves of one file of *rank* below *head*, or record a gap if it is unusable."""
        if self.faults.partial:
            held = self.faults.read(file, lambda _: list(leaves))
            if held is None:
                self._add_gap(Gap(rank, head, file))
                return
            leaves = held
        self.add(rank, file, leaves)

    def _add_gap(self, gap: Gap) -> None:
        self.gaps.append(gap)
        if gap.rank == 0:
            findings = self.faults.findings
            at = next(n for n, finding in enumerate(findings) if finding.file == gap.file)
            why = "; ".join(filter(None, (findings[at].why, _NEXT)))
            findings[at] = replace(findings[at], why=why)

    def add(self, rank: int, file: str, leaves: Iterable[tuple[Path, object]]) -> None:
        """Add leaves of one file of *rank*."""
        for path, leaf in leaves:
            if isinstance(leaf, Sharded):
                if leaf.rank is not None and leaf.rank != rank:
                    raise UnsupportedError(
                        f"`{file}` is not the file of rank {rank}",
                        where=str(self._files.root / file),
                        why=f"its content was written by rank {leaf.rank}",
                        hint="restore the original file names (files were renamed or overwritten)",
                    )
                if id(leaf.ranks) not in self._seen:
                    self._seen[id(leaf.ranks)] = leaf.ranks
                    self.ranks |= leaf.ranks
                self._add_sharded(path, leaf, file)
            elif isinstance(leaf, StoredTensor):
                self._add_plain(rank, path, leaf, file)
            else:
                self._add_blob(rank, path, leaf)

    def _add_sharded(self, path: Path, leaf: Sharded, file: str) -> None:
        key = join(path)
        known = self._known(key, path, leaf, file, sharded=True)
        if not known.sharded or (known.dtype, known.shape) != (leaf.dtype, leaf.shape):
            why = (
                f"it is {leaf.dtype} {list(leaf.shape)} in this file, "
                f"{'' if known.sharded else 'an unsharded '}{known.dtype} {list(known.shape)} "
                f"in `{known.file}`"
            )
            raise ranks_disagree_error(key, self._files.root / file, why)
        if self.faults.partial:
            known.held_by = leaf.held_by
        for box, tensor, start in leaf.pieces:
            local = extent_of(tensor, file, box)
            extent = part_extent(local, leaf.dtype, tensor.shape, start, box)
            before = known.add(extent)
            if before is None:
                continue
            self._copies.leave(key, before, extent)
            if before.crc32 is not None and extent.crc32 not in (None, before.crc32):
                raise UnsupportedError(
                    f"replicas of `{key}` differ according to their recorded checksums",
                    where=str(self._files.root / file),
                    why=f"the checksum of {box} differs in `{before.file}`",
                    hint="check for files of different saves, or a damaged file",
                )

    def _known(
        self, key: str, path: Path, leaf: Sharded | StoredTensor, file: str, *, sharded: bool
    ) -> _RankTensor:
        if key in self._blobs:
            raise UnsupportedError(f"two values have the name `{key}`", where=str(self._files.root))
        grad = leaf.requires_grad
        new = _RankTensor(leaf.dtype, leaf.shape, path, file, grad, sharded=sharded)
        return self._tensors.setdefault(key, new)

    def _add_plain(self, rank: int, path: Path, leaf: StoredTensor, file: str) -> None:
        key = join(path)
        known = self._known(key, path, leaf, file, sharded=False)
        if known.sharded:
            why = f"it is an unsharded tensor in this file, but a shard in `{known.file}`"
            raise ranks_disagree_error(key, self._files.root / file, why)
        extent = extent_of(leaf, file)
        first = next(iter(known.extents.values()), None)
        if first is not None:
            entry = separate_entry(key, known.dtype, first)
            copy = separate_entry(key, leaf.dtype, extent)
            if self._copies.is_same(entry, copy, key, of_any_size=self._listed):
                self._agreed += 1
            else:
                path = below_rank(rank, path)
                known = self._known(join(path), path, leaf, file, sharded=False)
        known.add(extent)

    def _add_blob(self, rank: int, path: Path, value: object) -> None:
        key = join(path)
        if key in self._tensors:
            raise UnsupportedError(f"two values have the name `{key}`", where=str(self._files.root))
        known = self._blobs.setdefault(key, Blob(key, path, value=value))
        if not same_value(known.value, value):
            self._copies.differing.append(key)
            own = below_rank(rank, path)
            self._blobs[join(own)] = Blob(join(own), own, value=value)

    def refuse_unrelated(self, where: str) -> None:
        """Raise if the files share no tensor and are not sharded, so each is a checkpoint."""
        clash = any(key in self._tensors for key in self._copies.differing)
        if clash and not self._agreed and not any(t.sharded for t in self._tensors.values()):
            raise FormatError(
                "the files do not belong to the ranks of one checkpoint",
                where=where,
                why="no file contains a sharded tensor, and no two contain the same tensor: "
                + quote_names(self._copies.differing, 2),
                hint="pass one of the files if each is a separate checkpoint",
            )

    def heads(self) -> set[str | int]:
        """Return the first keys of all tensors."""
        return {known.path[0] for known in self._tensors.values() if known.path}

    def finish(self) -> Leaves:
        """Return everything that was added, without checking that shards tile their tensors."""
        notes = [
            *kept_apart(self._copies.differing),
            *unknown_notes(self._blobs.values()),
            *self._copies.notes(),
        ]
        self.faults.lost |= self._lost()
        return Leaves(tensor_entries(self._tensors), self._blobs, notes)

    def _lost(self) -> Lost:
        """Return the boxes of each tensor that are only in unusable files."""
        found: Lost = {}
        for key, known in self._tensors.items():
            for gap in self.gaps:
                if known.path[: len(gap.head)] != gap.head:
                    continue
                with suppress(
                    CkptError, TypeError, KeyError, ValueError, IndexError, AttributeError
                ):
                    boxes = (box for box in known.held_by(gap.rank) if box.numel)
                    gone = tuple((box, gap.file) for box in boxes if box not in known.extents)
                    found[key] = (*found.get(key, ()), *gone)
        return {key: gone for key, gone in found.items() if gone}


def same_value(one: object, other: object) -> bool:
    """Return whether two leaves are equal, or False if they cannot be compared."""
    try:
        return type(one) is type(other) and bool(one == other)
    except DamagedError:
        return False
