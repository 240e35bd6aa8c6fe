"""``ckptctl report PATH``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptctl.cli.commands import Json, Quiet, command
from ckptctl.cli.output import Printer
from ckptctl.cli.progress import show_progress
from ckptctl.errors import StorageError, UsageError
from ckptctl.shared_options import Checkpoint
from ckptctl.units import pluralize
from ckptctl.verbs.report.report_options import STDOUT, ReportOptions

if TYPE_CHECKING:
    from ckptctl.verbs.report.data import Report


@command(
    "ckptctl report llama-3-8b                (writes llama-3-8b-report.html here)",
    "ckptctl report step-2000 -o report.html --stats",
    "ckptctl report step-1000 step-2000 -o changes.html",
    "ckptctl report step-2000 -o - > report.html",
    "ckptctl report step-2000 --json | jq '.findings[].what'",
    prints="ckptctl.verbs.report.data:Report",
    has_rows=False,
)
def report(
    path: Checkpoint, options: ReportOptions, json: Json = False, quiet: Quiet = False
) -> None:
    """Write an HTML report about a checkpoint.

    Shows its contents, files and problems, and the differences to OTHER. The page is self-contained
    and needs no network. Incomplete checkpoints are reported as well. The exit code is 4 or 9 only
    if nothing can be read or OTHER cannot be compared.
    """
    from ckptctl.verbs.report.gather import write_report as op
    from ckptctl.verbs.report.page import build_page

    target = options.output
    output = Printer(json, quiet or target == STDOUT)
    if target is None and not json:
        paths = (path, options.other)
        names = [Path(path).name or Path(path).absolute().name for path in paths if path]
        page_name = "-".join([*filter(None, names), "report"]) + ".html"
        options = replace(options, output=Path(page_name))
    if target == STDOUT:
        if json:
            raise UsageError(
                "`--json` conflicts with `-o -`",
                why="both write to standard output",
                hint="pass `-o FILE`",
            )
        options = replace(options, output=None)
    result = op(path, options, partial(show_progress, output, "reading"))
    if json:
        output.print_document("report", result)
    elif target == STDOUT:
        output.print_text(build_page(result.to_json()).removesuffix("\n"))
    else:
        _show_result(output, result)
    if not result.readable:
        raise typer.Exit(result.verification.exit_code)
    if result.error:
        raise typer.Exit(result.error.exit_code)
    if result.verification.read_failed:
        raise typer.Exit(StorageError.exit_code)


def _show_result(output: Printer, result: Report) -> None:
    if output.mode == "quiet":
        output.print_line(str(result.output))
        return
    output.print_line(f"wrote {result.output}: {', '.join(_list_contents(result))}", "bold")
    omitted = result.left_out
    if omitted.tensors:
        count = pluralize(omitted.tensors, "tensor is", "tensors are")
        output.print_note(f"{count} not listed on the page (see `--max-tensors`)")
    if result.problem:
        output.print_warning(f"{result.verification.verdict}: {result.problem}")
    if result.error:
        output.print_warning(f"not compared: {result.error.what}")
    output.print_hint("open the page in a browser; it needs no other file and no network")


def _list_contents(result: Report) -> Iterator[str]:
    """Yield a one-line summary of each section of the page."""
    yield pluralize(len(result.tensors), "tensor")
    yield result.verification.verdict
    if findings := len(result.verification.findings):
        yield pluralize(findings, "finding")
    if result.difference:
        both = (result.difference.a, result.difference.b)
        one_sided = sum(len(side.only) + len(side.only_leaves) for side in both)
        count = len(result.difference.tensors) + len(result.difference.leaves) + one_sided
        structure_only = " in structure; data not read" if result.difference.structure else ""
        differences = f"{pluralize(count, 'difference')}{structure_only}"
        yield differences if count or result.difference.same else result.difference.verdict
    if result.stats:
        yield "statistics"
