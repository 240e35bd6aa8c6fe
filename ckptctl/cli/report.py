"""``ckptctl report PATH -o report.html``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ckptctl.cli import checks
from ckptctl.cli import options as opt
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.cli.tables import counted
from ckptctl.errors import UsageError
from ckptctl.ops.report.options import MAX_TENSORS

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.ops.report.data import Report

STDOUT = "-"
EPILOG = opt.examples(
    "ckptctl report llama-3-8b -o report.html",
    "ckptctl report step-2000 -o report.html --stats",
    "ckptctl report step-1000 step-2000 -o changes.html",
    "ckptctl report step-2000 -o - > report.html",
    "ckptctl report step-2000 --json | jq '.tensors[] | select(.missing > 0)'",
)


def report(
    path: Annotated[
        Path,
        typer.Argument(parser=checks.place, metavar="PATH", show_default=False, help="Checkpoint."),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(
            parser=checks.place,
            metavar="OTHER",
            show_default=False,
            help="Show where it differs from this one.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page to write; - is standard output."
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the data: statistics and histograms.")
    ] = False,
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare names, shapes and dtypes alone.")
    ] = False,
    atol: opt.ATol = None,
    rtol: opt.RTol = None,
    ignore_dtype: opt.IgnoreDType = False,
    include: opt.Include = None,
    only: Annotated[
        str,
        opt.part("Compare all, or model alone."),
    ] = "all",
    max_tensors: Annotated[
        int,
        typer.Option(
            metavar="N",
            callback=checks.positive,
            help="List N at most: those with findings, then the largest.",
        ),
    ] = MAX_TENSORS,
    from_format: opt.From = None,
    from_other: Annotated[
        str | None,
        opt.source_format("Format of OTHER, if not detected.", "--from-other"),
    ] = None,
    weights: opt.Weights = None,
    weights_other: Annotated[
        str | None,
        opt.weights_of("Likewise of OTHER."),
    ] = None,
    tag: opt.Tag = None,
    tag_other: Annotated[
        str | None, typer.Option(metavar="NAME", help="Likewise of OTHER.")
    ] = None,
    model_type: opt.ModelType = None,
    converter: opt.Converter = None,
    rules: opt.Rules = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE if it is such a page.")
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write one HTML page about a checkpoint.

    What it holds, where it lies, what is wrong, and where another one differs. The page needs no
    network and no other file. A checkpoint that is not whole has a page, too; the exit code is 4
    or 9 only if nothing of it can be read, or OTHER cannot be compared.
    """
    from ckptctl import api
    from ckptctl.ops.report.page import SCHEMA, page

    del converter  # known while the command runs
    output = Output(json, quiet or target == STDOUT)
    _require_sense(target, json)
    found = api.report(
        path,
        None if target in (None, STDOUT) else target,
        other=other,
        stats=stats,
        structure=structure,
        atol=atol,
        rtol=rtol,
        ignore_dtype=ignore_dtype,
        include=include or (),
        only=cast(Literal["model", "all"], only),
        max_tensors=max_tensors,
        format=from_format,
        format_other=from_other,
        weights=cast("Weights | None", weights),
        weights_other=cast("Weights | None", weights_other),
        tag=tag,
        tag_other=tag_other,
        model_type=model_type,
        rules=rules,
        overwrite=overwrite,
        progress=partial(progress, output, "reading"),
    )
    if json:
        output.document(SCHEMA, found.to_json())
    elif target == STDOUT:
        output.text(page(found.to_json()))
    else:
        _print(output, found)
    if not found.readable:
        raise typer.Exit(found.verification.exit_code)
    if found.error:
        raise typer.Exit(found.error.exit_code)


def _require_sense(target: str | None, json: bool) -> None:
    if target is None and not json:
        raise UsageError("nothing says where the page goes", hint="add `-o report.html`")
    if target == STDOUT and json:
        raise UsageError(
            "--json and -o - both want standard output", hint="name a file, or leave `-o -` out"
        )


def _print(output: Output, found: Report) -> None:
    if output.mode == "quiet":
        output.line(str(found.output))
        return
    output.line(f"wrote {found.output}: {counted(len(found.tensors), 'tensor')}", "bold")
    left = found.left_out
    if left.tensors:
        verb = "is" if left.tensors == 1 else "are"
        output.note(f"{counted(left.tensors, 'tensor')} {verb} not listed in it")
    if not found.verification.whole:
        first, *more = (*found.verification.errors, *found.verification.unknown)
        others = f" (and {len(more):,} more)" if more else ""
        output.warning(f"{found.verification.verdict}: {first.what}{others}")
    if found.error:
        output.warning(f"not compared: {found.error.what}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", epilog=EPILOG, no_args_is_help=True)(report)
