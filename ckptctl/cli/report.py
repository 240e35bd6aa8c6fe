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
from ckptctl.cli.progress import progress
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
    rows=False,
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
    found = op(path, options, partial(progress, output, "reading"))
    if json:
        output.document("report", found)
    elif target == STDOUT:
        output.text(build_page(found.to_json()).removesuffix("\n"))
    else:
        _print(output, found)
    if not found.readable:
        raise typer.Exit(found.verification.exit_code)
    if found.error:
        raise typer.Exit(found.error.exit_code)
    if found.verification.read_failed:
        raise typer.Exit(StorageError.exit_code)


def _print(output: Printer, found: Report) -> None:
    if output.mode == "quiet":
        output.line(str(found.output))
        return
    output.line(f"wrote {found.output}: {', '.join(_contents(found))}", "bold")
    left = found.left_out
    if left.tensors:
        count = pluralize(left.tensors, "tensor is", "tensors are")
        output.note(f"{count} not listed on the page (see `--max-tensors`)")
    if found.problem:
        output.warning(f"{found.verification.verdict}: {found.problem}")
    if found.error:
        output.warning(f"not compared: {found.error.what}")
    output.hint("open the page in a browser; it needs no other file and no network")


def _contents(found: Report) -> Iterator[str]:
    """Yield a summary of each part of the page."""
    yield pluralize(len(found.tensors), "tensor")
    yield found.verification.verdict
    if findings := len(found.verification.findings):
        yield pluralize(findings, "finding")
    if found.difference:
        both = (found.difference.a, found.difference.b)
        apart = sum(len(side.only) + len(side.only_leaves) for side in both)
        count = len(found.difference.tensors) + len(found.difference.leaves) + apart
        yield pluralize(count, "difference")
    if found.stats:
        yield "statistics"
