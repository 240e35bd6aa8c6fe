"""``ckptctl diff A B``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import Printer, Row, told
from ckptctl.cli.progress import progress
from ckptctl.cli.tables import SHOWN, Column
from ckptctl.option_checks import check_location
from ckptctl.options import Argument
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.comparison.diff_options import DiffOptions

if TYPE_CHECKING:
    from ckptctl.verbs.comparison.diff_result import Difference, Side, TensorDifference

DIFFERENT = 1
DIFFERS = ("tensor differs", "tensors differ")
LEAF_DIFFERS = ("non-tensor value differs", "non-tensor values differ")
COLUMNS = (
    tables.name("tensor"),
    Column("differs in"),
    tables.number("elements", drop=4),
    tables.number("not finite", drop=3),
    tables.number("max abs"),
    tables.number("max rel", drop=2),
    Column("worst at", drop=1),
)
LEAVES = (tables.name("non-tensor value"), tables.prose("A"), tables.prose("B"))


@command(
    "ckptctl diff step-1000 step-2000",
    "ckptctl diff out-dcp llama-3-8b --only model",
    "ckptctl diff bf16 fp32 --ignore-dtype --atol 1e-3",
    "ckptctl diff zero zero --weights-a master --weights-b module --ignore-dtype --atol 1e-2",
    "ckptctl diff a b --structure --json | jq .a.only",
    prints="ckptctl.verbs.comparison.diff_result:Difference",
)
def diff(
    a: Annotated[
        TreePath,
        Argument("First checkpoint: directory, file or URL.", metavar="A", check=check_location),
    ],
    b: Annotated[
        TreePath,
        Argument(
            "Second checkpoint, mapped to the layout of A.", metavar="B", check=check_location
        ),
    ],
    options: DiffOptions,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints of any format and layout.

    Names, shapes, dtypes and values are compared, and B is mapped to the layout of A. Elements are
    equal if their bits are equal. The data of both checkpoints is read. The exit code is 0 if
    nothing differs and 1 if something does. With --quick or --structure, exit code 0 proves nothing
    about data that was not read.
    """
    from ckptctl.verbs.comparison import diff as op

    output = Printer(json, quiet, header=not no_header)
    found = op.compare_checkpoints(a, b, options, partial(progress, output, "comparing"))
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
    """Yield a row per difference."""
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
    """Return whether only the dtype differs and the compared numbers are equal."""
    compared = not found.structure and not found.within
    return one.kinds == ("dtype",) and compared and not one.has_several_dtypes


def show(output: Printer, found: Difference) -> None:
    """Print the differences of two checkpoints by kind, the largest first."""
    output.sentence(_headline(found), "bold")
    for line in _explained(found):
        output.sentence(f"  {line}", "dim")
    if found.a.only_leaves or found.b.only_leaves:
        output.hint("pass `--only model` to compare only the models")
    if any(_equal_numbers(one, found) for one in found.tensors):
        output.hint("pass `--ignore-dtype` to treat equal numbers of different dtypes as equal")
    for side, letter in ((found.a, "A"), (found.b, "B")):
        _names(output, pluralize(len(side.only), "tensor") + f" only in {letter}", side.only)
        others = pluralize(len(side.only_leaves), "non-tensor value")
        _names(output, f"{others} only in {letter}", side.only_leaves)
    groups: dict[str, list[TensorDifference]] = {}
    for one in found.tensors:
        dtypes = f" ({one.dtype_a}, {one.dtype_b})" if "dtype" in one.kinds else ""
        title = " and ".join(f"{kind}{dtypes if kind == 'dtype' else ''}" for kind in one.kinds)
        groups.setdefault(title, []).append(one)
    for title, alike in groups.items():
        output.line(f"{pluralize(len(alike), *DIFFERS)} in {title}")
        rows = [_human_row(one, found) for one in alike[:SHOWN]]
        if not any(one.values and one.values.nonfinite for one in alike):
            rows = [(*row[:3], "", *row[4:]) for row in rows]
        output.table(rows, (tables.name("  tensor"), Column("shapes"), *COLUMNS[2:]))
        output.more(len(alike))
    if found.leaves:
        output.line(pluralize(len(found.leaves), *LEAF_DIFFERS))
        output.first_rows(found.leaves, lambda one: (one.name, one.a, one.b), LEAVES)


def _human_row(one: TensorDifference, found: Difference) -> tuple[str, ...]:
    """Make a row below the title of its kind, which names all differences but shapes."""
    row = _row(one, found, "{:.3g}".format)
    shapes = f"{list(one.shape_a)} {list(one.shape_b)}" if "shape" in one.kinds else ""
    return (f"  {row[0]}", shapes, *row[2:])


def _names(output: Printer, title: str, names: tuple[str, ...]) -> None:
    if names:
        output.line(title)
        output.first_rows(names, lambda name: (f"  {name}",), [tables.name()])


def _headline(found: Difference) -> str:
    parts = [pluralize(len(found.tensors), *DIFFERS)] if found.tensors else []
    parts += [pluralize(len(found.leaves), *LEAF_DIFFERS)] if found.leaves else []
    for side, letter in ((found.a, "A"), (found.b, "B")):
        if count := len(side.only) + len(side.only_leaves):
            parts.append(f"{count:,} only in {letter}")
    answer = ", ".join(parts) if parts else found.verdict
    return f"{_named(found.a)} and {_named(found.b)}: {answer}"


def _named(side: Side) -> str:
    layout = f", layout {side.layout}" if side.layout else ""
    return f"{side.path} ({side.format}{layout})"


def _explained(found: Difference) -> Iterator[str]:
    """Yield notes on the extent of the comparison and on explained differences."""
    yield from found.notes
    values = pluralize(found.compared_leaves, "non-tensor value")
    tensors = pluralize(found.compared, "tensor")
    if found.structure:
        more = f", names of {values}" if found.compared_leaves else ""
        yield f"compared: names, shapes and dtypes of {tensors}{more}"
    else:
        yield f"compared: {tensors}" + (f", {values}" if found.compared_leaves else "")
    if found.by_checksum:
        tensors = pluralize(found.by_checksum, "tensor")
        yield f"recorded checksums match, data not read: {tensors}"
    equal = sum(_equal_numbers(one, found) for one in found.tensors)
    if equal:
        yield f"equal numbers, different dtype: {pluralize(equal, 'tensor')}"
    if found.within:
        yield f"different, but within the tolerances: {pluralize(found.within, 'tensor')}"
    yield from _left_out(found)


def _left_out(found: Difference) -> Iterator[str]:
    yield from told("not compared in A", found.a.left_out)
    yield from told("not compared in B", found.b.left_out)
