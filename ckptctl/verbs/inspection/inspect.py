"""Inspection of the tensors, model and missing data of a checkpoint, based on its index.

Only ``stats=True`` reads tensor data, and only then is torch imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from ckptctl import families, formats
from ckptctl.catalog import Catalog, Finding, TensorEntry
from ckptctl.conversion.recognition.model import (
    DETECT_ALL,
    Model,
    ModelRequest,
    describe_model_locations,
    recognize_model,
)
from ckptctl.conversion.recognition.roots import strip_wrappers, unmatched_pattern_error
from ckptctl.conversion.sources import open_source, read_short_values
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    StorageError,
    UnsupportedError,
    UsageError,
    format_option,
    quote_names,
)
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, finding_from_error
from ckptctl.installed import require_torch
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import dequantize_catalog, survey_leniently
from ckptctl.storage.paths import (
    parse_path,
    raise_if_request_failed,
    redact_path,
    resolve_source_path,
)
from ckptctl.storage.threads import StartProgress, ignore_progress
from ckptctl.storage.writing import UnfinishedError
from ckptctl.tree import TreePath
from ckptctl.verbs.inspection.inspect_options import FitOptions, InspectOptions
from ckptctl.verbs.inspection.inspect_result import (
    DTypeUse,
    Fit,
    Inspection,
    RunMember,
    TensorInfo,
)
from ckptctl.verbs.statistics import (
    DEFAULT_BINS,
    Statistics,
    map_tensors_in_parallel,
    measure_tensor,
)
from ckptctl.verbs.verification.model_check import ModelCheck, check_model
from ckptctl.verbs.verification.structure import check_index, is_about_unreadable_tensor
from ckptctl.verdict import Verdict, combine_verdicts, decide_verdict, strip_structure_claim

if TYPE_CHECKING:
    from ckptctl.storage.files import Readable

READS_PER_TENSOR = 2
"""Number of times each tensor is read. A histogram first requires the minimum and maximum."""


def inspect_checkpoint(
    path: str | TreePath,
    options: InspectOptions | None = None,
    progress: StartProgress = ignore_progress,
) -> Inspection:
    """Describe the checkpoint, or the folder of checkpoints, at *path*.

    An incomplete checkpoint is described as well, if it can be read. For what is missing, see
    :attr:`~ckptctl.verbs.inspection.inspect_result.Inspection.problems`.
    """
    options = options or InspectOptions()
    with families.use_converter_file(options.converter):
        if options.stats:
            require_torch(format_option("--stats"))
        # The checksums of the manifest are not shown, so it is not read.
        read = partial(open_source, path, options, manifest=None)
        try:
            catalog = open_readable_part(read)
        except (FormatError, DamagedError, UnsupportedError) as error:
            has_explicit_source = options.format or options.weights or options.tag
            recognized = isinstance(error, DamagedError | UnsupportedError)
            inspection = (
                None if has_explicit_source else _describe_members(path, recognized=recognized)
            )
            if inspection is None:
                raise
            given_options = {
                "--stats": options.stats,
                "--fit": options.fit,
                "--include": options.include,
            }
            require_single_checkpoint(
                inspection, [name for name, is_given in given_options.items() if is_given]
            )
            return inspection
        statistics = _measure_catalog(catalog, options.include, progress) if options.stats else {}
        request = ModelRequest(options.model_type, reference=options.reference)
        inspection = describe_catalog(redact_path(path), catalog, statistics, request, options)
        return replace(inspection, values=read_short_values(catalog))


def open_readable_part(read: Callable[..., Catalog]) -> Catalog:
    """Open a checkpoint. If it is incomplete, open the part that can be read."""
    try:
        return read()
    except UnfinishedError:
        raise
    except UNUSABLE_ERRORS as error:
        try:
            part = read(partial=True)
        except CkptError:
            raise error from None
        raise_if_request_failed(part.root)
        if not part.findings:
            raise
        return part


def _describe_members(path: str | TreePath, *, recognized: bool) -> Inspection | None:
    """Describe a folder of checkpoints, or return None if *path* is not such a folder.

    If *path* was *recognized* as a checkpoint, its entries must be named like checkpoints of a run.
    """
    if (inspection := describe_run(path)) or recognized:
        return inspection
    members = tuple(
        _describe_member(member_path, path)
        for member_path in formats.list_checkpoints(formats.to_existing_path(path))
    )
    return Inspection.from_members(redact_path(path), members) if members else None


def describe_run(path: str | TreePath) -> Inspection | None:
    """Describe the training run at *path*, or return None if it is a checkpoint or not a run."""
    from ckptctl.runs.entries import is_run
    from ckptctl.runs.listing import read_run  # only for runs

    root = resolve_source_path(path)
    if not is_run(root) or formats.sniff_formats(root):
        return None
    run = read_run(root)
    members = []
    for checkpoint in run.checkpoints:
        problems = () if checkpoint.complete else (checkpoint.problem,)
        size = 0, 0
        with suppress(CkptError, OSError):
            catalog = formats.open_checkpoint(checkpoint.path)
            size = len(catalog.tensors), catalog.nbytes
        verdict_fields = checkpoint.verdict, checkpoint.read_failed
        members.append(
            RunMember(str(checkpoint.path), checkpoint.format, *size, problems, *verdict_fields)
        )
    return Inspection.from_members(redact_path(path), tuple(members), run)


def require_single_checkpoint(inspection: Inspection, options: Sequence[str]) -> None:
    """Raise if *options* that apply to one checkpoint were given for a folder of checkpoints."""
    if inspection.checkpoints and options:
        raise UsageError(
            f"{format_option(options[0])} requires one checkpoint, but this folder contains "
            "several",
            where=inspection.path,
            hint=f"pass one of them, such as `{inspection.checkpoints[-1].path}`",
        )


def select_tensors(tensors: Iterable[TensorInfo], include: Sequence[str]) -> list[TensorInfo]:
    """Select the tensors whose names match a glob of *include*, or raise if no tensor matches."""
    tensors = list(tensors)
    selected = [tensor for tensor in tensors if is_selected(tensor.name, include)]
    if tensors and not selected:
        raise unmatched_pattern_error(include, [tensor.name for tensor in tensors])
    return selected


def is_selected(name: str, include: Sequence[str]) -> bool:
    """Return whether *name* matches a glob of *include*, or *include* is empty."""
    return not include or any(fnmatchcase(name, glob) for glob in include)


def list_index_findings(catalog: Catalog) -> list[Finding]:
    """Return the errors and unknown findings about the index of *catalog*, but no warnings."""
    findings = (*catalog.findings, *check_index(catalog))
    return [finding for finding in findings if finding.severity != "warning"]


def _get_problems_by_text(findings: Iterable[Finding], catalog: Catalog) -> dict[str, Finding]:
    """Map the text of each finding to the finding.

    Findings about unreadable tensors are left out, because they are shown as notes.
    """
    return {
        _format_finding(finding): finding
        for finding in findings
        if not is_about_unreadable_tensor(finding, catalog)
    }


def _format_finding(finding: Finding) -> str:
    if finding.file and finding.file in finding.what:
        finding = replace(finding, file=None)
    why = f" ({finding.why})" if finding.why else ""
    return ": ".join(filter(None, (finding.what, finding.where))) + why


def describe_catalog(
    path: str,
    catalog: Catalog,
    statistics: Mapping[str, Statistics],
    request: ModelRequest = DETECT_ALL,
    fit: FitOptions | None = None,
) -> Inspection:
    """Describe *catalog*. *statistics* maps tensor names to measured statistics.

    If *fit* names GPUs, also compute the memory that the model needs on them.
    """
    contents = describe_contents(path, catalog, statistics)
    if not catalog.tensors:
        return contents
    catalog = stored = strip_wrappers(catalog)
    model = recognize_model(catalog, request=request)
    if contents.dequantizable and not model.exact:
        with suppress(CkptError):  # model types describe dequantized tensors
            catalog = replace(dequantize_catalog(catalog, "bfloat16"), notes=catalog.notes)
        model = recognize_model(catalog, request=request)
    notes = Notes()
    checked = ModelCheck([], contents.scope)
    if not contents.problems:
        checked = check_model(model, notes)
    findings = checked.evidence
    missing = notes.get_reasons("missing")
    problems = [finding for finding in findings if finding.severity != "warning"]
    other_findings = [finding for finding in problems if finding.tensor not in missing]
    verdict = combine_verdicts((contents.verdict, decide_verdict(problems)))
    complete = verdict is Verdict.COMPLETE
    return replace(
        contents,
        model_type=model.model_type,
        candidates=model.candidates,
        layout=model.layout,
        root=model.root,
        parameters=sum(entry.numel for entry in model.tensors.values() if entry.alias_of is None),
        problems=(*contents.problems, *map(_format_finding, other_findings)),
        findings=(*contents.findings, *other_findings),
        verdict=verdict,
        scope=checked.scope,
        reference=checked.reference,
        lacks=tuple(missing),
        notes=(
            *catalog.notes,
            *_iterate_unread_notes(catalog),
            *(notes.get_texts() if complete else strip_structure_claim(notes.get_texts())),
            *(_format_finding(finding) for finding in findings if finding.severity == "warning"),
            *_iterate_model_notes(model, request.model_type),
        ),
        fit=_compute_fit(stored, model, fit, verdict) if fit and fit.fit else None,
    )


def _compute_fit(stored: Catalog, model: Model, options: FitOptions, verdict: Verdict) -> Fit:
    """Compute the memory for inference. A damaged model may be too large, but never fits."""
    from ckptctl.verbs.inspection.fit import compute_fit  # only for --fit

    fit = compute_fit(stored, model, options)
    if verdict is not Verdict.DAMAGED or fit.fits is False:
        return fit
    reason = "the checkpoint is damaged, so the sizes of missing weights are unknown"
    return replace(
        fit,
        stages=tuple(replace(stage, weights=None) for stage in fit.stages),
        requests=None,
        max_context=None,
        fits=None,
        unknown=(*fit.unknown, reason),
    )


def _iterate_model_notes(model: Model, model_type: str | None) -> Iterable[str]:
    """Yield notes on where other models are, and on keys that the model type does not have."""
    if model.inner_models:
        yield describe_model_locations(model)
    if model_type is None:
        return
    if not model.candidates:
        yield f"no layout of `{model_type}` has these keys"
    elif not model.exact:
        yield f"some keys do not belong to {' or '.join(model.evidence)}"


def describe_contents(
    path: str, catalog: Catalog, statistics: Mapping[str, Statistics]
) -> Inspection:
    """Describe the contents of *catalog*, but do not try to recognize the model type."""
    quantized, index_problems = survey_leniently(catalog), list_index_findings(catalog)
    problems = _get_problems_by_text(index_problems, catalog)
    notes = [*catalog.notes, *_iterate_unread_notes(catalog)]
    if catalog.others and catalog.path.is_dir():
        notes.append(f"other files in this folder: {quote_names(list(catalog.others))}")
    return Inspection(
        path=path,
        format=catalog.format,
        nbytes=catalog.nbytes,
        dtypes=_count_dtypes(catalog.tensors.values()),
        files=catalog.files,
        problems=tuple(problems),
        findings=tuple(problems.values()),
        verdict=decide_verdict(index_problems),
        read_failed=any(finding.read_failed for finding in catalog.findings),
        tensors=tuple(_describe_tensor(entry, statistics) for entry in catalog.tensors.values()),
        blobs=tuple(catalog.blobs),
        assets=catalog.assets,
        metadata=catalog.metadata,
        notes=tuple(notes),
        quantized=quantized.scheme_by_tensor,
        dequantizable=bool(quantized.weights) and quantized.is_fully_supported,
    )


def _iterate_unread_notes(catalog: Catalog) -> Iterable[str]:
    """Yield a note for each reason why tensors cannot be read."""
    by_reason: dict[str, list[str]] = {}
    for entry in catalog.tensors.values():
        if entry.unsupported:
            by_reason.setdefault(entry.unsupported, []).append(entry.name)
    for why, names in by_reason.items():
        yield f"{quote_names(names)} cannot be read: {why}"


def _describe_tensor(entry: TensorEntry, statistics: Mapping[str, Statistics]) -> TensorInfo:
    return TensorInfo(
        entry.name,
        entry.dtype,
        entry.shape,
        entry.nbytes,
        len(entry.extents),
        entry.alias_of,
        statistics.get(entry.alias_of or entry.name),
        entry.unsupported,
    )


def _count_dtypes(tensors: Iterable[TensorEntry]) -> dict[str, DTypeUse]:
    count: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for tensor in tensors:
        count[tensor.dtype] += 1
        if tensor.alias_of is None:
            elements[tensor.dtype] += tensor.numel
            nbytes[tensor.dtype] += tensor.nbytes
    order = sorted(count, key=lambda name: (-nbytes[name], name))
    return {name: DTypeUse(count[name], elements[name], nbytes[name]) for name in order}


def _measure_catalog(
    catalog: Catalog, include: Sequence[str], progress: StartProgress
) -> dict[str, Statistics]:
    from ckptctl.storage.computed import open_catalog_reader  # only for --stats

    catalog = formats.resolve_codecs(catalog)
    names = {t.alias_of or t.name for t in catalog.tensors.values() if is_selected(t.name, include)}
    entries = [
        entry for name, entry in catalog.tensors.items() if name in names and not entry.unsupported
    ]
    with open_catalog_reader(catalog) as files:
        return measure_tensors(files, entries, progress, DEFAULT_BINS)


def measure_tensors(
    files: Readable,
    entries: Sequence[TensorEntry],
    progress: StartProgress,
    bins: int,
    on_error: Callable[[CkptError, TensorEntry], None] | None = None,
) -> dict[str, Statistics]:
    """Compute statistics of the elements of *entries*, by name. This imports torch.

    Tensors with a non-numeric dtype are skipped. If a tensor is incomplete, the statistics cover
    the elements that are present.

    Args:
        files: Reader of the files.
        entries: Tensors, whose extents must have codec ``raw``.
        progress: Function that is called with the total number of bytes to read.
        bins: Number of bins of the histograms.
        on_error: Function that is called with an error and its tensor, which is then skipped. If
            None, the error is raised.
    """
    sizes = [READS_PER_TENSOR * sum(extent.nbytes for extent in entry.extents) for entry in entries]
    measure_entry = partial(measure_tensor, files, bins=bins)
    statistics_by_name: dict[str, Statistics] = {}
    with progress(sum(sizes)) as advance:
        for entry, statistics in map_tensors_in_parallel(entries, sizes, measure_entry, advance):
            if not isinstance(statistics, CkptError):
                statistics_by_name |= {entry.name: statistics} if statistics else {}
            elif on_error is None:
                raise statistics
            else:
                on_error(statistics, entry)
    return statistics_by_name


def _describe_member(path: TreePath, parent: str | TreePath) -> RunMember:
    shown = str(parse_path(parent) / path.name)
    try:
        catalog = formats.open_checkpoint(path)
    except CkptError as error:
        failed = isinstance(error, StorageError)
        verdict = decide_verdict([finding_from_error(error)])
        return RunMember(shown, None, 0, 0, (error.summary,), verdict, failed)
    findings = list_index_findings(catalog)
    problems = tuple(_get_problems_by_text(findings, catalog))
    size = len(catalog.tensors), catalog.nbytes
    return RunMember(shown, catalog.format, *size, problems, decide_verdict(findings))
