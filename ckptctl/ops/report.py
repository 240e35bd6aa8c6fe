"""Everything that a page about a checkpoint shows: what it holds, where it lies, what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.catalog import Catalog, Finding, is_computed
from ckptctl.errors import MappingError
from ckptctl.ops.inspect import describe, select, stored
from ckptctl.ops.inspection import Inspection, TensorInfo
from ckptctl.ops.report_chunks import ChunkMaps, ranks_of
from ckptctl.ops.report_data import LeftOut, Report, TensorReport
from ckptctl.ops.report_difference import compared
from ckptctl.ops.report_file import written
from ckptctl.ops.report_options import ReportOptions
from ckptctl.ops.report_values import measured
from ckptctl.ops.verification import Verification
from ckptctl.ops.verify import VerifyOptions, examine
from ckptctl.ops.watch import Watch, unwatched
from ckptctl.storage.remote_path import shown
from ckptctl.units import natural

if TYPE_CHECKING:
    from ckptctl.storage.statistics import Statistics

__all__ = ["Report", "ReportOptions", "report"]
MAX_FINDINGS = 1_000


def report(
    path: str | Path,
    output: Path | None,
    other: str | Path | None,
    options: ReportOptions,
    progress: Watch = unwatched,
) -> Report:
    """Gather what is known of a checkpoint and write a page about it.

    A checkpoint that is not whole has a page, too; of one whose index cannot be read the page says
    why.

    Args:
        path: A directory or a file.
        output: The page; None: write none.
        other: A second checkpoint to compare it with.
        options: What goes into it.
        progress: Called with the bytes that are going to be read; see :data:`Watch`.

    Raises:
        SourceNotFoundError: One of them does not exist.
        FormatError: One of them is not a checkpoint that ckptctl reads.
        RefusedError: The page exists, or lies inside a checkpoint.
        MappingError: No tensor matches the globs.
    """
    with written(output, [one for one in (path, other) if one], options.overwrite) as write:
        found = _gathered(path, options, progress)
        if other is not None:
            found = compared(found, str(other), options, progress)
        found = replace(found, output=str(output) if output else None)
        write(found)
    return found


def _gathered(path: str | Path, options: ReportOptions, progress: Watch) -> Report:
    asked = VerifyOptions(options.format, model_type=options.model_type, rules=options.rules)
    verified, catalog = examine(path, asked)
    if catalog is None:
        return _report(verified, None, (), LeftOut(), (), options)
    inspected, note = _described(shown(path), catalog, options)
    chosen = _chosen(select(inspected.tensors, options.include), verified, options)
    if options.stats:
        names = [tensor.name for tensor in chosen]
        values, wrong = measured(catalog, names, progress)
        verified = replace(verified, findings=_joined(verified.findings, wrong))
        chosen = [_with(tensor, values) for tensor in chosen]
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


def _with(tensor: TensorInfo, values: Mapping[str, Statistics]) -> TensorInfo:
    return replace(tensor, statistics=values.get(tensor.alias_of or tensor.name))


def _joined(known: Sequence[Finding], more: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings, errors first, without those that say the same of the same file."""
    said = {(found.what, found.why, found.file) for found in known}
    new = [found for found in more if (found.what, found.why, found.file) not in said]
    return tuple(sorted((*known, *new), key=lambda found: found.severity))
