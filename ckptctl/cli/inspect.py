"""``ckptctl inspect PATH``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptctl.cli import options as opt
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.dtypes import BY_NAME
from ckptctl.errors import SHOWN, listed
from ckptctl.units import format_bytes, format_count, natural_key

if TYPE_CHECKING:
    from ckptctl.ops.inspect import Inspection, TensorInfo
    from ckptctl.ops.tree import Branch, Order
    from ckptctl.storage.statistics import Statistics

SCHEMA = "ckptctl.inspect/1"
EPILOG = opt.examples(
    "ckptctl inspect tests/data/tiny-llama3-hf",
    "ckptctl inspect runs/llama                    (lists the checkpoints of a run)",
    "ckptctl inspect step-2000 --depth 2 --sort size",
    "ckptctl inspect step-2000 --tensors --include '*.wq.weight' --stats",
    "ckptctl inspect step-2000 --json | jq .parameters",
)


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", show_default=False, help="Checkpoint, or a folder of checkpoints."
        ),
    ],
    from_format: opt.From = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor instead of the tree.")
    ] = False,
    include: opt.Include = None,
    depth: Annotated[
        int | None,
        typer.Option(
            metavar="N", callback=opt.check_positive, help="Sum up below N parts of the names."
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(metavar="ORDER", callback=opt.check_sort, help="name, or size: largest."),
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
    from ckptctl.ops import inspect as op

    output = Output(json, quiet)
    globs = include or []
    found = op.inspect(path, from_format, stats, globs, partial(progress, output, "reading"))
    shown = op.select(found.tensors, globs)
    if json:
        output.document(SCHEMA, {**found.to_json(), "tensors": [t.to_json() for t in shown]})
    elif quiet:
        _print_names(output, found, shown)
    elif found.checkpoints:
        _print_run(output, found)
    elif markdown:
        _print_markdown(output, found, shown, depth, cast("Order", sort))
    else:
        if output.mode == "human" or not tensors:
            _print_summary(output, found)
        if tensors or stats:
            output.table(_flat(output, shown, sort, stats), right=_flat_right(output, stats))
        else:
            output.table(_tree(output, shown, depth, cast("Order", sort)), right=[3])
    if not found.complete:
        output.warning(f"incomplete: {_first(found.problems)}")


def _print_names(output: Output, found: Inspection, shown: Sequence[TensorInfo]) -> None:
    for name in [member.path for member in found.checkpoints] or [t.name for t in shown]:
        output.line(name)


def _print_run(output: Output, found: Inspection) -> None:
    if output.mode == "human":
        count = _counted(len(found.checkpoints), "checkpoint")
        output.line(f"{found.path}  run of {count}", "bold")
        output.line()
    rows = [
        (
            member.path,
            member.format or "unreadable",
            _size(output, member.nbytes),
            "complete" if member.complete else f"incomplete: {_first(member.problems)}",
        )
        for member in found.checkpoints
    ]
    output.table(rows, right=[2])


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
    for note in found.notes:
        output.line(f"  {note}", "dim")
    if found.blobs:
        output.line(f"  not tensors: {listed(found.blobs)}", "dim")
    output.line()


def _headline(found: Inspection) -> str:
    parts = [found.format, _model(found)]
    if found.layout and found.layout != found.format:
        parts.append(f"layout {found.layout}")
    if found.root:
        parts.append(f"under {found.root}")
    parts += [
        f"{format_count(found.parameters)} params",
        " + ".join(_short(name) for name in found.dtypes),
        _files(found),
        "complete" if found.complete else "incomplete",
    ]
    return " · ".join(part for part in parts if part)


def _model(found: Inspection) -> str:
    return found.model_type or " or ".join(found.candidates) or "unknown model type"


def _files(found: Inspection) -> str:
    count = len(found.files)
    return f"{format_bytes(found.nbytes)} in {count:,} file" + ("" if count == 1 else "s")


def _fields(found: Inspection) -> Iterator[tuple[str, object]]:
    yield "path", found.path
    yield "format", found.format
    yield "model_type", _model(found)
    yield "layout", found.layout or "unknown"
    yield "root", found.root
    yield "parameters", found.parameters
    yield "dtypes", ",".join(_short(name) for name in found.dtypes)
    yield "bytes", found.nbytes
    yield "files", len(found.files)
    yield "tensors", len(found.tensors)
    yield "complete", "yes" if found.complete else "no"
    for problem in found.problems:
        yield "problem", problem
    for note in found.notes:
        yield "note", note


def _tree(
    output: Output, shown: Sequence[TensorInfo], depth: int | None, sort: Order
) -> list[tuple[str, ...]]:
    from ckptctl.ops import tree

    branches = tree.walk(tree.build(shown, sort, depth))
    if output.mode == "human":
        return [_indented(nesting, branch) for nesting, _, _, branch in branches]
    return [
        (
            label,
            _short(branch.dtype) if branch.dtype else _counted(branch.tensors * outer, "tensor"),
            str(list(branch.shape)) if branch.dtype else "",
            str(branch.copies * outer),
            str(branch.nbytes * outer),
        )
        for _, label, outer, branch in branches
        if branch.dtype or not branch.children
    ]


def _indented(nesting: int, branch: Branch) -> tuple[str, ...]:
    label = "  " * nesting + branch.label
    if branch.dtype is None:
        each = branch.tensors // branch.copies
        times = f" x {branch.copies:,}" if branch.copies > 1 else ""
        return label, _counted(each, "tensor") + times, "", format_bytes(branch.nbytes)
    times = f" x {branch.copies:,}" if branch.copies > 1 else ""
    tied = (f"tied to {branch.alias_of}",) if branch.alias_of else ()
    shape = f"{list(branch.shape)}{times}"
    return label, shape, _short(branch.dtype), format_bytes(branch.nbytes), *tied


def _flat(
    output: Output, shown: Sequence[TensorInfo], sort: str, stats: bool
) -> list[tuple[str, ...]]:
    ordered = sorted(shown, key=lambda t: (-t.nbytes if sort == "size" else 0, natural_key(t.name)))
    header = ("name", "dtype", "shape", "bytes", *(_STATISTICS if stats else ()))
    rows = [
        (
            tensor.name,
            _short(tensor.dtype),
            str(list(tensor.shape)),
            _size(output, tensor.nbytes),
            *(_numbers(tensor.statistics) if stats else ()),
        )
        for tensor in ordered
    ]
    return [header, *rows] if output.mode == "human" else rows


_STATISTICS = ("min", "max", "mean", "std", "nan", "inf", "histogram")
_BARS = "▁▂▃▄▅▆▇█"


def _flat_right(output: Output, stats: bool) -> list[int]:
    return [3, *(range(4, 10) if stats else ())] if output.mode == "human" else []


def _numbers(statistics: Statistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ("-",) * len(_STATISTICS)
    values = (statistics.minimum, statistics.maximum, statistics.mean, statistics.std)
    return (
        *("-" if value is None else f"{value:.4g}" for value in values),
        str(statistics.nan),
        str(statistics.inf),
        bars(statistics.histogram),
    )


def bars(histogram: Sequence[int]) -> str:
    """Return *histogram* as one character per bin; an empty bin is a dot."""
    top = max(histogram, default=0)
    scale = len(_BARS) - 1
    return "".join(_BARS[round(scale * count / top)] if count else "." for count in histogram)


def _print_markdown(
    output: Output,
    found: Inspection,
    shown: Sequence[TensorInfo],
    depth: int | None,
    sort: Order,
) -> None:
    from ckptctl.ops import tree

    for name, value in (
        ("Format", found.format),
        ("Model type", _model(found)),
        ("Parameters", f"{format_count(found.parameters)} ({found.parameters:,})"),
        (
            "Types",
            ", ".join(f"{_short(n)} ({u.tensors:,} tensors)" for n, u in found.dtypes.items()),
        ),
        ("Size", _files(found)),
    ):
        output.line(f"- **{name}:** {_cell(value)}")
    output.line()
    output.line("| tensor | shape | dtype | copies | size |")
    output.line("| --- | --- | --- | ---: | ---: |")
    for _, label, outer, branch in tree.walk(tree.build(shown, sort, depth)):
        if branch.dtype or not branch.children:
            shape = str(list(branch.shape)) if branch.dtype else _counted(branch.tensors, "tensor")
            dtype = _short(branch.dtype) if branch.dtype else ""
            cells = (_code(label), shape, dtype, f"{branch.copies * outer:,}")
            size = format_bytes(branch.nbytes * outer)
            output.line(f"| {' | '.join(cells)} | {size} |")


def _cell(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in text)


def _code(name: str) -> str:
    # Inside a table a bar ends the cell even in code, and a backtick ends the code.
    return f"`{name}`" if not {"`", "|"} & set(name) else _cell(name)


def _short(dtype: str) -> str:
    return BY_NAME[dtype].short if dtype in BY_NAME else dtype


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _size(output: Output, nbytes: int) -> str:
    return format_bytes(nbytes) if output.mode == "human" else str(nbytes)


def _first(problems: Sequence[str]) -> str:
    more = len(problems) - 1
    return problems[0] + (f" (and {more:,} more)" if more else "")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect", epilog=EPILOG, no_args_is_help=True)(inspect)
