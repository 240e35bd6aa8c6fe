"""``ckptctl diff A B``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import Printer, Row, format_by_reason
from ckptctl.cli.progress import show_progress
from ckptctl.cli.tables import MAX_SHOWN_ROWS, Column
from ckptctl.option_checks import check_location
from ckptctl.options import Argument
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.comparison.diff_options import DiffOptions

if TYPE_CHECKING:
    from ckptctl.verbs.comparison.diff_result import Difference, Side, TensorDifference

EXIT_DIFFERENT = 1
TENSOR_DIFFERS = ("tensor differs", "tensors differ")
LEAF_DIFFERS = ("non-tensor value differs", "non-tensor values differ")
COLUMNS = (
    tables.name_column("tensor"),
    Column("differs in"),
    tables.number_column("elements", drop=4),
    tables.number_column("not finite", drop=3),
    tables.number_column("max abs"),
    tables.number_column("max rel", drop=2),
    Column("worst at", drop=1),
)
LEAF_COLUMNS = (
    tables.name_column("non-tensor value"),
    tables.prose_column("A"),
    tables.prose_column("B"),
)


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
    difference = op.compare_checkpoints(a, b, options, partial(show_progress, output, "comparing"))
    differing_rows = list(_list_rows(difference))
    gap = [("",)] if differing_rows else []
    output.print_answer(
        "diff",
        difference,
        names=(row[1] for row in differing_rows),
        columns=(Column("kind"), *COLUMNS) if differing_rows else (),
        rows=(*differing_rows, *gap, *_list_facts(difference)),
        human=lambda: show_difference(output, difference),
    )
    if difference.same is False:
        raise typer.Exit(EXIT_DIFFERENT)


def _list_rows(difference: Difference) -> Iterator[tuple[str, ...]]:
    """Yield one row for each difference, for output as TSV."""
    for side, letter in ((difference.a, "a"), (difference.b, "b")):
        yield from ((f"only_{letter}", name) for name in side.only)
        yield from ((f"only_leaf_{letter}", name) for name in side.only_leaves)
    for tensor in difference.tensors:
        yield ("tensor", *_make_row(tensor, difference, repr))
    for leaf in difference.leaves:
        yield ("leaf", leaf.name, leaf.a, leaf.b)


def _list_facts(difference: Difference) -> Iterator[Row]:
    yield "same", {True: "yes", False: "no", None: "unknown"}[difference.same]
    yield "verdict", difference.verdict
    yield "evidence", difference.evidence
    yield "compared", difference.compared
    yield "by_checksum", difference.by_checksum
    yield "within", difference.within
    yield "compared_leaves", difference.compared_leaves
    yield "bytes_read_a", difference.a.bytes_read
    yield "bytes_read_b", difference.b.bytes_read
    yield from (("note", note) for note in (*_list_skipped(difference), *difference.notes))


def _make_row(
    tensor: TensorDifference, difference: Difference, format_number: Callable[[float], str]
) -> tuple[str, ...]:
    kinds = {
        "shape": f"shape {list(tensor.shape_a)} {list(tensor.shape_b)}",
        "dtype": f"dtype {tensor.dtype_a} {tensor.dtype_b}",
        "values": "values",
    }
    differing = ", ".join(kinds[kind] for kind in tensor.kinds)
    if tensor.values is None:
        elements = (
            f"0 of {math.prod(tensor.shape_a):,}"
            if _differs_only_in_dtype(tensor, difference)
            else ""
        )
        return tensor.name, differing, elements, "", "", "", ""
    errors = tensor.values
    nonfinite = "-" if difference.bitwise else f"{errors.nonfinite:,}"
    counts = f"{errors.differing:,} of {errors.count:,}", nonfinite
    worst = "-" if errors.worst is None else str(list(errors.worst))
    largest = ("-" if x is None else format_number(x) for x in (errors.max_abs, errors.max_rel))
    return tensor.name, differing, *counts, *largest, worst


def _differs_only_in_dtype(tensor: TensorDifference, difference: Difference) -> bool:
    """Return whether only the dtype differs and the compared numbers are equal."""
    compared = not difference.structure and not difference.within
    return tensor.kinds == ("dtype",) and compared and not tensor.has_several_dtypes


def show_difference(output: Printer, difference: Difference) -> None:
    """Print the differences between two checkpoints, by kind. Large differences come first."""
    output.print_sentence(_format_headline(difference), "bold")
    for line in _list_explanations(difference):
        output.print_sentence(f"  {line}", "dim")
    if difference.a.only_leaves or difference.b.only_leaves:
        output.print_hint("pass `--only model` to compare only the models")
    if any(_differs_only_in_dtype(item, difference) for item in difference.tensors):
        output.print_hint(
            "pass `--ignore-dtype` to treat equal numbers of different dtypes as equal"
        )
    for side, letter in ((difference.a, "A"), (difference.b, "B")):
        _print_names(output, pluralize(len(side.only), "tensor") + f" only in {letter}", side.only)
        value_count = pluralize(len(side.only_leaves), "non-tensor value")
        _print_names(output, f"{value_count} only in {letter}", side.only_leaves)
    groups: dict[str, list[TensorDifference]] = {}
    for item in difference.tensors:
        dtypes = f" ({item.dtype_a}, {item.dtype_b})" if "dtype" in item.kinds else ""
        title = " and ".join(f"{kind}{dtypes if kind == 'dtype' else ''}" for kind in item.kinds)
        groups.setdefault(title, []).append(item)
    for title, tensors in groups.items():
        output.print_line(f"{pluralize(len(tensors), *TENSOR_DIFFERS)} in {title}")
        rows = [_make_human_row(item, difference) for item in tensors[:MAX_SHOWN_ROWS]]
        if not any(item.values and item.values.nonfinite for item in tensors):
            rows = [(*row[:3], "", *row[4:]) for row in rows]
        output.print_table(rows, (tables.name_column("  tensor"), Column("shapes"), *COLUMNS[2:]))
        output.print_remaining(len(tensors))
    if difference.leaves:
        output.print_line(pluralize(len(difference.leaves), *LEAF_DIFFERS))
        output.print_first_rows(
            difference.leaves, lambda item: (item.name, item.a, item.b), LEAF_COLUMNS
        )


def _make_human_row(tensor: TensorDifference, difference: Difference) -> tuple[str, ...]:
    """Make the terminal row of a tensor. The title above states all differences except shapes."""
    row = _make_row(tensor, difference, "{:.3g}".format)
    shapes = f"{list(tensor.shape_a)} {list(tensor.shape_b)}" if "shape" in tensor.kinds else ""
    return (f"  {row[0]}", shapes, *row[2:])


def _print_names(output: Printer, title: str, names: tuple[str, ...]) -> None:
    if names:
        output.print_line(title)
        output.print_first_rows(names, lambda name: (f"  {name}",), [tables.name_column()])


def _format_headline(difference: Difference) -> str:
    parts = [pluralize(len(difference.tensors), *TENSOR_DIFFERS)] if difference.tensors else []
    parts += [pluralize(len(difference.leaves), *LEAF_DIFFERS)] if difference.leaves else []
    for side, letter in ((difference.a, "A"), (difference.b, "B")):
        if count := len(side.only) + len(side.only_leaves):
            parts.append(f"{count:,} only in {letter}")
    answer = ", ".join(parts) if parts else difference.verdict
    return f"{_describe_side(difference.a)} and {_describe_side(difference.b)}: {answer}"


def _describe_side(side: Side) -> str:
    layout = f", layout {side.layout}" if side.layout else ""
    return f"{side.path} ({side.format}{layout})"


def _list_explanations(difference: Difference) -> Iterator[str]:
    """Yield notes on how much was compared, and on differences that have a known reason."""
    yield from difference.notes
    values = pluralize(difference.compared_leaves, "non-tensor value")
    tensors = pluralize(difference.compared, "tensor")
    if difference.structure:
        value_names = f", names of {values}" if difference.compared_leaves else ""
        yield f"compared: names, shapes and dtypes of {tensors}{value_names}"
    else:
        yield f"compared: {tensors}" + (f", {values}" if difference.compared_leaves else "")
    if difference.by_checksum:
        tensors = pluralize(difference.by_checksum, "tensor")
        yield f"recorded checksums match, data not read: {tensors}"
    equal = sum(_differs_only_in_dtype(tensor, difference) for tensor in difference.tensors)
    if equal:
        yield f"equal numbers, different dtype: {pluralize(equal, 'tensor')}"
    if difference.within:
        yield f"different, but within the tolerances: {pluralize(difference.within, 'tensor')}"
    yield from _list_skipped(difference)


def _list_skipped(difference: Difference) -> Iterator[str]:
    yield from format_by_reason("not compared in A", difference.a.left_out)
    yield from format_by_reason("not compared in B", difference.b.left_out)
