"""Description of a checkpoint from its index, and whether it is complete.

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
    Model,
    ModelRequest,
    describe_locations,
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
    quote_names,
    spell_option,
)
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, finding_from_error
from ckptctl.installed import require_torch
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import dequantize_catalog, survey_leniently
from ckptctl.storage.paths import parse_path, redact_path, require_no_failure, resolve_source_path
from ckptctl.storage.threads import Watch, ignore_progress
from ckptctl.storage.writing import UnfinishedError
from ckptctl.tree import TreePath
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from ckptctl.verbs.inspection.inspect_result import DTypeUse, Inspection, Member, TensorInfo
from ckptctl.verbs.statistics import BINS, Statistics, measure, side_by_side
from ckptctl.verbs.verification.model_check import check_model
from ckptctl.verbs.verification.structure import is_about_unread, of_index
from ckptctl.verdict import Verdict, decide_verdict, strip_structure_claim, worst_verdict

if TYPE_CHECKING:
    from ckptctl.storage.files import Readable

PASSES = 2
"""Number of reads per tensor: a histogram requires the minimum and maximum."""


def inspect(
    path: str | TreePath, options: InspectOptions | None = None, progress: Watch = ignore_progress
) -> Inspection:
    """Describe the checkpoint, or the folder of checkpoints, at *path*.

    A checkpoint that can be read but is not complete is described as well: see
    :attr:`~ckptctl.verbs.inspection.inspect_result.Inspection.problems`.
    """
    options = options or InspectOptions()
    with families.use_converter_file(options.converter):
        if options.stats:
            require_torch(spell_option("--stats"))
        # The manifest's checksums are not shown, so its request is saved.
        read = partial(open_source, path, options, manifest=None)
        try:
            catalog = _readable(read)
        except (FormatError, DamagedError, UnsupportedError) as error:
            chosen = options.format or options.weights or options.tag
            recognized = isinstance(error, DamagedError | UnsupportedError)
            found = None if chosen else _run(path, recognized=recognized)
            if found is None:
                raise
            asked = {"--stats": options.stats, "--include": options.include}
            require_one(found, [name for name, given in asked.items() if given])
            return found
        measured = _measure(catalog, options.include, progress) if options.stats else {}
        found = describe(redact_path(path), catalog, measured, options.model_type)
        return replace(found, values=read_short_values(catalog))


def _readable(read: Callable[..., Catalog]) -> Catalog:
    """Open a checkpoint, or the readable part of one that is not complete."""
    try:
        return read()
    except UnfinishedError:
        raise
    except UNUSABLE_ERRORS as error:
        try:
            part = read(partial=True)
        except CkptError:
            raise error from None
        require_no_failure(part.root)
        if not part.findings:
            raise
        return part


def _run(path: str | TreePath, *, recognized: bool) -> Inspection | None:
    """Describe a folder of checkpoints, or return None if *path* is not one.

    If *path* was recognized as a checkpoint, only names of checkpoints make it a run.
    """
    if (found := overview(path)) or recognized:
        return found
    members = tuple(
        _member(one, path) for one in formats.list_checkpoints(formats.to_existing_path(path))
    )
    return Inspection.of_members(redact_path(path), members) if members else None


def overview(path: str | TreePath) -> Inspection | None:
    """Describe the training run at *path*, or return None if it is a checkpoint or not a run."""
    from ckptctl.runs.entries import is_run
    from ckptctl.runs.listing import read_run  # only for runs

    root = resolve_source_path(path)
    if not is_run(root) or formats.sniff_formats(root):
        return None
    run = read_run(root)
    members = []
    for one in run.checkpoints:
        problems = () if one.complete else (one.problem,)
        size = 0, 0
        with suppress(CkptError, OSError):
            catalog = formats.open_checkpoint(one.path)
            size = len(catalog.tensors), catalog.nbytes
        told = one.verdict, one.read_failed
        members.append(Member(str(one.path), one.format, *size, problems, *told))
    return Inspection.of_members(redact_path(path), tuple(members), run)


def require_one(found: Inspection, asked: Sequence[str]) -> None:
    """Raise if options that need one checkpoint are used for a folder of several."""
    if found.checkpoints and asked:
        raise UsageError(
            f"{spell_option(asked[0])} requires one checkpoint, but this folder contains several",
            where=found.path,
            hint=f"pass one of them, such as `{found.checkpoints[-1].path}`",
        )


def select(tensors: Iterable[TensorInfo], include: Sequence[str]) -> list[TensorInfo]:
    """Select the tensors whose names match the globs, or raise if none matches."""
    tensors = list(tensors)
    found = [tensor for tensor in tensors if matches(tensor.name, include)]
    if tensors and not found:
        raise unmatched_pattern_error(include, [tensor.name for tensor in tensors])
    return found


def matches(name: str, include: Sequence[str]) -> bool:
    """Return whether *name* matches one of the globs, or there are none."""
    return not include or any(fnmatchcase(name, glob) for glob in include)


def index_findings(catalog: Catalog) -> list[Finding]:
    """Return the findings about the index of *catalog*, without warnings."""
    findings = (*catalog.findings, *of_index(catalog))
    return [one for one in findings if one.severity != "warning"]


def _problems(findings: Iterable[Finding], catalog: Catalog) -> dict[str, Finding]:
    """Map findings to their texts, without those about unreadable tensors, which are notes."""
    return {_said(one): one for one in findings if not is_about_unread(one, catalog)}


def _said(finding: Finding) -> str:
    if finding.file and finding.file in finding.what:
        finding = replace(finding, file=None)
    why = f" ({finding.why})" if finding.why else ""
    return ": ".join(filter(None, (finding.what, finding.where))) + why


def describe(
    path: str, catalog: Catalog, measured: Mapping[str, Statistics], model_type: str | None = None
) -> Inspection:
    """Describe *catalog*, with the statistics in *measured* by tensor name."""
    held = stored(path, catalog, measured)
    if not catalog.tensors:
        return held
    catalog = strip_wrappers(catalog)
    known = recognize_model(catalog, request=ModelRequest(model_type))
    if held.dequantizable and not known.exact:
        with suppress(CkptError):  # tables contain the dequantized tensors
            catalog = replace(dequantize_catalog(catalog, "bfloat16"), notes=catalog.notes)
        known = recognize_model(catalog, request=ModelRequest(model_type))
    notes = Notes()
    findings, scope = ([], held.scope) if held.problems else check_model(known, notes)
    missing = notes.get_reasons("missing")
    wrong = [one for one in findings if one.severity != "warning"]
    named = [one for one in wrong if one.tensor not in missing]
    verdict = worst_verdict((held.verdict, decide_verdict(wrong)))
    complete = verdict is Verdict.COMPLETE
    return replace(
        held,
        model_type=known.model_type,
        candidates=known.candidates,
        layout=known.layout,
        root=known.root,
        parameters=sum(entry.numel for entry in known.tensors.values() if entry.alias_of is None),
        problems=(*held.problems, *map(_said, named)),
        findings=(*held.findings, *named),
        verdict=verdict,
        scope=scope,
        lacks=tuple(missing),
        notes=(
            *catalog.notes,
            *_unread(catalog),
            *(notes.get_texts() if complete else strip_structure_claim(notes.get_texts())),
            *(_said(one) for one in findings if one.severity == "warning"),
            *_fit(known, model_type),
        ),
    )


def _fit(known: Model, model_type: str | None) -> Iterable[str]:
    """Yield notes on where models are, and how well the keys fit the requested model type."""
    if known.inner_models:
        yield describe_locations(known)
    if model_type is None:
        return
    if not known.candidates:
        yield f"no layout of `{model_type}` has these keys"
    elif not known.exact:
        yield f"some keys do not belong to {' or '.join(known.evidence)}"


def stored(path: str, catalog: Catalog, measured: Mapping[str, Statistics]) -> Inspection:
    """Describe the contents of *catalog* without recognizing the model."""
    quantized, wrong = survey_leniently(catalog), index_findings(catalog)
    problems = _problems(wrong, catalog)
    notes = [*catalog.notes, *_unread(catalog)]
    if catalog.others and catalog.path.is_dir():
        notes.append(f"other files in this folder: {quote_names(list(catalog.others))}")
    return Inspection(
        path=path,
        format=catalog.format,
        nbytes=catalog.nbytes,
        dtypes=_dtypes(catalog.tensors.values()),
        files=catalog.files,
        problems=tuple(problems),
        findings=tuple(problems.values()),
        verdict=decide_verdict(wrong),
        read_failed=any(one.read_failed for one in catalog.findings),
        tensors=tuple(_tensor(entry, measured) for entry in catalog.tensors.values()),
        blobs=tuple(catalog.blobs),
        assets=catalog.assets,
        metadata=catalog.metadata,
        notes=tuple(notes),
        quantized=quantized.scheme_by_tensor,
        dequantizable=bool(quantized.weights) and quantized.is_fully_supported,
    )


def _unread(catalog: Catalog) -> Iterable[str]:
    """Yield a note for each reason why tensors cannot be read."""
    by_reason: dict[str, list[str]] = {}
    for entry in catalog.tensors.values():
        if entry.unsupported:
            by_reason.setdefault(entry.unsupported, []).append(entry.name)
    for why, names in by_reason.items():
        yield f"{quote_names(names)} cannot be read: {why}"


def _tensor(entry: TensorEntry, measured: Mapping[str, Statistics]) -> TensorInfo:
    return TensorInfo(
        entry.name,
        entry.dtype,
        entry.shape,
        entry.nbytes,
        len(entry.extents),
        entry.alias_of,
        measured.get(entry.alias_of or entry.name),
        entry.unsupported,
    )


def _dtypes(tensors: Iterable[TensorEntry]) -> dict[str, DTypeUse]:
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


def _measure(catalog: Catalog, include: Sequence[str], progress: Watch) -> dict[str, Statistics]:
    from ckptctl.storage.computed import open_reader  # only for --stats

    catalog = formats.resolve_codecs(catalog)
    names = {t.alias_of or t.name for t in catalog.tensors.values() if matches(t.name, include)}
    wanted = [
        entry for name, entry in catalog.tensors.items() if name in names and not entry.unsupported
    ]
    with open_reader(catalog) as files:
        return measured(files, wanted, progress, BINS)


def measured(
    files: Readable,
    entries: Sequence[TensorEntry],
    progress: Watch,
    bins: int,
    failed: Callable[[CkptError, TensorEntry], None] | None = None,
) -> dict[str, Statistics]:
    """Measure *entries*, whose extents must be ``raw``.

    This imports torch. Only the present part of a tensor with holes is measured. Tensors without
    numbers are skipped, and so are those with an error if *failed* is given, which receives the
    error.
    """
    sizes = [PASSES * sum(extent.nbytes for extent in entry.extents) for entry in entries]
    look = partial(measure, files, bins=bins)
    found: dict[str, Statistics] = {}
    with progress(sum(sizes)) as advance:
        for entry, statistics in side_by_side(entries, sizes, look, advance):
            if not isinstance(statistics, CkptError):
                found |= {entry.name: statistics} if statistics else {}
            elif failed is None:
                raise statistics
            else:
                failed(statistics, entry)
    return found


def _member(path: TreePath, parent: str | TreePath) -> Member:
    shown = str(parse_path(parent) / path.name)
    try:
        catalog = formats.open_checkpoint(path)
    except CkptError as error:
        failed = isinstance(error, StorageError)
        verdict = decide_verdict([finding_from_error(error)])
        return Member(shown, None, 0, 0, (error.summary,), verdict, failed)
    wrong = index_findings(catalog)
    problems = tuple(_problems(wrong, catalog))
    size = len(catalog.tensors), catalog.nbytes
    return Member(shown, catalog.format, *size, problems, decide_verdict(wrong))
