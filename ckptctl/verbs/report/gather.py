"""Collection of everything that a report shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl import families
from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.conversion.items import resolve_items
from ckptctl.conversion.recognition.roots import classify_part
from ckptctl.errors import (
    CkptError,
    FormatError,
    MappingError,
    UnsupportedError,
    UsageError,
    rename_options,
    spell_option,
)
from ckptctl.formats.shared.findings import MISSING_TENSOR, finding_from_error
from ckptctl.installed import require_torch
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.computed import open_reader
from ckptctl.storage.paths import redact_path
from ckptctl.storage.threads import Watch, ignore_progress
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally
from ckptctl.verbs.comparison.diff_options import DiffOptions
from ckptctl.verbs.comparison.diff_result import Difference
from ckptctl.verbs.inspection.inspect import describe, measured, select, stored
from ckptctl.verbs.inspection.inspect_result import Inspection, TensorInfo
from ckptctl.verbs.report.data import (
    CheckpointSummary,
    Chunk,
    ChunkMap,
    LeftOut,
    Presence,
    Report,
    TensorReport,
)
from ckptctl.verbs.report.page import written
from ckptctl.verbs.report.report_options import ReportOptions
from ckptctl.verbs.verification.structure import DISTCP, lost_parts, root_of
from ckptctl.verbs.verification.verify import examine
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verbs.verification.verify_result import Verification, unsaid

if TYPE_CHECKING:
    from ckptctl.verbs.statistics import Statistics


MAX_FINDINGS = 1_000
BINS = 40
PER_TENSOR = 4_096
IN_ALL = 100_000
_OPTIONS = {
    "--format-a": "--from",
    "--weights-a": "--weights",
    "--tag-a": "--tag",
    "--format-b": "--from-other",
    "--weights-b": "--weights-other",
    "--tag-b": "--tag-other",
}
"""Names of `diff` options in `report`."""


def report(
    path: str | TreePath, options: ReportOptions, progress: Watch = ignore_progress
) -> Report:
    """Collect everything known about a checkpoint and write a page about it.

    A damaged checkpoint gets a page, too. If its index cannot be read, the page shows the reason.
    """
    if options.stats:
        require_torch(spell_option("--stats"))
    output = Path(options.output) if options.output else None
    other = options.other
    if other is None:
        _require_no_comparison(options)
    sources = [one for one in (path, other) if one]
    with (
        families.use_converter_file(options.converter),
        written(output, sources, options.overwrite) as write,
    ):
        gathered = _gathered(path, options, progress, paired=other is not None)
        if other is not None:
            gathered = _compared(gathered, str(other), options, progress)
        gathered = replace(gathered, output=str(output) if output else None)
        write(gathered)
    return gathered


def _require_no_comparison(options: ReportOptions) -> None:
    has_tolerance = options.atol is not None or options.rtol is not None
    of_comparisons = {
        ("--structure",): options.structure,
        ("--quick",): options.quick,
        ("--atol", "--rtol"): has_tolerance,
        ("--only",): options.only != "all",
        ("--ignore-dtype",): options.ignore_dtype,
        ("--dequantize",): options.dequantize,
        ("--from-other",): options.format_other,
        ("--weights-other",): options.weights_other,
        ("--tag-other",): options.tag_other,
    }
    for names, value in of_comparisons.items():
        if value:
            raise UsageError(
                f"{' or '.join(map(spell_option, names))} requires a second checkpoint",
                hint="pass it after the first one",
            )


def _gathered(
    path: str | TreePath, options: ReportOptions, progress: Watch, *, paired: bool
) -> Report:
    summary, catalog = _summarized(path, options, paired=paired)
    verified, inspected = summary.verification, summary.inspection
    tensors: tuple[TensorReport, ...] = ()
    unusable: tuple[str, ...] = ()
    left = LeftOut()
    if catalog is not None and inspected is not None:
        chosen = _chosen(select(inspected.tensors, options.include), verified, options)
        if options.stats:
            names = [tensor.name for tensor in chosen]
            statistics, wrong = _statistics(catalog, names, progress)
            wrong = [*verified.findings, *unsaid(verified.findings, wrong)]
            wrong.sort(key=lambda found: found.severity)
            verified = replace(verified, findings=tuple(wrong))
            chosen = [
                replace(tensor, statistics=statistics.get(tensor.alias_of or tensor.name))
                for tensor in chosen
            ]
        maps = ChunkMaps(catalog.computed)
        tensors = tuple(
            TensorReport(
                tensor,
                classify_part(tensor.name, inspected.root, catalog.format),
                maps.map(catalog.tensors[tensor.name], catalog.lost.get(tensor.name, ())),
            )
            for tensor in chosen
        )
        listed = {tensor.name for tensor in chosen}
        rest = [tensor for tensor in inspected.tensors if tensor.name not in listed]
        nbytes = sum(tensor.nbytes for tensor in rest if tensor.alias_of is None)
        left = LeftOut(len(rest), nbytes, maps.chunks, maps.holes)
        unusable = _unusable(catalog)
    findings = min(len(verified.findings), MAX_FINDINGS)
    return Report(
        path=verified.path,
        verification=verified,
        inspection=inspected,
        presence=summary.presence,
        absent=summary.absent,
        tensors=tensors,
        findings=findings,
        left_out=replace(left, findings=len(verified.findings) - findings),
        unusable=unusable,
        ranks={
            file: int(match[1])
            for file in (*verified.files, *unusable)
            if (match := DISTCP.fullmatch(file))
        },
        stats=options.stats,
    )


def _summarized(
    path: str | TreePath, options: ReportOptions, *, paired: bool
) -> tuple[CheckpointSummary, Catalog | None]:
    """Build the head of a page, and return it with the catalog if that can be read."""
    verified, catalog = _examined(path, options, paired=paired)
    if catalog is None:
        return CheckpointSummary(path=verified.path, verification=verified, inspection=None), None
    inspected, notes = _described(redact_path(path), catalog, options)
    summary = CheckpointSummary(
        path=verified.path,
        verification=replace(verified, notes=(*verified.notes, *notes)),
        inspection=inspected,
        presence=_presence(catalog, verified),
        absent=_missing_files(root_of(catalog.path), _unusable(catalog)),
    )
    return summary, catalog


def _missing_files(root: TreePath, files: Iterable[str]) -> frozenset[str]:
    """Return those of *files*, relative to *root*, that are missing."""

    def gone(file: str) -> bool:
        try:
            return not (root / file).exists()
        except (OSError, ValueError):  # an invalid name, or a missing permission
            return False

    return frozenset(filter(gone, files))


def _presence(catalog: Catalog, verified: Verification) -> Presence:
    wrong = {one.tensor or "" for one in verified.findings if one.severity != "warning"}
    entries = [catalog.tensors[name] for name in wrong if name in catalog.tensors]
    gone = sum(nbytes_of(entry, holes_of(entry)) for entry in entries if entry.alias_of is None)
    unknown = {one.tensor for one in catalog.findings if one.what == MISSING_TENSOR} - {
        *catalog.tensors
    }
    total: int | None = catalog.nbytes
    if unknown:
        total = recorded if (recorded := catalog.recorded_bytes or 0) > catalog.nbytes else None
    return Presence(len(unknown), catalog.nbytes - gone, total)


def _examined(
    path: str | TreePath, options: ReportOptions, *, paired: bool
) -> tuple[Verification, Catalog | None]:
    """Verify a checkpoint, ignoring rules that may be meant for the other one."""
    asked = VerifyOptions(
        format=options.format,
        model_type=options.model_type,
        weights=options.weights,
        tag=options.tag,
        rules=options.rules,
        ranks=options.ranks,
    )
    try:
        return examine(path, asked)
    except UsageError:
        if options.rules is None or not paired:
            raise
        return examine(path, replace(asked, rules=None))


def _unusable(catalog: Catalog) -> tuple[str, ...]:
    """Return files that tensors require and that are missing or damaged."""
    lost = (file for boxes in catalog.lost.values() for _, file in boxes)
    used = {extent.file for one in catalog.tensors.values() for extent in one.extents}
    told = (one.file for one in catalog.findings if one.file and one.severity == "error")
    return tuple(
        sort_naturally({*lost, *(used - catalog.computed.keys()), *told} - set(catalog.files))
    )


def _described(
    path: str, catalog: Catalog, options: ReportOptions
) -> tuple[Inspection, tuple[str, ...]]:
    """Describe *catalog*, with a note if its model cannot be recognized."""
    try:
        return describe(path, catalog, {}, options.model_type), ()
    except MappingError as error:
        why = f": {error.why}" if error.why else ""
        return replace(stored(path, catalog, {}), parameters=catalog.numel), (f"{error.what}{why}",)


def _chosen(
    tensors: Sequence[TensorInfo], verified: Verification, options: ReportOptions
) -> list[TensorInfo]:
    """Select up to `max_tensors` tensors, first those with findings, then the largest."""
    if len(tensors) <= options.max_tensors:
        return list(tensors)
    wrong = {finding.tensor for finding in verified.findings}
    order = sorted(tensors, key=lambda tensor: (tensor.name not in wrong, -tensor.nbytes))
    kept = {tensor.name for tensor in order[: options.max_tensors]}
    return [tensor for tensor in tensors if tensor.name in kept]


def holes_of(entry: TensorEntry) -> Sequence[Box]:
    """Return the boxes of a tensor that nothing covers."""
    try:
        boxes = [extent.box for extent in entry.extents]
        return () if entry.unsupported else compute_coverage(entry.shape, boxes).holes
    except UnsupportedError:
        return ()  # too complex, as a finding states


def nbytes_of(entry: TensorEntry, boxes: Sequence[Box]) -> int:
    """Return the size of boxes of a tensor in bytes."""
    elements = sum(box.numel for box in boxes)
    return entry.nbytes * elements // entry.numel if elements else 0


class ChunkMaps:
    """Builder of the chunk maps of a report, with limits per tensor and in total.

    Attributes:
        chunks: Number of boxes beyond the limits.
        holes: Number of missing boxes beyond the limits.
    """

    def __init__(
        self, virtual: Collection[str] = (), room: int = IN_ALL, each: int = PER_TENSOR
    ) -> None:
        """Omit the file of chunks in *virtual* files."""
        self._virtual = virtual
        self.chunks = 0
        self.holes = 0
        self._room = room
        self._each = each

    def map(self, entry: TensorEntry, lost: Sequence[tuple[Box, str]]) -> ChunkMap:
        """Map a tensor to its files.

        *lost* contains boxes in unusable files, and those files.
        """
        missing = holes_of(entry)
        parts = [
            Chunk(box, file)
            for hole in missing
            for box, file in lost_parts(hole, lost) or ((hole, None),)
        ]
        holes = self._taken(parts)
        self.holes += len(holes[1])
        extents = (
            Chunk(extent.box, None if extent.file in self._virtual else extent.file)
            for extent in entry.extents
        )
        chunks = self._taken(list(extents))
        self.chunks += len(chunks[1])
        return ChunkMap(
            tuple(chunks[0]),
            tuple(holes[0]),
            len(holes[0]) + len(holes[1]),
            nbytes_of(entry, missing),
        )

    def _taken(self, found: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        count = min(self._room, self._each, len(found))
        self._room -= count
        return found[:count], found[count:]


def _statistics(
    catalog: Catalog, names: Sequence[str], progress: Watch
) -> tuple[Mapping[str, Statistics], list[Finding]]:
    """Measure the tensors called *names*, and find problems in their bytes.

    The checkpoint need not be complete. Tensors that share memory are measured once.
    """
    entries = catalog.tensors
    chosen = dict.fromkeys(entries[name].alias_of or name for name in names)
    readable = (name for name in chosen if name in entries and not entries[name].unsupported)
    wanted = {name: entries[name] for name in readable}
    known, wrong = resolve_items(replace(catalog, tensors=wanted, blobs={}, replicas={}))
    root = root_of(catalog.path)
    with open_reader(known) as reader:
        found = measured(
            reader,
            list(known.tensors.values()),
            progress,
            BINS,
            lambda error, entry: wrong.append(finding_from_error(error, root, entry.name)),
        )
    return found, wrong


def _compared(about: Report, other: str, options: ReportOptions, progress: Watch) -> Report:
    """Add the difference from *other*, or the error that prevented the comparison."""
    from ckptctl.verbs.comparison.diff import diff  # only with a second checkpoint

    asked = DiffOptions(
        structure=options.structure,
        quick=options.quick,
        atol=options.atol,
        rtol=options.rtol,
        ignore_dtype=options.ignore_dtype,
        dequantize=options.dequantize,
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
        with rename_options(_OPTIONS):
            difference = diff(about.path, other, asked, progress)
    except CkptError as error:
        if error.exit_code in (UsageError.exit_code, FormatError.exit_code):
            raise
        return replace(about, other=other, other_summary=_other(other, options), error=error)
    limit = options.max_tensors
    left = replace(about.left_out, differences=_beyond(difference, limit))
    return replace(
        about,
        other=other,
        other_summary=_other(other, options),
        difference=difference,
        differences=limit,
        left_out=left,
    )


def _other(path: str, options: ReportOptions) -> CheckpointSummary:
    asked = replace(
        options, format=options.format_other, weights=options.weights_other, tag=options.tag_other
    )
    return _summarized(path, asked, paired=True)[0]


def _beyond(found: Difference, limit: int) -> int:
    """Count the entries of a difference that are not listed."""
    lists = [found.tensors, found.leaves]
    for side in (found.a, found.b):
        lists += [side.only, side.only_leaves, tuple(side.left_out)]
    return sum(max(0, len(one) - limit) for one in lists)
