"""All that the page of a report shows, and the file that is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl import families, formats
from ckptctl.catalog import Catalog, Finding, is_computed
from ckptctl.errors import MappingError, UsageError
from ckptctl.ops.destinations import require_destination
from ckptctl.ops.inspection.inspect import describe, select, stored
from ckptctl.ops.inspection.result import Inspection, TensorInfo
from ckptctl.ops.report.data import LeftOut, Report, TensorReport
from ckptctl.ops.report.options import ReportOptions
from ckptctl.ops.report.page import GENERATOR, page
from ckptctl.ops.report.sections import ChunkMaps, compared, ranks_of, values
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.ops.verification.result import Verification, unsaid
from ckptctl.ops.verification.verify import examine
from ckptctl.ops.watch import Watch, unwatched
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.file_system import write_file
from ckptctl.storage.paths import shown
from ckptctl.storage.publish import staging
from ckptctl.units import natural

if TYPE_CHECKING:
    from ckptctl.storage.statistics import Statistics


MAX_FINDINGS = 1_000


def report(path: str | Path, options: ReportOptions, progress: Watch = unwatched) -> Report:
    """Gather what is known of a checkpoint and write a page about it.

    A checkpoint that is not whole has a page, too; of one whose index cannot be read the page says
    why.
    """
    output = Path(options.output) if options.output else None
    other = options.other
    if other is None:
        _require_no_comparison(options)
    sources = [one for one in (path, other) if one]
    with (
        families.using(options.converter),
        written(output, sources, options.overwrite) as write,
    ):
        found = _gathered(path, options, progress, paired=other is not None)
        if other is not None:
            found = compared(found, str(other), options, progress)
        found = replace(found, output=str(output) if output else None)
        write(found)
    return found


def _require_no_comparison(options: ReportOptions) -> None:
    said = {
        "--structure": options.structure,
        "--atol or --rtol": options.tolerance,
        "--only": options.only != "all",
        "--ignore-dtype": options.ignore_dtype,
        "--from-other": options.format_other,
        "--weights-other": options.weights_other,
        "--tag-other": options.tag_other,
    }
    for name, value in said.items():
        if value:
            raise UsageError(f"{name} needs a second checkpoint", hint="name it after the first")


def _gathered(path: str | Path, options: ReportOptions, progress: Watch, *, paired: bool) -> Report:
    verified, catalog = _examined(path, options, paired=paired)
    if catalog is None:
        return _report(verified, None, (), LeftOut(), (), options)
    inspected, note = _described(shown(path), catalog, options)
    chosen = _chosen(select(inspected.tensors, options.include), verified, options)
    if options.stats:
        names = [tensor.name for tensor in chosen]
        measured, wrong = values(catalog, names, progress)
        verified = replace(verified, findings=_joined(verified.findings, wrong))
        chosen = [_with(tensor, measured) for tensor in chosen]
    maps = ChunkMaps()
    tensors = tuple(
        TensorReport(t, maps.map(catalog.tensors[t.name], catalog.lost.get(t.name, ())))
        for t in chosen
    )
    listed = {tensor.info.name for tensor in tensors}
    rest = [tensor for tensor in inspected.tensors if tensor.name not in listed]
    nbytes = sum(tensor.nbytes for tensor in rest if tensor.alias_of is None)
    left = LeftOut(len(rest), nbytes, maps.chunks, maps.holes)
    verified = replace(verified, notes=(*verified.notes, *note))
    return _report(verified, inspected, tensors, left, _unusable(catalog), options)


def _examined(
    path: str | Path, options: ReportOptions, *, paired: bool
) -> tuple[Verification, Catalog | None]:
    """Verify a checkpoint; rules that it has no use for may be meant for the other one."""
    asked = VerifyOptions(
        format=options.format,
        model_type=options.model_type,
        weights=options.weights,
        tag=options.tag,
        rules=options.rules,
    )
    try:
        return examine(path, asked)
    except UsageError:
        if options.rules is None or not paired:
            raise
        return examine(path, replace(asked, rules=None))


def _unusable(catalog: Catalog) -> tuple[str, ...]:
    """Return the files that are not among those of *catalog* and that parts should lie in."""
    lost = (file for boxes in catalog.lost.values() for _, file in boxes)
    real = (e.file for t in catalog.tensors.values() for e in t.extents if not is_computed(e.file))
    return tuple(natural({*lost, *real} - set(catalog.files)))


def _report(
    verified: Verification,
    inspected: Inspection | None,
    tensors: tuple[TensorReport, ...],
    left: LeftOut,
    unusable: tuple[str, ...],
    options: ReportOptions,
) -> Report:
    listed = min(len(verified.findings), MAX_FINDINGS)
    return Report(
        path=verified.path,
        verification=verified,
        inspection=inspected,
        tensors=tensors,
        findings=listed,
        left_out=replace(left, findings=len(verified.findings) - listed),
        unusable=unusable,
        ranks=ranks_of((*verified.files, *unusable)),
        stats=options.stats,
    )


def _described(
    path: str, catalog: Catalog, options: ReportOptions
) -> tuple[Inspection, tuple[str, ...]]:
    """Describe *catalog*; where the model in it cannot be told, say so."""
    try:
        return describe(path, catalog, {}, options.model_type), ()
    except MappingError as error:
        why = f": {error.why}" if error.why else ""
        return replace(stored(path, catalog, {}), parameters=catalog.numel), (f"{error.what}{why}",)


def _chosen(
    tensors: Sequence[TensorInfo], verified: Verification, options: ReportOptions
) -> list[TensorInfo]:
    """Return as many tensors as there is room for: what is wrong first, then the largest."""
    if len(tensors) <= options.max_tensors:
        return list(tensors)
    wrong = {finding.tensor for finding in verified.findings}
    order = sorted(tensors, key=lambda tensor: (tensor.name not in wrong, -tensor.nbytes))
    kept = {tensor.name for tensor in order[: options.max_tensors]}
    return [tensor for tensor in tensors if tensor.name in kept]


def _with(tensor: TensorInfo, measured: Mapping[str, Statistics]) -> TensorInfo:
    return replace(tensor, statistics=measured.get(tensor.alias_of or tensor.name))


def _joined(known: Sequence[Finding], more: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings, errors first, without those that say the same of the same file."""
    return tuple(sorted((*known, *unsaid(known, more)), key=lambda found: found.severity))


Write = Callable[[Report], None]
HEAD = 1024


@contextmanager
def written(output: Path | None, sources: Sequence[str | Path], overwrite: bool) -> Iterator[Write]:
    """Hold the place of a page outside of the *sources*; what it yields writes and publishes it."""
    if output is None:
        yield lambda _: None
        return
    target = output
    for source in sources:
        target = require_destination(formats.existing(source), output, overwrite, PAGE).path
    with staging(target, overwrite=overwrite, single_file=True, is_checkpoint=PAGE) as stage:

        def write(found: Report) -> None:
            content = page(found.to_json()).encode()
            require_space(stage.data, len(content))
            write_file(stage.data / target.name, content)
            stage.publish()

        yield write


def is_report(path: Path) -> bool:
    """Return whether *path* is a page that this module wrote, the one thing that it replaces."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(HEAD)


PAGE = Replaceable(is_report, "a page of `ckptctl report`", file=True)
