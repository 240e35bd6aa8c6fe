"""``ckptctl diff A B``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ckptctl.cli import options as opt
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.cli.tables import counted
from ckptctl.units import format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.difference import Difference, Side, TensorDifference

SCHEMA = "ckptctl.diff/1"
DIFFERENT = 1
SHOWN = 20
EPILOG = opt.examples(
    "ckptctl diff step-1000 step-2000",
    "ckptctl diff out-dcp tests/data/tiny-llama3-hf --only model",
    "ckptctl diff bf16 fp32 --ignore-dtype --atol 1e-3",
    "ckptctl diff a b --structure --json | jq .a.only",
)
HEADER = ("tensor", "differs in", "elements", "not finite", "max abs", "max rel")


def check_tolerance(value: float | None) -> float | None:
    """Refuse what is no finite number of 0 or more."""
    if value is not None and not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{value} is not a tolerance")
    return value


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", show_default=False, help="Checkpoint.")],
    b: Annotated[
        Path, typer.Argument(metavar="B", show_default=False, help="Checkpoint, mapped to A.")
    ],
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare names, shapes and dtypes alone.")
    ] = False,
    atol: Annotated[
        float | None,
        typer.Option(metavar="X", callback=check_tolerance, help="Let |a - b| be up to X."),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(metavar="X", callback=check_tolerance, help="Let |a - b| be up to X |b|."),
    ] = None,
    ignore_dtype: Annotated[
        bool, typer.Option("--ignore-dtype", help="Other dtypes with equal numbers are the same.")
    ] = False,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    only: Annotated[
        str,
        typer.Option(metavar="PART", callback=opt.check_only, help="all, or model alone."),
    ] = "all",
    read_all: Annotated[
        bool, typer.Option("--read-all", help="Compare bytes even where checksums are equal.")
    ] = False,
    format_a: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            callback=opt.check_readable,
            autocompletion=opt.readable_formats,
            help="Format of A, if not detected.",
        ),
    ] = None,
    format_b: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            callback=opt.check_readable,
            autocompletion=opt.readable_formats,
            help="Format of B, if not detected.",
        ),
    ] = None,
    layout_a: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="How A names its tensors, if not detected.")
    ] = None,
    layout_b: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="How B names its tensors, if not detected.")
    ] = None,
    model_type: opt.ModelType = None,
    converter: opt.Converter = None,
    sizes: opt.Set = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", callback=opt.check_positive, help="Threads that read."),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare two checkpoints, whatever their formats and layouts.

    Names, shapes, dtypes and values; B is mapped to the layout of A. Elements are equal when their
    bits are. The exit code is 0 when nothing differs and 1 when something does.
    """
    from ckptctl.ops import diff as op
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
        model_type=model_type,
        sizes=opt.sizes_of(sizes),
        jobs=jobs or 0,
    )
    found = op.diff(a, b, asked, partial(progress, output, "comparing"))
    _print(output, found)
    if not found.same:
        raise typer.Exit(DIFFERENT)


def _print(output: Output, found: Difference) -> None:
    if output.mode == "json":
        output.document(SCHEMA, found.to_json())
    elif output.mode == "quiet":
        for row in _lines(found):
            output.line(row[1])
    elif output.mode == "plain":
        output.table([*_lines(found), *_facts(found)])
    else:
        _print_for_people(output, found)


def _lines(found: Difference) -> Iterator[tuple[str, ...]]:
    """Yield all that differs."""
    for side, letter in ((found.a, "a"), (found.b, "b")):
        yield from ((f"only_{letter}", name) for name in side.only)
        yield from ((f"only_leaf_{letter}", name) for name in side.only_leaves)
    for one in found.tensors:
        yield ("tensor", *_row(one))
    for leaf in found.leaves:
        yield ("leaf", leaf.name, leaf.a, leaf.b)


def _facts(found: Difference) -> Iterator[tuple[str, str]]:
    yield "same", "yes" if found.same else "no"
    yield "compared", str(found.compared)
    yield "by_checksum", str(found.by_checksum)
    yield "within", str(found.within)
    yield "compared_leaves", str(found.compared_leaves)
    yield from (("note", note) for note in found.notes)


def _row(one: TensorDifference) -> tuple[str, ...]:
    kinds = {
        "shape": f"shape {list(one.shape_a)} {list(one.shape_b)}",
        "dtype": f"dtype {one.dtype_a} {one.dtype_b}",
        "values": "values",
    }
    what = ", ".join(kinds[kind] for kind in one.kinds)
    if one.values is None:
        return one.name, what, "", "", "", ""
    errors = one.values
    counts = f"{errors.differing:,} of {errors.count:,}", f"{errors.nonfinite:,}"
    return one.name, what, *counts, _number(errors.max_abs), _number(errors.max_rel)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _print_for_people(output: Output, found: Difference) -> None:
    output.line(_headline(found), "bold")
    for side, letter in ((found.a, "A"), (found.b, "B")):
        _names(output, f"only in {letter}", side.only)
        _names(output, f"only in {letter}, no tensors", side.only_leaves)
    if found.tensors:
        rows = [_row(one) for one in found.tensors[:SHOWN]]
        output.table([HEADER, *rows], right=(2, 3, 4, 5))
        _more(output, len(found.tensors))
    if found.leaves:
        output.table([("not a tensor", "A", "B")])
        output.table([(one.name, one.a, one.b) for one in found.leaves[:SHOWN]])
        _more(output, len(found.leaves))
    for line in _told(found):
        output.line(line, "dim")
    if found.a.only_leaves or found.b.only_leaves:
        output.hint("`--only model` compares the models alone")


def _names(output: Output, title: str, names: tuple[str, ...]) -> None:
    if names:
        output.line(f"{title}: {len(names):,}")
        for name in names[:SHOWN]:
            output.line(f"  {name}")
        _more(output, len(names))


def _more(output: Output, count: int) -> None:
    if count > SHOWN:
        output.line(f"  and {count - SHOWN:,} more; `--json` lists all")


def _headline(found: Difference) -> str:
    differing = len(found.tensors) + len(found.leaves)
    alone = sum(len(side.only) + len(side.only_leaves) for side in (found.a, found.b))
    parts = [f"{counted(differing, 'difference')}"] if differing else []
    parts += [f"{alone:,} in one of them alone"] if alone else []
    what = "the same structure" if found.structure else "the same"
    said = ", ".join(parts) if parts else what
    return f"{_named(found.a)} and {_named(found.b)}: {said}"


def _named(side: Side) -> str:
    layout = f", layout {side.layout}" if side.layout else ""
    return f"{side.path} ({side.format}{layout})"


def _told(found: Difference) -> Iterator[str]:
    yield f"compared: {counted(found.compared, 'tensor')}" + (
        f", {counted(found.compared_leaves, 'other leaf', 'other leaves')}"
        if found.compared_leaves
        else ""
    )
    if found.by_checksum:
        yield f"equal by recorded checksums: {counted(found.by_checksum, 'tensor')}"
    if found.bytes_read:
        yield f"read: {format_bytes(found.bytes_read)} of A, and as many elements of B"
    if found.within:
        yield f"different within the tolerances: {counted(found.within, 'tensor')}"
    for side, letter in ((found.a, "A"), (found.b, "B")):
        reasons = dict.fromkeys(side.left_out.values())
        for reason in reasons:
            count = sum(why == reason for why in side.left_out.values())
            yield f"left out of {letter}: {count:,}: {reason}"
    yield from found.notes


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diff", epilog=EPILOG, no_args_is_help=True)(diff)
