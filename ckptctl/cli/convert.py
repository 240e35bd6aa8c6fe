"""``ckptctl convert SRC DST --to FORMAT``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import InPanel, RunOptions, command
from ckptctl.cli.output import Printer, Row, StoppedError, format_by_reason, group_by_reason
from ckptctl.cli.progress import show_progress
from ckptctl.cli.ranks import join_ranks, make_rank_printer
from ckptctl.cli.typed_paths import format_command_line, get_typed_words, restore_typed_paths
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import CkptError, PartialError, RefusedError, quote_names
from ckptctl.errors import format_command as suggested
from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.results import Result
from ckptctl.run_options import RunBatchOptions
from ckptctl.shared_options import Destination, Source
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, format_seconds, pluralize

if TYPE_CHECKING:
    from ckptctl.conversion.convert import ConversionPlan, ConversionResult
    from ckptctl.storage.outcome import OutOfRange

T = TypeVar("T")


@command(
    "ckptctl convert llama-3-8b out-dcp --to dcp",
    "ckptctl convert out-dcp out-meta --to meta --mp 2",
    "ckptctl convert out-meta out-hf --to hf --dtype bf16 --verify",
    "ckptctl convert out-dcp model.pt --to torch --dry-run",
    "ckptctl convert out-dcp out-titan --to dcp --to-layout torchtitan@0.3",
    "ckptctl convert deepseek-fp8 deepseek-bf16 --to hf --dequantize bf16",
    "ckptctl convert llama-3-8b llama-3-8b-fp8 --to hf --quantize fp8-block",
    "ckptctl convert s3://models/step-2000 hf://org/model --to hf",
    "ckptctl convert runs/llama runs/llama-hf --to hf --each --task 2/8 --resume",
    prints="ckptctl.conversion.plan:ConversionPlan | ckptctl.conversion.plan:ConversionResult, "
    "--each: ckptctl.verbs.run_conversion_result:RunConversionPlan | "
    "ckptctl.verbs.run_conversion_result:RunConversionResult",
)
def convert(
    src: Source,
    dst: Destination,
    options: ConversionOptions,
    run: RunOptions,
    batch: Annotated[RunBatchOptions, InPanel("Run")],
) -> None:
    """Convert a checkpoint to another format, layout or dtype.

    SRC is never changed. DST is published atomically, either complete or not at all. With --each,
    SRC is the folder of a run, and each of its checkpoints is converted to a folder in DST.
    """
    if batch.each:
        from ckptctl.cli.run_batches import convert_run  # only needed for runs

        convert_run("convert", src, dst, options, batch, run)
        return
    from ckptctl.conversion.convert import plan_conversion

    ranks = join_ranks(run.single_process, run.json)
    output = make_rank_printer(ranks, run.json, run.quiet)
    plan = make_plan(
        ranks, lambda: plan_conversion(src, dst, options), None if run.dry_run else dst
    )
    run_or_show_plan("convert", output, plan, dst, run, ranks)


def make_plan(ranks: RankCollectives, build_plan: Callable[[], T], dst: TreePath | None) -> T:
    """Build the plan on every rank, and raise on all if one rank fails.

    Rank 0 compares with a reference for all ranks.

    Args:
        ranks: Ranks that will execute the plan.
        build_plan: Function that builds the plan.
        dst: Destination. If the plan is refused, stale staging files next to it are removed. None
            if none are to be removed.
    """
    from ckptctl.conversion.recognition.references import plan_on_all_ranks
    from ckptctl.storage.publish import clean_up_if_refused

    with clean_up_if_refused(dst if ranks.rank == 0 else None):
        return plan_on_all_ranks(ranks, build_plan)


def run_or_show_plan(
    name: str,
    output: Printer,
    plan: ConversionPlan,
    dst: TreePath,
    options: RunOptions,
    ranks: RankCollectives,
    *extra_results: Result,
) -> None:
    """Execute *plan* and show the result. With ``--dry-run``, only show the plan.

    Args:
        name: Name of the command.
        output: Printer for plan, result and messages.
        plan: Plan to execute.
        dst: Destination as typed.
        options: Options of the execution, such as ``dry_run`` and ``yes``.
        ranks: Ranks that execute the plan.
        extra_results: Additional results for ``--json``.
    """
    output.print_statement(plan.statement)
    missing_error = _missing_items_error(plan, dst) if plan.missing else None
    if missing_error and ranks.rank == 0 and output.mode != "json":
        output.print_error(missing_error)
    for warning in plan.warnings:
        output.print_warning(warning)
    for note in plan.notes:
        output.print_note(note)
    if options.dry_run:
        output.print_answer(
            name,
            *(plan, *extra_results),
            names=(dst,),
            rows=_list_plan_rows(plan, dst),
            human=lambda: _show_plan(output, plan, dst),
        )
        obstacles = list(_list_obstacles(plan))
        for obstacle in obstacles:
            output.print_warning(obstacle)
    else:
        obstacles = []
        result = _run_plan(output, plan, dst, options.yes, ranks)
        output.print_answer(
            name,
            *(result, *extra_results),
            names=(dst,),
            rows=_list_result_rows(result, dst),
            human=lambda: _show_result(output, result, dst),
        )
    if missing_error and output.mode == "json" and ranks.rank == 0:
        raise missing_error
    if missing_error:  # already printed, except in JSON mode
        raise typer.Exit(missing_error.exit_code)
    if options.dry_run and not obstacles:
        output.print_hint(f"run it with `{format_command_line()}`")


def _run_plan(
    output: Printer, plan: ConversionPlan, dst: TreePath, yes: bool, ranks: RankCollectives
) -> ConversionResult:
    """Execute *plan*, asking the user first before an upload to the Hub or a restart."""
    from ckptctl.storage.unfinished import UnfinishedWorkError
    from ckptctl.storage.urls import is_hub_repository

    for line in (
        *format_by_reason("dropped", plan.dropped),
        *format_by_reason("skipped", plan.left_out),
    ):
        output.print_note(line)
    if plan.upload and is_hub_repository(str(plan.plan.target)):
        _confirm_upload(output, plan, dst, yes)
    try:
        result = _execute_plan(output, plan, ranks)
    except UnfinishedWorkError as error:
        _confirm_restart(output, error, ranks)
        restart = replace(plan.options, resume=False, restart=True)
        result = _execute_plan(output, replace(plan, options=restart), ranks)
    for note in result.notes:
        output.print_note(note)
    warn_out_of_range(output, result.out_of_range)
    return result


def _list_obstacles(plan: ConversionPlan) -> Iterator[str]:
    """Yield the reasons why executing the plan now would be refused."""
    from ckptctl.installed import INSTALL_TORCH, has_torch
    from ckptctl.storage.publish import UNFINISHED_MESSAGE, find_resumable_output

    if plan.nbytes > plan.free_bytes and not (plan.options.resume or plan.upload):
        yield "not enough disk space for the output; the conversion would be refused"
    unfinished_work = None if plan.upload else find_resumable_output(Path(plan.plan.target))
    if unfinished_work and not (plan.options.resume or plan.options.restart):
        yield (
            f"{UNFINISHED_MESSAGE}; the conversion would be refused without `--resume` or "
            "`--restart`"
        )
    if plan.arithmetic and not has_torch():
        yield f"torch is not installed; the conversion would be refused. {INSTALL_TORCH}"


def _confirm_upload(output: Printer, plan: ConversionPlan, dst: TreePath, yes: bool) -> None:
    """List the files to upload, and ask the user to confirm the upload if a prompt is possible.

    Raises:
        RefusedError: The user declined.
    """
    if output.mode != "json":
        output.print_to_stderr(f"files to upload to {dst}:")
        for path, nbytes in plan.files:
            output.print_to_stderr(f"  {path}  {format_bytes(nbytes)}")
    question = f"Upload {pluralize(len(plan.files), 'file')} to {dst}?"
    if output.can_prompt and not yes and not typer.confirm(question, err=True):
        raise RefusedError("nothing was uploaded", where=str(dst))


def _execute_plan(
    output: Printer, plan: ConversionPlan, ranks: RankCollectives
) -> ConversionResult:
    """Execute *plan*. On Ctrl-C, report how much work was kept and how to resume it."""
    from ckptctl.conversion.convert import run_conversion
    from ckptctl.storage.publish import find_resumable_output

    def describe_start() -> str:  # only called if progress is shown
        return "loading torch" if plan.arithmetic else ""

    ending = "verifying" if plan.options.verify else "syncing"
    try:
        with show_progress(output, "copying", plan.nbytes, ending, describe_start) as advance:
            return run_conversion(plan, advance, ranks)
    except KeyboardInterrupt:
        work = None if plan.upload else find_resumable_output(Path(plan.plan.target))
        if work is None:
            raise
        raise StoppedError(
            "interrupted",
            where=plan.plan.target,
            why=f"{format_bytes(work.nbytes)} of {format_bytes(plan.nbytes)} are written and kept",
            hint=f"resume with `{format_command_line('--resume', without='--restart')}`",
        ) from None


def _confirm_restart(output: Printer, error: CkptError, ranks: RankCollectives) -> None:
    """Ask whether to discard partial output, and raise *error* unless the user agrees."""
    if get_typed_words() and "--resume" not in get_typed_words():
        resumed, restarted = format_command_line("--resume"), format_command_line("--restart")
        error.hint = f"resume with `{resumed}`, or start over with `{restarted}`"
    if not output.can_prompt or ranks.world > 1:
        raise error
    output.print_to_stderr(f"{error.what}: {error.why}")
    if not typer.confirm("Discard the partial output and start over?", err=True):
        raise error


def _missing_items_error(plan: ConversionPlan, dst: TreePath) -> PartialError:
    """Build the error about items that are missing in the source, and therefore in the output."""
    reasons = [reason for reason, _ in group_by_reason(plan.missing)]
    noun = "item" if any(name in plan.source.blobs for name in plan.missing) else "tensor"
    count = pluralize(len(plan.missing), f"{noun} is", f"{noun}s are")
    return PartialError(
        f"the source is incomplete: {count} missing in `{dst}`",
        where=plan.source.path,
        why=f"{quote_names(list(plan.missing))}: {reasons[0]}"
        + (f"; and {pluralize(len(reasons) - 1, 'other reason')}" if reasons[1:] else ""),
        hint=f"run {suggested('verify', plan.source.path)} to see what is damaged, "
        "or pass `--json` to list all missing items",
    )


def _list_plan_rows(plan: ConversionPlan, dst: TreePath) -> Iterator[Row]:
    yield "dry_run", "yes"
    yield "target", dst
    yield "tensors", plan.tensors
    yield from _list_summary_rows(plan)
    yield "mapped", plan.mapped
    yield "bytes", plan.nbytes
    yield "free_bytes", plan.free_bytes
    yield "memory_bytes", plan.memory_bytes
    yield "threads", plan.threads
    yield "arithmetic", "yes" if plan.arithmetic else "no"
    yield from (("file", path, nbytes) for path, nbytes in plan.files)
    yield from (("dropped", key, why) for key, why in plan.dropped.items())
    yield from (("left_out", key, why) for key, why in plan.left_out.items())
    yield from (("missing", key, why) for key, why in plan.missing.items())
    yield from (("not_carried", key, why) for key, why in plan.not_carried.items())
    yield from (("quantized", key) for key in plan.quantized)


def _list_summary_rows(plan: ConversionPlan) -> Iterator[Row]:
    for name, amount in (("in", plan.summary.read), ("out", plan.summary.written)):
        yield name, amount.tensors, amount.nbytes
    yield from (("taken", key, source) for key, source in plan.taken.items())


def _show_plan(output: Printer, plan: ConversionPlan, dst: TreePath) -> None:
    total = format_bytes(plan.nbytes)
    output.print_line(
        f"would write {pluralize(len(plan.files), 'file')} ({total}) to {dst}", "bold"
    )
    output.print_first_rows(
        plan.files,
        lambda file: (f"  {file[0]}", format_bytes(file[1])),
        (tables.name_column(), tables.number_column()),
    )
    output.print_sentence(_format_counts(plan))
    reasons = {"dropped": plan.dropped, "skipped": plan.left_out, "missing": plan.missing}
    reasons |= (
        {f"taken from {restore_typed_paths(plan.base or '')}": dict.fromkeys(plan.taken, "")}
        if plan.taken
        else {}
    )
    for title, keys in reasons.items():
        _show_reasons(output, title, keys)
    requirements = [
        f"disk: {total} ({format_bytes(plan.free_bytes)} free)",
        f"peak memory: ~{format_bytes(plan.memory_bytes)}",
        f"threads: {plan.threads:,}",
        *(["arithmetic with torch"] if plan.arithmetic else []),
    ]
    output.print_sentence(" · ".join(requirements))


def _format_counts(plan: ConversionPlan) -> str:
    """Format the numbers of tensors that are read, written and changed, on one line."""
    moved = f"{plan.mapped:,} renamed or reordered" if plan.mapped else ""
    summary = plan.summary
    if not summary.changes:
        return summary.sentence + (f" ({moved})" if moved else "")
    return summary.sentence.removesuffix(")") + (f", {moved})" if moved else ")")


def _show_reasons(output: Printer, title: str, keys: Mapping[str, str]) -> None:
    for reason, names in group_by_reason(keys):
        count = f"{title} ({len(names):,})" if len(names) > 1 else title
        output.print_sentence(f"{count}: {reason}" if reason else count)
        output.print_first_rows(names, lambda name: (f"  {name}",), [tables.name_column()])


def warn_out_of_range(output: Printer, out_of_range: Mapping[str, OutOfRange]) -> None:
    """Warn about elements that became infinite, NaN or saturated, if there are any."""
    if out_of_range:
        from ckptctl.storage.outcome import describe_out_of_range

        output.print_warning(
            f"elements became infinite, NaN or saturated: {describe_out_of_range(out_of_range)}"
        )


def _list_result_rows(result: ConversionResult, dst: TreePath) -> Iterator[Row]:
    yield "target", dst
    yield "files", len(result.plan.files)
    yield from _list_summary_rows(result.plan)
    yield "bytes", result.nbytes
    yield "resumed_bytes", result.resumed_bytes
    yield "seconds", f"{result.seconds:.3f}"
    yield "verified", "yes" if result.verified else "no"
    yield from (("missing", key, why) for key, why in result.plan.missing.items())
    yield from (("out_of_range", key, n) for key, n in result.out_of_range.items())
    yield from (("rounding", key, n) for key, n in result.rounding.items())


def _show_result(output: Printer, result: ConversionResult, dst: TreePath) -> None:
    output.print_line(_format_summary(result, dst), "bold")
    if not result.plan.summary.is_unchanged:
        output.print_sentence(result.plan.summary.sentence)
    if result.rounding:
        from ckptctl.storage.outcome import describe_rounding

        output.print_sentence(describe_rounding(result.rounding))
    _show_reasons(output, "missing", result.plan.missing)


def _format_summary(result: ConversionResult, dst: TreePath) -> str:
    moved = result.nbytes - result.resumed_bytes
    parts = [
        f"wrote {dst}: {pluralize(len(result.plan.files), 'file')}",
        f"{format_bytes(result.nbytes)} in {format_seconds(result.seconds)}",
    ]
    if result.seconds > 0.5:
        parts.append(f"{format_bytes(int(moved / result.seconds))}/s")
    if result.resumed_bytes:
        parts.append(f"{format_bytes(result.resumed_bytes)} resumed")
    if result.verified:
        parts.append("verified")
    return ", ".join(parts)
