"""``ckptctl diff A B``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from ckptctl.cli import checks, completion
from ckptctl.cli import options as opt
from ckptctl.cli.differences import show
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress

SCHEMA = "ckptctl.diff/1"
DIFFERENT = 1
WEIGHTS = "master (fp32 copies of the optimizer) or module, where {} has both."
ROOT = "What stands before the model's names in {}, if not detected."
EPILOG = opt.examples(
    "ckptctl diff step-1000 step-2000",
    "ckptctl diff out-dcp llama-3-8b --only model",
    "ckptctl diff bf16 fp32 --ignore-dtype --atol 1e-3",
    "ckptctl diff zero zero --weights-a master --weights-b module --ignore-dtype --atol 1e-2",
    "ckptctl diff a b --structure --json | jq .a.only",
)


def diff(
    a: Annotated[
        Path,
        typer.Argument(parser=checks.place, metavar="A", show_default=False, help="Checkpoint."),
    ],
    b: Annotated[
        Path,
        typer.Argument(
            parser=checks.place, metavar="B", show_default=False, help="Checkpoint, mapped to A."
        ),
    ],
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare names, shapes and dtypes alone.")
    ] = False,
    atol: opt.ATol = None,
    rtol: opt.RTol = None,
    ignore_dtype: opt.IgnoreDType = False,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    only: Annotated[
        str,
        opt.part("all, or model alone."),
    ] = "all",
    read_all: Annotated[
        bool, typer.Option("--read-all", help="Compare bytes even where checksums are equal.")
    ] = False,
    format_a: Annotated[
        str | None,
        opt.source_format("Format of A, if not detected."),
    ] = None,
    format_b: Annotated[
        str | None,
        opt.source_format("Format of B, if not detected."),
    ] = None,
    layout_a: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            autocompletion=completion.layouts,
            help="How A names its tensors, if not detected.",
        ),
    ] = None,
    layout_b: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            autocompletion=completion.layouts,
            help="How B names its tensors, if not detected.",
        ),
    ] = None,
    weights_a: Annotated[
        str | None,
        opt.weights_of(WEIGHTS.format("A")),
    ] = None,
    weights_b: Annotated[
        str | None,
        opt.weights_of(WEIGHTS.format("B")),
    ] = None,
    tag_a: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which save, where A holds several.")
    ] = None,
    tag_b: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which save, where B holds several.")
    ] = None,
    root_a: Annotated[str | None, typer.Option(metavar="PREFIX", help=ROOT.format("A"))] = None,
    root_b: Annotated[str | None, typer.Option(metavar="PREFIX", help=ROOT.format("B"))] = None,
    rules: opt.Rules = None,
    dequantize: opt.Dequantize = None,
    model_type: opt.ModelType = None,
    converter: opt.Converter = None,
    sizes: opt.Set = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", callback=checks.positive, help="Threads that read."),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare two checkpoints, whatever their formats and layouts.

    Names, shapes, dtypes and values; B is mapped to the layout of A. Elements are equal when their
    bits are. The exit code is 0 when nothing differs and 1 when something does.
    """
    from ckptctl import dtypes
    from ckptctl.ops.comparison import diff as op
    from ckptctl.storage.errors_between import Tolerance

    del converter  # known while the command runs
    output = Output(json, quiet)
    some = atol is not None or rtol is not None
    asked = op.DiffOptions(
        structure=structure,
        tolerance=Tolerance(atol or 0.0, rtol or 0.0) if some else None,
        ignore_dtype=ignore_dtype,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        only=cast(Literal["model", "all"], only),
        checksums=not read_all,
        format_a=format_a,
        format_b=format_b,
        layout_a=layout_a,
        layout_b=layout_b,
        weights_a=cast(op.Weights, weights_a),
        weights_b=cast(op.Weights, weights_b),
        tag_a=tag_a,
        tag_b=tag_b,
        root_a=root_a,
        root_b=root_b,
        rules=rules,
        dequantize=dtypes.parse(dequantize) if dequantize else None,
        model_type=model_type,
        sizes=checks.sizes_of(sizes),
        jobs=jobs or 0,
    )
    found = op.diff(a, b, asked, partial(progress, output, "comparing"))
    if output.mode == "json":
        output.document(SCHEMA, found.to_json())
    else:
        show(output, found)
    if not found.same:
        raise typer.Exit(DIFFERENT)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diff", epilog=EPILOG, no_args_is_help=True)(diff)
