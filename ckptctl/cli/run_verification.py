"""Output of ``ckptctl verify RUN --each``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptctl.cli import tables
from ckptctl.cli.output import VERDICT_STYLES, Printer
from ckptctl.cli.progress import show_progress
from ckptctl.cli.run_conversion import find_printed_task
from ckptctl.cli.tables import Column
from ckptctl.runs.run_options import RunBatchOptions
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, format_seconds, pluralize
from ckptctl.verbs.verification.verify_options import VerifyOptions

if TYPE_CHECKING:
    from ckptctl.verbs.run_verification import RunVerification, VerifiedCheckpoint

COLUMNS = (
    Column("verdict"),
    tables.name_column("name", keep=24),
    tables.number_column("size"),
    Column("data"),
    tables.prose_column("why"),
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

    task = find_printed_task(batch, output, single_process=single_process)

    def report(item: VerifiedCheckpoint) -> None:
        _print_item(output, item)

    result = op.verify_checkpoints(
        root, options, batch, task, report, partial(show_progress, output)
    )
    if output.mode == "json":
        output.print_document("verify", result)
    elif output.mode == "human":
        output.print_line(_format_result(result), "bold")
    result.require_complete()


def _print_item(output: Printer, item: VerifiedCheckpoint) -> None:
    """Print one line for a checkpoint as soon as it is verified."""
    nbytes = item.checkpoint.entry.nbytes
    data = item.verification.data if item.verification else "not read"
    if output.mode == "quiet" and not item.is_success:
        output.print_line(f"{item.checkpoint.name}: {item.reason}")
    elif output.mode == "plain":
        row = (str(item.verdict), item.checkpoint.name, nbytes, data, item.reason)
        output.print_table([row], COLUMNS)
        output.header = False
    elif output.mode == "human":
        facts = (item.checkpoint.name, f"{item.verdict}", format_bytes(nbytes), f"data {data}")
        style = None if item.is_success else VERDICT_STYLES[item.verdict]
        output.print_sentence(" · ".join(filter(None, (*facts, item.reason))), style)
    if output.mode != "json":
        output.flush_answer()


def _format_result(result: RunVerification) -> str:
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(result.counts.items()))
    checked = pluralize(len(result.checkpoints), "checkpoint")
    return f"{checked}: {counts or 'none'}; checked in {format_seconds(result.seconds)}"
