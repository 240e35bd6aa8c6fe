"""``ckptctl diff A B``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import Output, Row, told
from ckptctl.cli.progress import progress
from ckptctl.cli.tables import Column
from ckptctl.ops.comparison.options import DiffOptions
from ckptctl.ops.option_checks import place
from ckptctl.options import Argument
from ckptctl.units import counted, format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.comparison.result import Difference, Side, TensorDifference

DIFFERENT = 1
SHOWN = 20
COLUMNS = (
    tables.name("tensor"),
    Column("differs in"),
    tables.number("elements", drop=4),
    tables.number("not finite", drop=3),
    tables.number("max abs"),
    tables.number("max rel", drop=2),
    Column("worst at", drop=1),
)
LEAVES = (tables.name("not a tensor"), tables.prose("A"), tables.prose("B"))


@command(
    "ckptctl diff step-1000 step-2000",
    "ckptctl diff out-dcp llama-3-8b --only model",
    "ckptctl diff bf16 fp32 --ignore-dtype --atol 1e-3",
    "ckptctl diff zero zero --weights-a master --weights-b module --ignore-dtype --atol 1e-2",
    "ckptctl diff a b --structure --json | jq .a.only",
    prints="ckptctl.ops.comparison.result:Difference",
)
def diff(
    a: Annotated[
        Path, Argument("First checkpoint: a directory, file or URL.", metavar="A", check=place)
    ],
    b: Annotated[
        Path,
        Argument(
            "Second checkpoint, which is mapped to the layout of A.", metavar="B", check=place
        ),
    ],
    options: DiffOptions,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints of any format and layout.

    Names, shapes, dtypes and values are compared, and B is mapped to the layout of A. Elements are
    equal if their bits are equal. The data of both is read. The exit code is 0 if nothing differs
    and 1 if something does. With --quick or --structure, 0 does not cover data that was not read.
    """
    from ckptctl.ops.comparison import diff as op

    output = Output(json, quiet, header=not no_header)
    found = op.diff(a, b, options, partial(progress, output, "comparing"))
    lines = list(_lines(found))
    gap = [("",)] if lines else []
    output.answer(
        "diff",
        found,
        names=(row[1] for row in lines),
        columns=(Column("kind"), *COLUMNS) if lines else (),
        rows=(*lines, *gap, *_facts(found)),
        human=lambda: show(output, found),
    )
    if found.same is False:
        raise typer.Exit(DIFFERENT)


def _lines(found: Difference) -> Iterator[tuple[str, ...]]:
    """Yield all that differs."""
    for side, letter in ((found.a, "a"), (found.b, "b")):
        yield from ((f"only_{letter}", name) for name in side.only)
        yield from ((f"only_leaf_{letter}", name) for name in side.only_leaves)
    for one in found.tensors:
        yield ("tensor", *_row(one, found, repr))
    for leaf in found.leaves:
        yield ("leaf", leaf.name, leaf.a, leaf.b)


def _facts(found: Difference) -> Iterator[Row]:
    yield "same", {True: "yes", False: "no", None: "unknown"}[found.same]
    yield "verdict", found.verdict
    yield "evidence", found.evidence
    yield "compared", found.compared
    yield "by_checksum", found.by_checksum
    yield "within", found.within
    yield "compared_leaves", found.compared_leaves
    yield "bytes_read_a", found.a.bytes_read
    yield "bytes_read_b", found.b.bytes_read
    yield from (("note", note) for note in (*_left_out(found), *found.notes))


def _row(
    one: TensorDifference, found: Difference, number: Callable[[float], str]
) -> tuple[str, ...]:
    kinds = {
        "shape": f"shape {list(one.shape_a)} {list(one.shape_b)}",
        "dtype": f"dtype {one.dtype_a} {one.dtype_b}",
        "values": "values",
    }
    what = ", ".join(kinds[kind] for kind in one.kinds)
    if one.values is None:
        elements = f"0 of {math.prod(one.shape_a):,}" if _equal_numbers(one, found) else ""
        return one.name, what, elements, "", "", "", ""
    errors = one.values
    unknown = "-" if found.bitwise else f"{errors.nonfinite:,}"
    counts = f"{errors.differing:,} of {errors.count:,}", unknown
    worst = "-" if errors.worst is None else str(list(errors.worst))
    largest = ("-" if x is None else number(x) for x in (errors.max_abs, errors.max_rel))
    return one.name, what, *counts, *largest, worst


def _equal_numbers(one: TensorDifference, found: Difference) -> bool:
    """Return whether the dtype alone differs, and the numbers were compared."""
    return one.kinds == ("dtype",) and not found.structure and not one.has_several_dtypes


def _in_short(value: float) -> str:
    return f"{value:.3g}"


def show(output: Output, found: Difference) -> None:
    """Print how two checkpoints differ, the worst first."""
    output.sentence(_headline(found), "bold")
    for side, letter in ((found.a, "A"), (found.b, "B")):
        _names(output, f"only in {letter}", side.only)
        _names(output, f"only in {letter}, no tensors", side.only_leaves)
    if found.tensors:
        rows = [_row(one, found, _in_short) for one in found.tensors[:SHOWN]]
        if not any(one.values and one.values.nonfinite for one in found.tensors):
            rows = [(*row[:3], "", *row[4:]) for row in rows]
        output.table(rows, COLUMNS)
        _more(output, len(found.tensors))
    if found.leaves:
        output.table([(one.name, one.a, one.b) for one in found.leaves[:SHOWN]], LEAVES)
        _more(output, len(found.leaves))
    for line in _told(found):
        output.sentence(line, "dim")
    if found.a.only_leaves or found.b.only_leaves:
        output.hint("`--only model` compares the models alone")
    if any(_equal_numbers(one, found) for one in found.tensors):
        output.hint("`--ignore-dtype` takes equal numbers of another dtype for the same")


def _names(output: Output, title: str, names: tuple[str, ...]) -> None:
    if names:
        output.line(f"{title}: {len(names):,}")
        output.table([(f"  {name}",) for name in names[:SHOWN]], [tables.name()])
        _more(output, len(names))


def _more(output: Output, count: int) -> None:
    if count > SHOWN:
        output.line(f"  and {count - SHOWN:,} more; `--json` lists all")


def _headline(found: Difference) -> str:
    differing = len(found.tensors) + len(found.leaves)
    alone = sum(len(side.only) + len(side.only_leaves) for side in (found.a, found.b))
    parts = [f"{counted(differing, 'difference')}"] if differing else []
    parts += [f"{alone:,} in one of them alone"] if alone else []
    said = ", ".join(parts) if parts else found.verdict
    return f"{_named(found.a)} and {_named(found.b)}: {said}"


def _named(side: Side) -> str:
    layout = f", layout {side.layout}" if side.layout else ""
    return f"{side.path} ({side.format}{layout})"


def _told(found: Difference) -> Iterator[str]:
    leaves = f", {counted(found.compared_leaves, 'other value')}" if found.compared_leaves else ""
    if found.structure:
        leaves = f", names of {counted(found.compared_leaves, 'other value')}" if leaves else ""
        yield f"compared: names, shapes and dtypes of {counted(found.compared, 'tensor')}{leaves}"
    else:
        yield f"compared: {counted(found.compared, 'tensor')}{leaves}"
        read = (format_bytes(side.bytes_read) for side in (found.a, found.b))
        yield "data read: {} of A, {} of B".format(*read)
    if found.by_checksum:
        tensors = counted(found.by_checksum, "tensor")
        yield f"recorded checksums match, data not read: {tensors}"
    equal = sum(_equal_numbers(one, found) for one in found.tensors)
    if equal:
        yield f"equal numbers, another dtype: {counted(equal, 'tensor')}"
    if found.within:
        yield f"different within the tolerances: {counted(found.within, 'tensor')}"
    yield from _left_out(found)
    yield from found.notes


def _left_out(found: Difference) -> Iterator[str]:
    yield from told("not compared in A", found.a.left_out)
    yield from told("not compared in B", found.b.left_out)
