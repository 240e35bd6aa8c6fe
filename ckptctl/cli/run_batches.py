"""Output of commands that process the checkpoints of a run one by one (``--each``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import RunOptions
from ckptctl.cli.output import (
    VERDICT_STYLES,
    Printer,
    Row,
    StoppedError,
    format_by_reason,
)
from ckptctl.cli.progress import show_progress
from ckptctl.cli.ranks import count_ranks
from ckptctl.cli.tables import Column, StyledText
from ckptctl.cli.typed_paths import format_command_line
from ckptctl.errors import RefusedError, UsageError, format_option
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, format_seconds, pluralize

if TYPE_CHECKING:
    from ckptctl.conversion.conversion_options import ConversionOptions
    from ckptctl.run_options import RunBatchOptions
    from ckptctl.runs.selection import RunSelection
    from ckptctl.verbs.run_conversion_result import (
        ConvertedCheckpoint,
        PlannedCheckpoint,
        RunConversionPlan,
        RunConversionResult,
    )
    from ckptctl.verbs.run_verification import RunVerification, VerifiedCheckpoint
    from ckptctl.verbs.verification.verify_options import VerifyOptions

PLAN_COLUMNS = (
    Column("action"),
    tables.name_column("name", keep=24),
    tables.number_column("size"),
    tables.prose_column("why"),
)
RESULT_COLUMNS = (
    Column("status"),
    tables.name_column("name", keep=24),
    tables.number_column("size"),
    tables.name_column("target"),
    tables.prose_column("why"),
)


VERIFICATION_COLUMNS = (
    Column("verdict"),
    tables.name_column("name", keep=24),
    tables.number_column("size"),
    Column("data"),
    tables.prose_column("why"),
)


def _refuse_ranks(*, single_process: bool) -> None:
    """Raise if this process is one of several ranks."""
    if count_ranks() > 1 and not single_process:
        raise UsageError(
            f"{format_option('--each')} runs in a single process",
            why="the ranks of torchrun share the work on one checkpoint",
            hint=f"divide a run with {format_option('--task I/N')}, and pass "
            f"{format_option('--single-process')} inside such a job",
        )


def _print_selection(output: Printer, selection: RunSelection) -> None:
    """Print the task if the environment determines it, and entries that are not processed."""
    task = selection.task
    if task is not None and task.origin:
        output.print_statement(f"task {task.number} of {task.count} (from {task.origin})")
    for note in format_by_reason("skipped", selection.others):
        output.print_note(note)


def convert_run(
    name: str,
    root: TreePath,
    dst: TreePath,
    options: ConversionOptions,
    batch: RunBatchOptions,
    run: RunOptions,
) -> None:
    """Convert the checkpoints of a run, or show the plan, and exit with code 7 if any failed.

    Args:
        name: Name of the command.
        root: Folder of the run.
        dst: Destination as typed.
        options: Options of each conversion.
        batch: Options that select checkpoints.
        run: Options of the execution, such as ``dry_run``.
    """
    from ckptctl.verbs import run_conversion as op

    output = Printer(run.json, run.quiet)
    _refuse_ranks(single_process=run.single_process)
    plan = op.plan_conversions(root, dst, options, batch, os.environ)
    _print_selection(output, plan.selection)
    _print_statements(output, plan)
    if run.dry_run:
        _print_plan(output, name, plan)
        return
    if plan.is_hub_upload:
        _confirm_uploads(output, plan, dst, run.yes)
    done: list[ConvertedCheckpoint] = []

    def report(outcome: ConvertedCheckpoint) -> None:
        done.append(outcome)
        _print_outcome(output, outcome)

    try:
        result = op.run_conversions(plan, report, partial(show_progress, output))
    except KeyboardInterrupt:
        raise StoppedError(
            "interrupted",
            where=str(dst),
            why=f"processed {len(done):,} of {pluralize(len(plan.checkpoints), 'checkpoint')}",
            hint="resume with "
            f"`{format_command_line('--resume', *_list_task_words(plan), without='--restart')}`",
        ) from None
    if output.mode == "json":
        output.print_document(name, result)
    elif output.mode == "human":
        output.print_line(_format_result(result), "bold")
    result.require_complete()


def _print_statements(output: Printer, plan: RunConversionPlan) -> None:
    task = f"task {plan.task}: " if plan.task else ""
    output.print_statement(
        f"{task}{len(plan.checkpoints):,} of {pluralize(plan.total, 'checkpoint')} · "
        + ", ".join(f"{count:,} to {action}" for action, count in sorted(plan.counts.items()))
        + f" · {format_bytes(plan.nbytes)} to write"
        if plan.checkpoints
        else f"{task}no checkpoint is in this part"
    )
    statements = {
        item.statement: item.name for item in reversed(plan.checkpoints) if item.statement
    }
    for statement, first in reversed(statements.items()):
        output.print_statement(f"{statement}" if len(statements) == 1 else f"{first}: {statement}")
    for warning in plan.warnings:
        output.print_warning(warning)
    for note in plan.notes:
        output.print_note(note)


def _confirm_uploads(output: Printer, plan: RunConversionPlan, dst: TreePath, yes: bool) -> None:
    """Ask the user to confirm all uploads to the Hub, if a prompt is possible.

    Raises:
        RefusedError: The user declined.
    """
    count = pluralize(plan.counts.get("convert", 0), "checkpoint")
    question = f"Upload {count} ({format_bytes(plan.nbytes)}) to {dst}?"
    if output.can_prompt and not yes and not typer.confirm(question, err=True):
        raise RefusedError("nothing was uploaded", where=str(dst))


def _list_task_words(plan: RunConversionPlan) -> list[str]:
    """List the option for the task, if the environment determines it instead of an option."""
    task = plan.selection.task
    return [f"--task={task}"] if task is not None and task.origin else []


def _print_plan(output: Printer, name: str, plan: RunConversionPlan) -> None:
    """Print what a run would do, and raise if a checkpoint cannot be converted."""
    output.print_answer(
        name,
        plan,
        names=(item.target for item in plan.checkpoints if item.action in ("convert", "verify")),
        rows=(_make_plan_row(output, item) for item in plan.checkpoints),
        columns=PLAN_COLUMNS,
        human=lambda: _show_plan(output, plan),
    )
    plan.require_complete()
    output.print_hint(f"run it with `{format_command_line(*_list_task_words(plan))}`")


def _make_plan_row(output: Printer, item: PlannedCheckpoint) -> Row:
    nbytes = item.nbytes or item.checkpoint.entry.nbytes
    size = format_bytes(nbytes) if output.mode == "human" else str(nbytes)
    action = item.action.upper() if output.mode == "human" else item.action
    style = VERDICT_STYLES[item.checkpoint.verdict]
    reason = item.reason if item.action in ("convert", "verify") else StyledText(item.reason, style)
    return action, item.name, size, reason


def _show_plan(output: Printer, plan: RunConversionPlan) -> None:
    output.print_table((_make_plan_row(output, item) for item in plan.checkpoints), PLAN_COLUMNS)
    output.print_line(f"would write {format_bytes(plan.nbytes)} to {plan.destination}", "bold")


def _print_outcome(output: Printer, outcome: ConvertedCheckpoint) -> None:
    """Print one line for a checkpoint as soon as it is finished."""
    if output.mode == "quiet" and outcome.status in ("converted", "present"):
        output.print_line(str(outcome.planned.target))
    elif output.mode == "plain":
        output.print_table([_make_result_row(outcome)], RESULT_COLUMNS)
        output.header = False
    elif output.mode == "human":
        output.print_sentence(" · ".join(_list_outcome_facts(outcome)))
    if output.mode != "json":
        output.flush_answer()
    for warning in outcome.warnings:
        output.print_warning(f"{outcome.name}: {warning}")


def _make_result_row(outcome: ConvertedCheckpoint) -> Row:
    return (
        outcome.status,
        outcome.name,
        outcome.nbytes,
        outcome.planned.target,
        outcome.reason,
    )


def _list_outcome_facts(outcome: ConvertedCheckpoint) -> Iterator[str]:
    yield f"{outcome.name}: {outcome.status}"
    if outcome.status == "converted":
        yield f"{format_bytes(outcome.nbytes)} in {format_seconds(outcome.seconds)}"
    elif outcome.status == "present":
        yield f"{format_bytes(outcome.nbytes)} verified"
    if outcome.reason:
        yield outcome.reason


def _format_result(result: RunConversionResult) -> str:
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(result.counts.items()))
    return (
        f"{counts or 'no checkpoint'}; {format_bytes(result.nbytes)} written in "
        f"{format_seconds(result.seconds)}"
    )


def verify_run(
    root: TreePath,
    options: VerifyOptions,
    batch: RunBatchOptions,
    output: Printer,
    *,
    single_process: bool,
) -> None:
    """Verify the checkpoints of a run, and exit with code 7 if any did not pass."""
    from ckptctl.verbs import run_verification as op

    _refuse_ranks(single_process=single_process)

    def report(item: VerifiedCheckpoint) -> None:
        _print_item(output, item)

    selection = op.select_to_verify(root, options, batch, os.environ)
    _print_selection(output, selection)
    result = op.verify_checkpoints(selection, options, report, partial(show_progress, output))
    if output.mode == "json":
        output.print_document("verify", result)
    elif output.mode == "human":
        output.print_line(_format_verification(result), "bold")
    result.require_complete()


def _print_item(output: Printer, item: VerifiedCheckpoint) -> None:
    """Print one line for a checkpoint as soon as it is verified."""
    nbytes = item.checkpoint.entry.nbytes
    data = item.verification.data if item.verification else "not read"
    if output.mode == "quiet" and not item.is_success:
        output.print_line(f"{item.checkpoint.name}: {item.reason}")
    elif output.mode == "plain":
        row = (str(item.verdict), item.checkpoint.name, nbytes, data, item.reason)
        output.print_table([row], VERIFICATION_COLUMNS)
        output.header = False
    elif output.mode == "human":
        facts = (item.checkpoint.name, f"{item.verdict}", format_bytes(nbytes), f"data {data}")
        style = None if item.is_success else VERDICT_STYLES[item.verdict]
        output.print_sentence(" · ".join(filter(None, (*facts, item.reason))), style)
    if output.mode != "json":
        output.flush_answer()


def _format_verification(result: RunVerification) -> str:
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(result.counts.items()))
    checked = pluralize(len(result.checkpoints), "checkpoint")
    return f"{checked}: {counts or 'none'}; checked in {format_seconds(result.seconds)}"
