"""``ckptctl inspect PATH``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptctl.cli import checks, tables
from ckptctl.cli import options as opt
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.errors import ALTERNATIVES, SHOWN, UsageError, listed
from ckptctl.units import format_count

if TYPE_CHECKING:
    from ckptctl.ops.inspection.result import Inspection, TensorInfo
    from ckptctl.ops.inspection.tree import Order

SCHEMA = "ckptctl.inspect/1"
CANDIDATES = 12
"""Possible model types that a terminal shows."""
EPILOG = opt.examples(
    "ckptctl inspect llama-3-8b",
    "ckptctl inspect runs/llama                    (lists the checkpoints of a run)",
    "ckptctl inspect step-2000 --depth 2 --sort size",
    "ckptctl inspect step-2000 --tensors --include '*.q_proj.weight' --stats",
    "ckptctl inspect hf://org/model@main           (reads headers alone, like all URLs)",
    "ckptctl inspect step-2000 --json | jq .parameters",
)


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            parser=checks.place,
            metavar="PATH",
            show_default=False,
            help="Checkpoint, or a folder of checkpoints: path or URL.",
        ),
    ],
    from_format: opt.From = None,
    model_type: opt.ModelType = None,
    converter: opt.Converter = None,
    rules: opt.Rules = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor instead of the tree.")
    ] = False,
    include: opt.Include = None,
    depth: Annotated[
        int | None,
        typer.Option(
            metavar="N", callback=checks.positive, help="Sum up below N parts of the names."
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(metavar="ORDER", callback=checks.sort, help="name, or size: largest."),
    ] = "name",
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Read the data: min, max, mean, std, NaN, Inf, histogram."),
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a model card.")
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show what a checkpoint holds and whether it is whole.

    Reads the index alone, unless --stats asks for the values.
    """
    from ckptctl.ops.inspection import inspect as op

    del converter  # known while the command runs
    output = Output(json, quiet)
    globs = include or []
    watch = partial(progress, output, "reading")
    found = op.inspect(path, from_format, stats, globs, watch, model_type, rules)
    asked = {"--stats": stats, "--tensors": tensors, "--include": include, "--markdown": markdown}
    _require_one(found, [name for name, given in asked.items() if given])
    shown = op.select(found.tensors, globs)
    if json:
        output.document(SCHEMA, {**found.to_json(), "tensors": [t.to_json() for t in shown]})
    elif quiet:
        _print_names(output, found, shown)
    elif found.checkpoints:
        _print_run(output, found)
    elif markdown:
        from ckptctl.cli.markdown import markdown as lines

        for line in lines(found, shown, depth, cast("Order", sort)):
            output.line(line)
    else:
        if output.mode == "human" or not tensors:
            _print_summary(output, found)
        if tensors or stats:
            output.table(
                tables.listed_tensors(output, shown, sort, stats),
                right=tables.right_columns(output, stats),
            )
        else:
            output.table(tables.collapsed(output, shown, depth, cast("Order", sort)), right=[3])
        if found.dequantisable:
            start = shlex.join(["ckptctl", "convert", str(found.path)])
            output.hint(f"`{start} DST --to hf --dequantize bf16` makes plain weights of them")
    if not found.complete:
        output.warning(f"incomplete: {_first(found.problems)}")
        if not found.checkpoints:
            start = shlex.join(["ckptctl", "verify", str(found.path)])
            output.hint(f"`{start}` says what is missing, and where")


def _require_one(found: Inspection, asked: Sequence[str]) -> None:
    """Refuse a folder of checkpoints where something is asked that is said of one alone."""
    if found.checkpoints and asked:
        raise UsageError(
            f"`{asked[0]}` wants one checkpoint, and this folder holds several",
            where=found.path,
            hint=f"name one of them, such as `{found.checkpoints[-1].path}`",
        )


def _print_names(output: Output, found: Inspection, shown: Sequence[TensorInfo]) -> None:
    for name in [member.path for member in found.checkpoints] or [t.name for t in shown]:
        output.line(name)


def _print_run(output: Output, found: Inspection) -> None:
    if output.mode == "human":
        count = tables.counted(len(found.checkpoints), "checkpoint")
        output.line(f"{found.path}  run of {count}", "bold")
        output.line()
    rows = [
        (
            member.path,
            member.format or "unreadable",
            tables.size(output, member.nbytes) if member.format else "",
            "complete" if member.complete else f"incomplete: {_first(member.problems)}",
        )
        for member in found.checkpoints
    ]
    output.table(rows, right=[2])
    path = shlex.quote(str(found.path))
    output.hint(f"`ckptctl latest {path}` names the newest complete one, `ckptctl ls` their steps")


def _print_summary(output: Output, found: Inspection) -> None:
    if output.mode == "plain":
        output.fields(_fields(found))
        output.line()
        return
    output.line(f"{found.path}   {_headline(found)}", "bold")
    for problem in found.problems[:SHOWN]:
        output.line(f"  {problem}", "red")
    if len(found.problems) > SHOWN:
        output.line(f"  and {len(found.problems) - SHOWN:,} more")
    if len(found.candidates) > ALTERNATIVES:
        more = len(found.candidates) - CANDIDATES
        names = ", ".join(found.candidates[:CANDIDATES]) + (f" and {more} more" if more > 0 else "")
        output.line(f"  model type: {names}; `-m NAME` decides", "dim")
    for note in (*_quantised(found), *found.notes):
        output.line(f"  {note}", "dim")
    if found.blobs:
        output.line(f"  not tensors: {listed(found.blobs)}", "dim")
    output.line()


def _headline(found: Inspection) -> str:
    parts = [found.format, tables.model(found)]
    if found.layout and found.layout != found.format:
        parts.append(f"layout {found.layout}")
    if found.root:
        parts.append(f"under {found.root}")
    parts += [
        f"{format_count(found.parameters)} params",
        " + ".join(tables.short(name) for name in found.dtypes),
        tables.files(found),
        "complete" if found.complete else "incomplete",
    ]
    return " · ".join(part for part in parts if part)


def _fields(found: Inspection) -> Iterator[tuple[str, object]]:
    yield "path", found.path
    yield "format", found.format
    yield "model_type", found.model_type or ",".join(found.candidates) or "unknown model type"
    yield "layout", found.layout or "unknown"
    yield "root", found.root
    yield "parameters", found.parameters
    yield "dtypes", ",".join(tables.short(name) for name in found.dtypes)
    yield "bytes", found.nbytes
    yield "files", len(found.files)
    yield "tensors", len(found.tensors)
    yield "complete", "yes" if found.complete else "no"
    for how, count in Counter(found.quantised.values()).items():
        yield "quantised", f"{how}: {tables.counted(count, 'tensor')}"
    for problem in found.problems:
        yield "problem", problem
    for note in found.notes:
        yield "note", note


def _quantised(found: Inspection) -> Iterator[str]:
    for how, count in Counter(found.quantised.values()).items():
        yield f"quantised: {tables.counted(count, 'tensor')}, {how}"


def _first(problems: Sequence[str]) -> str:
    more = len(problems) - 1
    return problems[0] + (f" (and {more:,} more)" if more else "")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect", epilog=EPILOG, no_args_is_help=True)(inspect)
