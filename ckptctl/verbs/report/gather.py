"""Collection of the data that a report shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl import families
from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.conversion.items import read_item_headers
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.conversion.recognition.roots import classify_leaf
from ckptctl.errors import (
    CkptError,
    FormatError,
    MappingError,
    UnsupportedError,
    UsageError,
    format_option,
    rename_options_in_messages,
)
from ckptctl.formats.shared.findings import MISSING_TENSOR_MESSAGE, finding_from_error
from ckptctl.installed import require_torch
from ckptctl.planner.boxes import compute_coverage
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.paths import redact_path
from ckptctl.storage.threads import StartProgress, ignore_progress
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally
from ckptctl.verbs.comparison.diff_options import DiffOptions
from ckptctl.verbs.comparison.diff_result import Difference
from ckptctl.verbs.comparison.movement import MovementMeter
from ckptctl.verbs.inspection.inspect import (
    describe_catalog,
    describe_contents,
    measure_tensors,
    select_tensors,
)
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
from ckptctl.verbs.report.page import publish_page
from ckptctl.verbs.report.report_options import ReportOptions
from ckptctl.verbs.verification.structure import RANK_FILE, find_lost_parts, get_checkpoint_folder
from ckptctl.verbs.verification.verify import verify_with_catalog
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verbs.verification.verify_result import Verification, exclude_known_findings

if TYPE_CHECKING:
    from ckptctl.verbs.statistics import Statistics


MAX_FINDINGS = 1_000
HISTOGRAM_BINS = 40
MAX_CHUNKS_PER_TENSOR = 4_096
MAX_CHUNKS = 100_000
_OPTION_NAMES = {
    "--format-a": "--from",
    "--weights-a": "--weights",
    "--tag-a": "--tag",
    "--format-b": "--from-other",
    "--weights-b": "--weights-other",
    "--tag-b": "--tag-other",
}
"""Option names of ``diff`` for one of the checkpoints, and their names in ``report``."""


def write_report(
    path: str | TreePath, options: ReportOptions, progress: StartProgress = ignore_progress
) -> Report:
    """Verify, inspect and optionally compare a checkpoint, and write an HTML report about it.

    A report is also written for a damaged checkpoint. If the index cannot be read, the report
    shows the reason.
    """
    for name, is_given in (("--stats", options.stats), ("--movement", options.movement)):
        if is_given:
            require_torch(format_option(name))
    output = Path(options.output) if options.output else None
    other = options.other
    if other is None:
        _require_no_comparison_options(options)
    sources = [given_path for given_path in (path, other) if given_path]
    with (
        families.use_converter_file(options.converter),
        publish_page(output, sources, options.overwrite) as write,
    ):
        collected = _collect_report(path, options, progress, paired=other is not None)
        if other is not None:
            collected = _add_comparison(collected, str(other), options, progress)
        collected = replace(collected, output=str(output) if output else None)
        write(collected)
    return collected


def _require_no_comparison_options(options: ReportOptions) -> None:
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
                f"{' or '.join(map(format_option, names))} requires a second checkpoint",
                hint="pass it after the first one",
            )


def _collect_report(
    path: str | TreePath, options: ReportOptions, progress: StartProgress, *, paired: bool
) -> Report:
    summary, catalog = _summarize_checkpoint(path, options, paired=paired)
    verified, inspected = summary.verification, summary.inspection
    tensors: tuple[TensorReport, ...] = ()
    unusable: tuple[str, ...] = ()
    omitted = LeftOut()
    if catalog is not None and inspected is not None:
        listed_tensors = _select_listed_tensors(
            select_tensors(inspected.tensors, options.include), verified, options
        )
        if options.stats:
            names = [tensor.name for tensor in listed_tensors]
            statistics, findings_with_values = _measure_statistics(catalog, names, progress)
            findings_with_values = [
                *verified.findings,
                *exclude_known_findings(verified.findings, findings_with_values),
            ]
            findings_with_values.sort(key=lambda found: found.severity)
            verified = replace(verified, findings=tuple(findings_with_values))
            listed_tensors = [
                replace(tensor, statistics=statistics.get(tensor.alias_of or tensor.name))
                for tensor in listed_tensors
            ]
        maps = ChunkMapper(catalog.computed)
        tensors = tuple(
            TensorReport(
                tensor,
                classify_leaf(tensor.name, inspected.root, catalog.format),
                maps.map_tensor(catalog.tensors[tensor.name], catalog.lost.get(tensor.name, ())),
            )
            for tensor in listed_tensors
        )
        listed_names = {tensor.name for tensor in listed_tensors}
        unlisted = [tensor for tensor in inspected.tensors if tensor.name not in listed_names]
        nbytes = sum(tensor.nbytes for tensor in unlisted if tensor.alias_of is None)
        omitted = LeftOut(len(unlisted), nbytes, maps.chunks, maps.holes)
        unusable = _list_unusable_files(catalog)
    findings = min(len(verified.findings), MAX_FINDINGS)
    return Report(
        path=verified.path,
        verification=verified,
        inspection=inspected,
        presence=summary.presence,
        absent=summary.absent,
        tensors=tensors,
        findings=findings,
        left_out=replace(omitted, findings=len(verified.findings) - findings),
        unusable=unusable,
        ranks={
            file: int(match[1])
            for file in (*verified.files, *unusable)
            if (match := RANK_FILE.fullmatch(file))
        },
        stats=options.stats,
    )


def _summarize_checkpoint(
    path: str | TreePath, options: ReportOptions, *, paired: bool
) -> tuple[CheckpointSummary, Catalog | None]:
    """Summarize a checkpoint.

    Returns:
        The summary, and the catalog or None if the index cannot be read.
    """
    verified, catalog = _verify_checkpoint(path, options, paired=paired)
    if catalog is None:
        return CheckpointSummary(path=verified.path, verification=verified, inspection=None), None
    inspected, notes = _describe_checkpoint(redact_path(path), catalog, options)
    summary = CheckpointSummary(
        path=verified.path,
        verification=replace(verified, notes=(*verified.notes, *notes)),
        inspection=inspected,
        presence=_measure_presence(catalog, verified),
        absent=_list_missing_files(
            get_checkpoint_folder(catalog.path), _list_unusable_files(catalog)
        ),
    )
    return summary, catalog


def _list_missing_files(root: TreePath, files: Iterable[str]) -> frozenset[str]:
    """Return the names in *files* that do not exist below *root*."""

    def is_missing(file: str) -> bool:
        try:
            return not (root / file).exists()
        except (OSError, ValueError):  # an invalid name, or a missing permission
            return False

    return frozenset(filter(is_missing, files))


def _measure_presence(catalog: Catalog, verified: Verification) -> Presence:
    damaged_names = {
        finding.tensor or "" for finding in verified.findings if finding.severity != "warning"
    }
    entries = [catalog.tensors[name] for name in damaged_names if name in catalog.tensors]
    missing_bytes = sum(
        count_bytes(entry, find_holes(entry)) for entry in entries if entry.alias_of is None
    )
    unknown = {
        finding.tensor for finding in catalog.findings if finding.what == MISSING_TENSOR_MESSAGE
    } - {*catalog.tensors}
    total: int | None = catalog.nbytes
    if unknown:
        total = recorded if (recorded := catalog.recorded_bytes or 0) > catalog.nbytes else None
    return Presence(len(unknown), catalog.nbytes - missing_bytes, total)


def _verify_checkpoint(
    path: str | TreePath, options: ReportOptions, *, paired: bool
) -> tuple[Verification, Catalog | None]:
    """Verify a checkpoint. If it is compared and rejects ``--rules``, verify it without them."""
    verify_options = VerifyOptions(
        format=options.format,
        model_type=options.model_type,
        weights=options.weights,
        tag=options.tag,
        rules=options.rules,
        ranks=options.ranks,
        reference="none",
    )
    try:
        return verify_with_catalog(path, verify_options)
    except UsageError:
        if options.rules is None or not paired:
            raise
        return verify_with_catalog(path, replace(verify_options, rules=None))


def _list_unusable_files(catalog: Catalog) -> tuple[str, ...]:
    """Return the files that are missing or damaged and contain data of tensors."""
    lost = (file for boxes in catalog.lost.values() for _, file in boxes)
    used_files = {extent.file for item in catalog.tensors.values() for extent in item.extents}
    reported = (item.file for item in catalog.findings if item.file and item.severity == "error")
    return tuple(
        sort_naturally(
            {*lost, *(used_files - catalog.computed.keys()), *reported} - set(catalog.files)
        )
    )


def _describe_checkpoint(
    path: str, catalog: Catalog, options: ReportOptions
) -> tuple[Inspection, tuple[str, ...]]:
    """Describe *catalog*, and return a note if its model cannot be recognized."""
    try:
        request = ModelRequest(options.model_type)
        return describe_catalog(path, catalog, {}, request, options), ()
    except MappingError as error:
        why = f": {error.why}" if error.why else ""
        return replace(describe_contents(path, catalog, {}), parameters=catalog.numel), (
            f"{error.what}{why}",
        )


def _select_listed_tensors(
    tensors: Sequence[TensorInfo], verified: Verification, options: ReportOptions
) -> list[TensorInfo]:
    """Select up to `max_tensors` tensors. Tensors with findings come first, then the largest."""
    if len(tensors) <= options.max_tensors:
        return list(tensors)
    names_with_findings = {finding.tensor for finding in verified.findings}
    order = sorted(
        tensors, key=lambda tensor: (tensor.name not in names_with_findings, -tensor.nbytes)
    )
    kept_names = {tensor.name for tensor in order[: options.max_tensors]}
    return [tensor for tensor in tensors if tensor.name in kept_names]


def find_holes(entry: TensorEntry) -> Sequence[Box]:
    """Return the missing boxes of a tensor, which no extent covers."""
    try:
        boxes = [extent.box for extent in entry.extents]
        return () if entry.unsupported else compute_coverage(entry.shape, boxes).holes
    except UnsupportedError:
        return ()  # too complex, as a finding states


def count_bytes(entry: TensorEntry, boxes: Sequence[Box]) -> int:
    """Return the total size in bytes of *boxes* of a tensor."""
    elements = sum(box.numel for box in boxes)
    return entry.nbytes * elements // entry.numel if elements else 0


class ChunkMapper:
    """Builder of the chunk maps in a report, which limits the number of chunks.

    Attributes:
        chunks: Number of stored boxes that were omitted because of the limits.
        holes: Number of missing boxes omitted because of the limits.
    """

    def __init__(
        self,
        computed_files: Collection[str] = (),
        max_chunks: int = MAX_CHUNKS,
        max_per_tensor: int = MAX_CHUNKS_PER_TENSOR,
    ) -> None:
        """Create a mapper that has not mapped any tensors yet.

        Args:
            computed_files: Files that are computed on read, which chunks do not name.
            max_chunks: Maximum number of chunks in the report.
            max_per_tensor: Maximum number of chunks per tensor.
        """
        self._virtual = computed_files
        self.chunks = 0
        self.holes = 0
        self._room = max_chunks
        self._each = max_per_tensor

    def map_tensor(self, entry: TensorEntry, lost: Sequence[tuple[Box, str]]) -> ChunkMap:
        """Map the boxes of a tensor to the files that contain them.

        *lost* are the boxes in unusable files, each with its file.
        """
        missing = find_holes(entry)
        parts = [
            Chunk(box, file)
            for hole in missing
            for box, file in find_lost_parts(hole, lost) or ((hole, None),)
        ]
        holes = self._split_at_limit(parts)
        self.holes += len(holes[1])
        extents = (
            Chunk(extent.box, None if extent.file in self._virtual else extent.file)
            for extent in entry.extents
        )
        chunks = self._split_at_limit(list(extents))
        self.chunks += len(chunks[1])
        return ChunkMap(
            tuple(chunks[0]),
            tuple(holes[0]),
            len(holes[0]) + len(holes[1]),
            count_bytes(entry, missing),
        )

    def _split_at_limit(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        count = min(self._room, self._each, len(chunks))
        self._room -= count
        return chunks[:count], chunks[count:]


def _measure_statistics(
    catalog: Catalog, names: Sequence[str], progress: StartProgress
) -> tuple[Mapping[str, Statistics], list[Finding]]:
    """Measure the statistics of the tensors *names*.

    Returns:
        Statistics by tensor name, and findings about tensors that cannot be read.

    The checkpoint may be incomplete. Tensors that share memory are measured once.
    """
    entries = catalog.tensors
    unique_names = dict.fromkeys(entries[name].alias_of or name for name in names)
    readable = (name for name in unique_names if name in entries and not entries[name].unsupported)
    readable_entries = {name: entries[name] for name in readable}
    resolved_catalog, findings = read_item_headers(
        replace(catalog, tensors=readable_entries, blobs={}, replicas={})
    )
    root = get_checkpoint_folder(catalog.path)
    with open_catalog_reader(resolved_catalog) as reader:
        statistics_by_name = measure_tensors(
            reader,
            list(resolved_catalog.tensors.values()),
            progress,
            HISTOGRAM_BINS,
            lambda error, entry: findings.append(finding_from_error(error, root, entry.name)),
        )
    return statistics_by_name, findings


def _add_comparison(
    report: Report, other: str, options: ReportOptions, progress: StartProgress
) -> Report:
    """Add the difference from the checkpoint *other*, or the error if they cannot be compared."""
    from ckptctl.verbs.comparison.diff import compare_checkpoints  # only with a second checkpoint

    diff_options = DiffOptions(
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
    meter = MovementMeter() if options.movement else None
    observe = meter.add_window if meter else None
    try:
        with rename_options_in_messages(_OPTION_NAMES):
            difference = compare_checkpoints(report.path, other, diff_options, progress, observe)
    except CkptError as error:
        if error.exit_code in (UsageError.exit_code, FormatError.exit_code):
            raise
        return replace(
            report, other=other, other_summary=_summarize_other(other, options), error=error
        )
    limit = options.max_tensors
    omitted = replace(report.left_out, differences=_count_unlisted(difference, limit))
    return replace(
        report,
        other=other,
        other_summary=_summarize_other(other, options),
        difference=difference,
        differences=limit,
        left_out=omitted,
        movement=meter.summarize_layers(_list_model_tensors(report)) if meter else None,
    )


def _list_model_tensors(report: Report) -> list[str]:
    """List the tensors of the model, without optimizer state."""
    inspected = report.inspection
    if inspected is None:
        return []
    names = (tensor.name for tensor in inspected.tensors if tensor.alias_of is None)
    return [n for n in names if classify_leaf(n, inspected.root, inspected.format) == "model"]


def _summarize_other(path: str, options: ReportOptions) -> CheckpointSummary:
    other_options = replace(
        options, format=options.format_other, weights=options.weights_other, tag=options.tag_other
    )
    return _summarize_checkpoint(path, other_options, paired=True)[0]


def _count_unlisted(difference: Difference, limit: int) -> int:
    """Count the entries that are omitted if each list of the difference is cut to *limit*."""
    lists = [difference.tensors, difference.leaves]
    for side in (difference.a, difference.b):
        lists += [side.only, side.only_leaves, tuple(side.left_out)]
    return sum(max(0, len(entries) - limit) for entries in lists)
