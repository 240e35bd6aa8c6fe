"""Merge the separate files of all ranks into one checkpoint.

All shards of a tensor must record the same dtype and global shape. Shards with the same box are
replicas, and their checksums must match if recorded. If an unsharded leaf, such as an RNG state,
differs between ranks, all values are returned. The value of the lowest rank has the original name,
and values of other ranks that differ from it get the prefix ``rank_N.``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl.catalog import Blob, Box, Extent, Path
from ckptctl.errors import CkptError, FormatError, UnsupportedError, quote_names
from ckptctl.formats.shared.findings import FaultCollector, Lost
from ckptctl.formats.shared.joined_tensors import (
    JoinedTensor,
    make_standalone_entry,
    make_tensor_entries,
    ranks_disagree_error,
    slice_extent,
)
from ckptctl.formats.shared.leaves import (
    add_rank_prefix,
    join_path,
    list_differing_value_notes,
    list_unknown_class_notes,
)
from ckptctl.formats.shared.rank_archive import ShardedPart, get_no_boxes
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.formats.shared.stored_leaves import Leaves, make_extent
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import is_same_value
from ckptctl.storage.zips.zip_reader import StoredTensor

_FALLBACK_NOTE = "per-rank values are taken from the lowest rank that can be read"


class UnusableRankFile(NamedTuple):
    """A missing or unusable file of a rank, with the keys that all paths in the file start with."""

    rank: int
    prefix: Path
    file: str


@dataclass(slots=True)
class _RankTensor(JoinedTensor):
    """A joined tensor, with a function that returns the recorded boxes of other ranks."""

    sharded: bool = False
    boxes_of_rank: Callable[[int], tuple[Box, ...]] = get_no_boxes


class RankMerger:
    """Merger of the leaves of all ranks, which must be added in ascending rank order.

    Attributes:
        faults: Problems of the checkpoint.
        unusable_files: Missing or unusable rank files.
        ranks: Ranks that the meshes and process groups in the files record.
    """

    def __init__(
        self, files: SourceFiles, faults: FaultCollector, *, list_replicas: bool = False
    ) -> None:
        self.faults = faults
        self.unusable_files: list[UnusableRankFile] = []
        self.ranks: set[int] = set()
        self._files, self._list_replicas = files, list_replicas
        self._tensors: dict[str, _RankTensor] = {}
        self._blobs: dict[str, Blob] = {}
        self._seen: dict[int, frozenset[int]] = {}
        self._copies = CopyComparison(files, deferred=list_replicas)
        self._equal_count = 0

    @property
    def replicas(self) -> dict[str, tuple[Extent, ...]]:
        """Extents of replicated boxes by tensor name, or empty unless *list_replicas* was set."""
        tensors = self._tensors.items() if self._list_replicas else ()
        return {key: tuple(tensor.copies) for key, tensor in tensors if tensor.copies}

    def check_rank_files(
        self,
        prefix: Path,
        present: Collection[int],
        required: Collection[int],
        format_name: Callable[[int], str],
        suffix: str = "",
    ) -> None:
        """Raise an error, or add findings in a partial read, if rank files are missing.

        *prefix* contains the keys that all paths in these files start with. For the other
        parameters, see :meth:`FaultCollector.require_rank_files`.
        """
        for rank in self.faults.require_rank_files(present, required, format_name, suffix):
            self._add_unusable_file(UnusableRankFile(rank, prefix, format_name(rank)))

    def add_file(
        self, rank: int, prefix: Path, file: str, leaves: Iterable[tuple[Path, object]]
    ) -> None:
        """Add the leaves of one file of *rank*.

        In a partial read, a file that cannot be read is recorded as unusable. *prefix* contains the
        keys that all paths in *leaves* start with.
        """
        if self.faults.partial:
            loaded = self.faults.try_read(file, lambda _: list(leaves))
            if loaded is None:
                self._add_unusable_file(UnusableRankFile(rank, prefix, file))
                return
            leaves = loaded
        self.add_leaves(rank, file, leaves)

    def _add_unusable_file(self, unusable_file: UnusableRankFile) -> None:
        self.unusable_files.append(unusable_file)
        if unusable_file.rank == 0:
            findings = self.faults.findings
            index = next(
                n for n, finding in enumerate(findings) if finding.file == unusable_file.file
            )
            why = "; ".join(filter(None, (findings[index].why, _FALLBACK_NOTE)))
            findings[index] = replace(findings[index], why=why)

    def add_leaves(self, rank: int, file: str, leaves: Iterable[tuple[Path, object]]) -> None:
        """Add the paths and values in *leaves*, which were read from *file* of *rank*."""
        for path, leaf in leaves:
            if isinstance(leaf, ShardedPart):
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
                self._add_unsharded(rank, path, leaf, file)
            else:
                self._add_blob(rank, path, leaf)

    def _add_sharded(self, path: Path, leaf: ShardedPart, file: str) -> None:
        key = join_path(path)
        joined = self._get_tensor(key, path, leaf, file, sharded=True)
        if not joined.sharded or (joined.dtype, joined.shape) != (leaf.dtype, leaf.shape):
            why = (
                f"it is {leaf.dtype} {list(leaf.shape)} in this file, "
                f"{'' if joined.sharded else 'an unsharded '}{joined.dtype} {list(joined.shape)} "
                f"in `{joined.file}`"
            )
            raise ranks_disagree_error(key, self._files.root / file, why)
        if self.faults.partial:
            joined.boxes_of_rank = leaf.boxes_of_rank
        for box, tensor, start in leaf.pieces:
            local = make_extent(tensor, file, box)
            extent = slice_extent(local, leaf.dtype, tensor.shape, start, box)
            earlier = joined.add_extent(extent)
            if earlier is None:
                continue
            self._copies.record_unread_copy(key, earlier, extent)
            if earlier.crc32 is not None and extent.crc32 not in (None, earlier.crc32):
                raise UnsupportedError(
                    f"replicas of `{key}` differ according to their recorded checksums",
                    where=str(self._files.root / file),
                    why=f"the checksum of {box} differs in `{earlier.file}`",
                    hint="check for files of different saves, or a damaged file",
                )

    def _get_tensor(
        self, key: str, path: Path, leaf: ShardedPart | StoredTensor, file: str, *, sharded: bool
    ) -> _RankTensor:
        if key in self._blobs:
            raise UnsupportedError(f"two values have the name `{key}`", where=str(self._files.root))
        grad = leaf.requires_grad
        new = _RankTensor(leaf.dtype, leaf.shape, path, file, grad, sharded=sharded)
        return self._tensors.setdefault(key, new)

    def _add_unsharded(self, rank: int, path: Path, leaf: StoredTensor, file: str) -> None:
        key = join_path(path)
        joined = self._get_tensor(key, path, leaf, file, sharded=False)
        if joined.sharded:
            why = f"it is an unsharded tensor in this file, but a shard in `{joined.file}`"
            raise ranks_disagree_error(key, self._files.root / file, why)
        extent = make_extent(leaf, file)
        first = next(iter(joined.extents.values()), None)
        if first is not None:
            entry = make_standalone_entry(key, joined.dtype, first)
            copy = make_standalone_entry(key, leaf.dtype, extent)
            if self._copies.is_same(entry, copy, key, of_any_size=self._list_replicas):
                self._equal_count += 1
            else:
                path = add_rank_prefix(rank, path)
                joined = self._get_tensor(join_path(path), path, leaf, file, sharded=False)
        joined.add_extent(extent)

    def _add_blob(self, rank: int, path: Path, value: object) -> None:
        key = join_path(path)
        if key in self._tensors:
            raise UnsupportedError(f"two values have the name `{key}`", where=str(self._files.root))
        first = self._blobs.setdefault(key, Blob(key, path, value=value))
        if not is_same_value(first.value, value):
            self._copies.differing.append(key)
            rank_path = add_rank_prefix(rank, path)
            self._blobs[join_path(rank_path)] = Blob(join_path(rank_path), rank_path, value=value)

    def require_related_files(self, where: str) -> None:
        """Raise FormatError if the files are separate checkpoints instead of files of ranks.

        This is assumed if tensors of the same name differ, none of them is equal in two files, and
        no tensor is sharded.
        """
        clash = any(key in self._tensors for key in self._copies.differing)
        if clash and not self._equal_count and not any(t.sharded for t in self._tensors.values()):
            raise FormatError(
                "the files do not belong to the ranks of one checkpoint",
                where=where,
                why="no file contains a sharded tensor, and no two contain the same tensor: "
                + quote_names(self._copies.differing, 2),
                hint="pass one of the files if each is a separate checkpoint",
            )

    def get_first_keys(self) -> set[str | int]:
        """Return the top-level keys below which tensors were added."""
        return {tensor.path[0] for tensor in self._tensors.values() if tensor.path}

    def merge_leaves(self) -> Leaves:
        """Return the merged tensors and values, without checking that shards tile the tensors."""
        notes = [
            *list_differing_value_notes(self._copies.differing),
            *list_unknown_class_notes(self._blobs.values()),
            *self._copies.list_notes(),
        ]
        self.faults.lost |= self._find_lost_boxes()
        return Leaves(make_tensor_entries(self._tensors), self._blobs, notes)

    def _find_lost_boxes(self) -> Lost:
        """Return the boxes of each tensor that only unusable files contain."""
        lost: Lost = {}
        for key, tensor in self._tensors.items():
            for unusable_file in self.unusable_files:
                if tensor.path[: len(unusable_file.prefix)] != unusable_file.prefix:
                    continue
                with suppress(
                    CkptError, TypeError, KeyError, ValueError, IndexError, AttributeError
                ):
                    boxes = (box for box in tensor.boxes_of_rank(unusable_file.rank) if box.numel)
                    lost_boxes = tuple(
                        (box, unusable_file.file) for box in boxes if box not in tensor.extents
                    )
                    lost[key] = (*lost.get(key, ()), *lost_boxes)
        return {key: lost_boxes for key, lost_boxes in lost.items() if lost_boxes}
