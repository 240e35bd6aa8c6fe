"""Conversion of the checkpoints of a run, one by one, each to a destination of its own.

Nothing but the destinations and the run itself coordinates tasks. An interrupted run is repeated
with the same command. Destinations that hold the planned output are skipped
(:mod:`ckptctl.verbs.existing_output`).
"""

from __future__ import annotations

import re
import time as clock
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from ckptctl import families, formats
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.convert import plan_conversion, run_conversion
from ckptctl.conversion.destinations import is_replaceable
from ckptctl.conversion.plan import ConversionPlan, ConversionResult
from ckptctl.errors import (
    CkptError,
    RefusedError,
    StorageError,
    UsageError,
    format_option,
    quote_names,
)
from ckptctl.remote.hub_branches import create_branch
from ckptctl.run_options import SelectionOptions
from ckptctl.runs.health import Checkpoint
from ckptctl.runs.names import parse_name, parse_staged_name
from ckptctl.runs.selection import select_checkpoints
from ckptctl.storage.destinations import (
    Replaceable,
    check_target,
    destination_exists_error,
    resolve_destination,
)
from ckptctl.storage.outcome import describe_out_of_range
from ckptctl.storage.paths import expand_home, make_comparable, parse_path
from ckptctl.storage.publish import (
    UNFINISHED_MESSAGE,
    clean_up_if_refused,
    find_resumable_output,
    remove_stale_staging,
)
from ckptctl.storage.threads import Advance
from ckptctl.storage.urls import is_hub_repository
from ckptctl.tree import TreePath, UrlPath
from ckptctl.units import pluralize
from ckptctl.verbs.existing_output import (
    Mismatch,
    find_existing_output,
    find_mismatch,
    fingerprint_source,
)
from ckptctl.verbs.run_conversion_result import (
    ConvertedCheckpoint,
    PlannedCheckpoint,
    RunConversionPlan,
    RunConversionResult,
)
from ckptctl.verbs.run_log import append_to_log, read_recorded_source
from ckptctl.verdict import Verdict

NAME_FIELD, STEP_FIELD = "{name}", "{step}"
"""Fields of a destination that are replaced by the name and the step of a checkpoint."""
StartItem = Callable[[str, int], AbstractContextManager[Advance | None]]
"""Starts the progress display of an activity for a number of bytes."""


# --- plan ---------------------------------------------------------------------------------------


def plan_conversions(
    root: str | TreePath,
    dst: str | TreePath,
    options: ConversionOptions,
    selection_options: SelectionOptions,
    environment: Mapping[str, str],
) -> RunConversionPlan:
    """Plan the conversion of the checkpoints of a run, without writing anything.

    Args:
        root: Folder of the run.
        dst: Folder of the outputs, or a path or URL in which ``{name}`` or ``{step}`` is replaced.
        options: Options of each conversion.
        selection_options: Options that select checkpoints.
        environment: Environment variables that select the task of a job array, if any.

    Raises:
        CkptError: The run, the options or the destination are not usable. Errors of a single
            checkpoint are in the plan.
    """
    source, destination = parse_path(root), expand_home(parse_path(dst))
    formats.get_writable_format(options.to)
    with families.use_converter_file(options.converter):
        selection = select_checkpoints(source, selection_options, environment)
    _require_destination(source, selection.selected, destination)
    _require_template_for_files(destination, options)
    _require_different_targets(selection.selected, destination)
    planned = tuple(
        _plan_checkpoint(checkpoint, _build_target(destination, checkpoint), options)
        for checkpoint in selection.checkpoints
    )
    return RunConversionPlan(selection, destination, options, planned)


def _require_destination(
    root: TreePath, checkpoints: Sequence[Checkpoint], destination: TreePath
) -> None:
    """Raise if outputs could be mistaken for checkpoints of the run, or be written into one."""
    folder, run = map(make_comparable, (_get_folder(destination), root))
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise UsageError("expected a folder, found a file", where=str(destination))
    hint = "choose a new folder next to the run or elsewhere"
    if folder == run:
        raise RefusedError("the destination is the run itself", where=str(destination), hint=hint)
    if isinstance(folder, Path) and folder.is_dir() and (sniffed := formats.sniff_formats(folder)):
        raise RefusedError(
            "the destination is a checkpoint, not a folder of checkpoints",
            where=str(destination),
            why=", ".join(f"{name}: {evidence}" for name, evidence in sniffed.items()),
            hint="choose another folder",
        )
    entry_name = next(iter(folder.relative_to(run).parts), "") if _contains(run, folder) else ""
    if (
        parse_name(entry_name)
        or parse_staged_name(entry_name)
        or any(_contains(make_comparable(item.path), folder) for item in checkpoints)
    ):
        raise RefusedError(
            "the destination is inside a checkpoint of the run",
            where=str(destination),
            why=f"ckptctl never writes into a source ({root})",
            hint=hint,
        )


def _contains(folder: TreePath, path: TreePath) -> bool:
    """Return whether *path* is *folder* or inside it."""
    return isinstance(path, type(folder)) and path.is_relative_to(folder)


def _require_template_for_files(destination: TreePath, options: ConversionOptions) -> None:
    """Raise unless the destination states the suffix of outputs that are single files."""
    if formats.get_writable_format(options.to).single_file and not _has_field(destination):
        raise UsageError(
            f"{format_option(f'--to {options.to}')} writes a file for each checkpoint",
            where=str(destination),
            hint=f"pass a destination such as `{destination}/{NAME_FIELD}.pt`",
        )


def _require_different_targets(checkpoints: Sequence[Checkpoint], destination: TreePath) -> None:
    """Raise if two checkpoints, possibly of different tasks, have the same destination."""
    names: dict[str, str] = {}
    for checkpoint in checkpoints:
        if checkpoint.entry.is_staging:  # never converted
            continue
        target = _build_target(destination, checkpoint)
        other = names.setdefault(str(make_comparable(target)), checkpoint.name)
        if other != checkpoint.name:
            raise UsageError(
                "two checkpoints have the same destination",
                where=str(target),
                why=f"{quote_names([other, checkpoint.name])}",
                hint=f"use {NAME_FIELD} in the destination, or select one of them with "
                f"{format_option('--steps')}",
            )


def _has_field(destination: TreePath) -> bool:
    return any(field in str(destination) for field in (NAME_FIELD, STEP_FIELD))


def _get_folder(destination: TreePath) -> TreePath:
    """Return the deepest folder of *destination* that has no field."""
    while _has_field(destination) and destination.parent != destination:
        destination = destination.parent
    return destination


def _build_target(destination: TreePath, checkpoint: Checkpoint) -> TreePath:
    """Return the destination of *checkpoint*, whose name loses the suffix ``.ckpt`` of a file."""
    name = checkpoint.name.removesuffix(".ckpt") or checkpoint.name
    if not _has_field(destination):
        return destination / name
    fields = {NAME_FIELD: name, STEP_FIELD: str(checkpoint.step)}
    text = destination.url if isinstance(destination, UrlPath) else str(destination)
    text = re.sub("|".join(map(re.escape, fields)), lambda match: fields[match[0]], text)
    if isinstance(destination, UrlPath):
        return UrlPath(destination.tree, text)
    return parse_path(text)


def _plan_checkpoint(
    checkpoint: Checkpoint, target: TreePath, options: ConversionOptions
) -> PlannedCheckpoint:
    """Plan the conversion of one checkpoint, whose error, if any, is in the result."""
    if reason := _find_skip_reason(checkpoint, options):
        return PlannedCheckpoint(checkpoint, target, "skip", reason)
    try:
        exists = find_existing_output(target) is not None
        plan = _plan_probe(checkpoint, target, options) if exists else None
        plan = plan or plan_conversion(checkpoint.path, target, options)
    except (CkptError, OSError) as caught:
        error = _to_error(caught, target)
        return PlannedCheckpoint(checkpoint, target, "fail", error.summary, error=error)
    unfinished = None if plan.upload else find_resumable_output(Path(target))
    reason = ""
    if exists:
        reason = "the destination exists; it is skipped if it is this conversion"
    elif unfinished and not (options.resume or options.restart):
        reason = f"{UNFINISHED_MESSAGE}; pass {format_option('--resume')}"
    return PlannedCheckpoint(
        checkpoint,
        target,
        "verify" if exists else "convert",
        reason,
        nbytes=plan.nbytes,
        tensors=plan.tensors,
        tensor_bytes=sum(tensor.nbytes for tensor in plan.output),
        model_type=plan.model_type,
        statement=plan.statement,
        notes=plan.notes,
        warnings=plan.warnings,
    )


def _find_skip_reason(checkpoint: Checkpoint, options: ConversionOptions) -> str:
    """Return the reason to skip a checkpoint, or an empty string if it is to be converted."""
    is_unstable = checkpoint.writing or checkpoint.entry.is_staging
    # With these options, the conversion itself determines whether everything it needs is there.
    completed = options.allow_missing or options.fill_from or options.include or options.exclude
    described = options.from_format or options.model_type or options.rules or options.ranks
    is_unknown = checkpoint.verdict is Verdict.UNKNOWN
    if checkpoint.complete or (not is_unstable and (completed or (is_unknown and described))):
        return ""
    return f"{checkpoint.state}: {checkpoint.problem}" if checkpoint.problem else checkpoint.state


def _plan_probe(
    checkpoint: Checkpoint, target: TreePath, options: ConversionOptions
) -> ConversionPlan:
    """Plan the conversion as if *target* were free, to compare an existing output with it."""
    if not isinstance(target, UrlPath):
        target = target.with_name(f".{target.stem}.ckptctl-planned{target.suffix}")
    return plan_conversion(checkpoint.path, target, replace(options, resume=False, restart=False))


def _to_error(error: CkptError | OSError, path: TreePath) -> CkptError:
    if isinstance(error, CkptError):
        return error
    return StorageError.from_os_error(error, "access", error.filename or path)


# --- execution ----------------------------------------------------------------------------------


def run_conversions(
    plan: RunConversionPlan,
    report: Callable[[ConvertedCheckpoint], None],
    start_item: StartItem,
) -> RunConversionResult:
    """Convert the checkpoints of *plan* one by one. A failure does not stop the others.

    Args:
        plan: Plan from :func:`plan_conversions`.
        report: Called with the outcome of each checkpoint.
        start_item: Starts the progress display for each checkpoint.
    """
    start = clock.monotonic()
    outcomes = []
    folder = None if isinstance(plan.destination, UrlPath) else _get_folder(plan.destination)
    for number, planned in enumerate(plan.checkpoints, 1):
        label = f"{planned.name} ({number} of {len(plan.checkpoints)})"
        begin = clock.monotonic()
        try:
            outcome = _run_checkpoint(plan, planned, folder, label, start_item)
        except (CkptError, OSError) as caught:
            error = _to_error(caught, planned.target)
            outcome = ConvertedCheckpoint(planned, "failed", error.summary, error=error)
        outcome = replace(outcome, seconds=clock.monotonic() - begin)
        if folder is not None and (problem := append_to_log(Path(folder), plan.task, outcome)):
            outcome = replace(outcome, warnings=(*outcome.warnings, problem))
        outcomes.append(outcome)
        report(outcome)
    return RunConversionResult(plan, tuple(outcomes), clock.monotonic() - start)


def _run_checkpoint(
    plan: RunConversionPlan,
    planned: PlannedCheckpoint,
    folder: TreePath | None,
    label: str,
    start_item: StartItem,
) -> ConvertedCheckpoint:
    if planned.action == "skip":
        return ConvertedCheckpoint(planned, "skipped", planned.reason)
    options, target = plan.options, planned.target
    existing = _compare_existing_output(plan, planned, folder, label, start_item)
    if isinstance(existing, ConvertedCheckpoint):
        return existing
    # At a URL, the conversion itself decides, because it can resume an incomplete upload.
    if isinstance(existing, Mismatch) and not options.overwrite and isinstance(target, Path):
        is_file = formats.get_writable_format(options.to).single_file
        raise _unknown_output_error(target, existing, is_file=is_file)
    try:
        if isinstance(target, UrlPath) and is_hub_repository(target.url):
            create_branch(target.url)
        with clean_up_if_refused(target):
            conversion = plan_conversion(planned.checkpoint.path, target, options)
        with start_item(f"copying {label}", conversion.nbytes) as advance:
            result = run_conversion(conversion, advance)
    except RefusedError as error:
        # Another task may have converted this checkpoint in the meantime.
        again = _compare_existing_output(plan, planned, folder, label, start_item)
        if isinstance(again, ConvertedCheckpoint):
            return again
        if isinstance(existing, Mismatch) and not options.overwrite:
            unknown = f"it is not known to be this conversion: {existing.why}"
            error.why = "; ".join(filter(None, (error.why, unknown)))
        raise
    return _describe_conversion(planned, conversion, result)


def _describe_conversion(
    planned: PlannedCheckpoint, conversion: ConversionPlan, result: ConversionResult
) -> ConvertedCheckpoint:
    warnings = list(result.notes)
    if result.out_of_range:
        lost = describe_out_of_range(result.out_of_range)
        warnings.append(f"elements became infinite, NaN or saturated: {lost}")
    missing = len(result.missing)
    return ConvertedCheckpoint(
        planned,
        "converted",
        f"{pluralize(missing, 'item is', 'items are')} missing in the source" if missing else "",
        nbytes=result.nbytes,
        missing=missing,
        warnings=tuple(warnings),
        digest=conversion.plan.digest,
        source_fingerprint=fingerprint_source(conversion),
    )


def _compare_existing_output(
    plan: RunConversionPlan,
    planned: PlannedCheckpoint,
    folder: TreePath | None,
    label: str,
    start_item: StartItem,
) -> ConvertedCheckpoint | Mismatch | None:
    """Return the outcome of a checkpoint whose destination holds its conversion.

    Return the reason if an existing output is not known to be the conversion, or None if there is
    no output.
    """
    existing = find_existing_output(planned.target)
    if existing is None:
        return None
    probe = _plan_probe(planned.checkpoint, planned.target, plan.options)
    recorded = read_recorded_source(folder, planned) if folder is not None else None
    mismatch = find_mismatch(
        probe, existing, recorded, lambda nbytes: start_item(f"verifying {label}", nbytes)
    )
    if mismatch is not None:
        return mismatch
    _remove_leftovers(planned.target)
    missing = len(probe.missing)
    return ConvertedCheckpoint(
        planned,
        "present",
        f"{pluralize(missing, 'item is', 'items are')} missing in the source" if missing else "",
        nbytes=probe.nbytes,
        missing=missing,
        digest=probe.plan.digest,
        source_fingerprint=fingerprint_source(probe),
    )


def _unknown_output_error(target: Path, mismatch: Mismatch, *, is_file: bool) -> RefusedError:
    """Build the error for an output of unknown origin, or raise if it can never be replaced."""
    replaceable = Replaceable(is_replaceable, is_file=is_file)
    check_target(target, overwrite=True, is_checkpoint=replaceable)
    error = destination_exists_error(target, replaceable)
    error.what = "the destination exists, but is not known to be this conversion"
    error.why = mismatch.why
    return error


def _remove_leftovers(target: TreePath) -> None:
    """Remove the staging directory of a run that was killed after it published *target*."""
    if not isinstance(target, UrlPath):
        with suppress(CkptError):
            remove_stale_staging(resolve_destination(Path(target)))
