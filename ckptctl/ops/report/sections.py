"""The parts of a report: chunks, values, and the difference to another checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.catalog import Box, Catalog, Finding, TensorEntry, is_computed
from ckptctl.errors import CkptError, FormatError, SourceNotFoundError, UnsupportedError, UsageError
from ckptctl.ops.inspection.inspect import measured
from ckptctl.ops.report.data import Chunk, ChunkMap, Report
from ckptctl.ops.report.options import ReportOptions
from ckptctl.ops.verification.items import resolved
from ckptctl.ops.verification.result import of_error
from ckptctl.ops.verification.structure import DISTCP, root_of
from ckptctl.ops.watch import Watch
from ckptctl.options import renaming
from ckptctl.planner.boxes import coverage, intersect
from ckptctl.storage.paths import path_at

if TYPE_CHECKING:
    from ckptctl.ops.comparison.result import Difference
    from ckptctl.storage.statistics import Statistics


PER_TENSOR = 4_096
IN_ALL = 100_000


class ChunkMaps:
    """Makes the maps of one report, until there is no more room for boxes, in all or of one tensor.

    Attributes:
        chunks: Boxes that had no place.
        holes: Missing boxes that had none.
    """

    def __init__(self, room: int = IN_ALL, each: int = PER_TENSOR) -> None:
        self.chunks = 0
        self.holes = 0
        self._room = room
        self._each = each

    def map(self, entry: TensorEntry, lost: Sequence[tuple[Box, str]]) -> ChunkMap:
        """Map a tensor; *lost*: boxes in files that cannot be used, and those files."""
        try:
            boxes = [extent.box for extent in entry.extents]
            found = () if entry.unsupported else coverage(entry.shape, boxes).holes
        except UnsupportedError:
            found = ()  # too tangled; a finding says so
        holes = self._taken([part for hole in found for part in _parts(hole, lost)])
        self.holes += len(holes[1])
        extents = (
            Chunk(extent.box, None if is_computed(extent.file) else extent.file)
            for extent in entry.extents
        )
        chunks = self._taken(list(extents))
        self.chunks += len(chunks[1])
        return ChunkMap(tuple(chunks[0]), tuple(holes[0]), len(holes[0]) + len(holes[1]))

    def _taken(self, found: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        count = min(self._room, self._each, len(found))
        self._room -= count
        return found[:count], found[count:]


def _parts(hole: Box, lost: Sequence[tuple[Box, str]]) -> Iterator[Chunk]:
    """Yield the parts of a hole that are known to lie in a file; else the hole."""
    named = False
    for box, file in lost:
        part = intersect(box, hole) if hole.sizes else hole
        if part is not None:
            named = True
            yield Chunk(part, file)
    if not named:
        yield Chunk(hole, None)


def ranks_of(files: Iterable[str]) -> dict[str, int]:
    """Return the rank that wrote each file of which the name says it: ``__3_0.distcp``."""
    matches = ((file, DISTCP.fullmatch(file)) for file in files)
    return {file: int(match[1]) for file, match in matches if match}


BINS = 40


def values(
    catalog: Catalog, names: Sequence[str], progress: Watch
) -> tuple[Mapping[str, Statistics], list[Finding]]:
    """Measure the tensors called *names*; say what is wrong with their bytes.

    The checkpoint need not be whole. Tensors that share the memory of others are measured as these.
    """
    from ckptctl.storage.computed import open_reader

    entries = catalog.tensors
    chosen = dict.fromkeys(entries[name].alias_of or name for name in names)
    readable = (name for name in chosen if name in entries and not entries[name].unsupported)
    wanted = {name: entries[name] for name in readable}
    known, wrong = resolved(replace(catalog, tensors=wanted, blobs={}, replicas={}))
    root = root_of(path_at(catalog.path))
    with open_reader(known) as reader:
        found = measured(
            reader,
            list(known.tensors.values()),
            progress,
            BINS,
            lambda error, entry: wrong.append(of_error(error, root, entry.name)),
        )
    return found, wrong


_OPTIONS = {
    "--format-a": "--from",
    "--weights-a": "--weights",
    "--tag-a": "--tag",
    "--format-b": "--from-other",
    "--weights-b": "--weights-other",
    "--tag-b": "--tag-other",
}
"""What `report` calls the options of `diff`."""


def compared(found: Report, other: str, options: ReportOptions, progress: Watch) -> Report:
    """Return *found* with how it differs from *other*, or why that cannot be said."""
    from ckptctl.ops.comparison.diff import diff
    from ckptctl.ops.comparison.options import DiffOptions

    asked = DiffOptions(
        structure=options.structure,
        atol=options.atol,
        rtol=options.rtol,
        ignore_dtype=options.ignore_dtype,
        include=options.include,
        only=options.only,
        format_a=options.format,
        format_b=options.format_other,
        weights_a=options.weights,
        weights_b=options.weights_other,
        tag_a=options.tag,
        tag_b=options.tag_other,
        rules=options.rules,
        model_type=options.model_type,
    )
    try:
        with renaming(_OPTIONS):
            difference = diff(found.path, other, asked, progress)
    except (UsageError, SourceNotFoundError, FormatError):
        raise
    except CkptError as error:
        return replace(found, other=other, error=error)
    limit = options.max_tensors
    left = replace(found.left_out, differences=_beyond(difference, limit))
    return replace(found, other=other, difference=difference, differences=limit, left_out=left)


def _beyond(found: Difference, limit: int) -> int:
    """Return how many entries of a difference are not listed."""
    lists = [found.tensors, found.leaves]
    for side in (found.a, found.b):
        lists += [side.only, side.only_leaves, tuple(side.left_out)]
    return sum(max(0, len(one) - limit) for one in lists)
