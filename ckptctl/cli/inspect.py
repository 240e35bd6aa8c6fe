"""``ckptctl inspect PATH``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import listing, tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import VERDICT_STYLES, Printer, Row
from ckptctl.cli.progress import show_progress
from ckptctl.cli.tables import Column, StyledText
from ckptctl.errors import MAX_ALTERNATIVES, StorageError, UnsupportedError, quote_names
from ckptctl.errors import format_command as suggested
from ckptctl.option_checks import check_location, check_positive
from ckptctl.options import Argument, Option, Options
from ckptctl.units import format_count, pluralize
from ckptctl.verbs.inspection.inspect_options import InspectOptions, build_output_exclusion

if TYPE_CHECKING:
    from ckptctl.verbs.inspection.inspect_result import Inspection, TensorInfo

EXIT_NO_FIT = 1
"""Exit code if ``--fit`` finds that the model does not fit."""
MAX_SHOWN_CANDIDATES = 12
"""Maximum number of candidate model types that a terminal shows."""
MAX_SHOWN_LEAVES = 8
"""Maximum number of non-tensor values that a terminal shows."""
RUN_COLUMNS = (
    tables.name_column("path"),
    Column("format"),
    tables.number_column("bytes"),
    tables.prose_column("verdict"),
)


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    """Options that select and sort the listed tensors."""

    tensors: Annotated[
        bool,
        Option(
            "List every tensor instead of the tree.", excludes=(build_output_exclusion("markdown"),)
        ),
    ] = False
    depth: Annotated[
        int | None,
        Option(
            "Group tensors by the first N parts of their names.",
            metavar="N",
            check=check_positive,
            excludes=tuple(map(build_output_exclusion, ("tensors", "stats", "json", "quiet"))),
        ),
    ] = None
    sort: Annotated[
        listing.Order,
        Option("Order of tensors: name, or size (largest first).", metavar="ORDER"),
    ] = "name"


@command(
    "ckptctl inspect llama-3-8b",
    "ckptctl inspect runs/llama                    (lists the checkpoints of a run)",
    "ckptctl inspect step-2000 --depth 2 --sort size",
    "ckptctl inspect step-2000 --tensors --include '*.q_proj.weight' --stats",
    "ckptctl inspect hf://org/model@main           (reads only headers, like all URLs)",
    "ckptctl inspect hf://org/model@main --fit 4x80GB --context 32k   (memory for inference)",
    "ckptctl inspect step-2000 --json | jq .parameters",
    prints="ckptctl.verbs.inspection.inspect_result:Inspection",
    runs_without_arguments=True,
)
def inspect(
    path: Annotated[
        Path,
        Argument(
            "Checkpoint or folder of checkpoints: path or URL.  [default: current directory]",
            metavar="PATH",
            check=check_location,
        ),
    ] = Path(),
    *,
    show: ShowOptions,
    options: InspectOptions,
    markdown: Annotated[
        bool, Option("Print Markdown for a model card.", panel="Output", brief=True)
    ] = False,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a checkpoint's contents and whether it is complete.

    Only the index is read, unless --stats is given. With --fit, the exit code is 0 if the model
    fits, 1 if it does not, and 9 if that is unknown.
    """
    from ckptctl.verbs.inspection import inspect as op

    output = Printer(json, quiet, header=not no_header)
    inspection = op.inspect_checkpoint(path, options, partial(show_progress, output, "reading"))
    single_only = {"--tensors": show.tensors, "--markdown": markdown}
    op.require_single_checkpoint(
        inspection, [name for name, is_given in single_only.items() if is_given]
    )
    selected = op.select_tensors(inspection.tensors, options.include)
    if json:
        output.print_document("inspect", replace(inspection, tensors=tuple(selected)))
    elif quiet:
        for name in [member.path for member in inspection.checkpoints] or [
            t.name for t in selected
        ]:
            output.print_line(name)
    elif inspection.checkpoints:
        _print_run(output, inspection)
    elif markdown:
        for line in listing.render_markdown(
            inspection, _build_branches(inspection, selected, show, options)
        ):
            output.print_line(line)
    else:
        _print_tensors(output, inspection, selected, show, options)
    if inspection.lacks:
        count = pluralize(
            len(inspection.lacks), "tensor of the model is", "tensors of the model are"
        )
        output.print_warning(f"{count} missing: {quote_names(inspection.lacks)}")
    if inspection.problems:
        _warn_incomplete(output, inspection)
        if not inspection.checkpoints:
            output.print_hint(f"run {suggested('verify', inspection.path)} for details")
    if inspection.read_failed:
        raise typer.Exit(StorageError.exit_code)
    fits = inspection.fit.fits if inspection.fit else None  # without tensors, there is no result
    if options.fit and not fits:
        raise typer.Exit(UnsupportedError.exit_code if fits is None else EXIT_NO_FIT)


def _print_tensors(
    output: Printer,
    inspection: Inspection,
    selected: Sequence[TensorInfo],
    show: ShowOptions,
    options: InspectOptions,
) -> None:
    """Print the summary of a checkpoint and its tensors as a table or a tree."""
    if output.mode == "human" or not show.tensors:
        _print_summary(output, inspection)
    if show.tensors or options.stats:
        columns = listing.TENSOR_COLUMNS[: None if options.stats else listing.COLUMNS_WITHOUT_STATS]
        output.print_table(
            listing.make_tensor_rows(output, selected, show.sort, options.stats), columns
        )
    elif inspection.fit:
        from ckptctl.cli.views.fit_tables import show_fit  # only for --fit

        show_fit(output, inspection.fit)
    else:
        columns = listing.TREE_COLUMNS if output.mode == "human" else listing.LEAF_COLUMNS
        output.print_table(
            listing.make_tree_rows(output, _build_branches(inspection, selected, show, options)),
            columns,
        )
    if inspection.dequantizable:
        target = ("--to", "hf", "--dequantize", "bf16")
        convert = suggested("convert", inspection.path, "DST", options=target)
        output.print_hint(f"dequantize with {convert}")


def _build_branches(
    inspection: Inspection,
    selected: Sequence[TensorInfo],
    show: ShowOptions,
    options: InspectOptions,
) -> list[listing.Branch]:
    """Build the tree of tensors. Training state is collapsed unless the user selects tensors."""
    if show.depth or options.include:
        return listing.build_tree(selected, show.sort, show.depth)
    return listing.build_model_tree(selected, inspection.root, inspection.format, show.sort)


def _warn_incomplete(output: Printer, inspection: Inspection) -> None:
    """Warn that a checkpoint, or some checkpoints of a run, are not complete."""
    if not inspection.checkpoints:
        if output.mode != "human":  # on a terminal, it is listed below the headline
            output.print_warning(
                f"{inspection.verdict}: {_format_first_problem(inspection.problems)}"
            )
        return
    count = pluralize(len(inspection.checkpoints), "checkpoint")
    verb = "is" if len(inspection.problems) == 1 else "are"
    output.print_warning(f"{len(inspection.problems):,} of {count} {verb} not complete")


def _print_run(output: Printer, inspection: Inspection) -> None:
    if output.mode == "human":
        count = pluralize(len(inspection.checkpoints), "checkpoint")
        output.print_line(f"{inspection.path}  folder of {count}", "bold")
        output.print_line()
    if inspection.run:
        from ckptctl.cli.ls import show_run  # declares a command

        show_run(output, inspection.run)
        incomplete = [
            checkpoint for checkpoint in inspection.run.checkpoints if not checkpoint.complete
        ]
        latest_succeeds = all(
            checkpoint.torn or checkpoint.writing for checkpoint in incomplete
        )  # otherwise `latest` may fail
        if latest_succeeds and len(incomplete) < len(inspection.run.checkpoints):
            output.print_hint(
                f"{suggested('latest', inspection.path)} prints the newest complete checkpoint"
            )
        return
    rows = [
        (
            member.path,
            member.format or "unreadable",
            listing.format_size(output, member.nbytes) if member.format else "",
            StyledText(
                f"{member.verdict}: {_format_first_problem(member.problems)}"
                if member.problems
                else str(member.verdict),
                VERDICT_STYLES[member.verdict],
            ),
        )
        for member in inspection.checkpoints
    ]
    output.print_table(rows, RUN_COLUMNS)


def _print_summary(output: Printer, inspection: Inspection) -> None:
    if output.mode == "plain":
        output.print_table((*_list_rows(inspection), ("",)), ())
        return
    output.print_headline(inspection.path, *_format_headline(inspection))
    from ckptctl.cli.views.findings import group_findings  # not for --help or --json

    groups = group_findings(inspection.findings)
    for group in groups[: tables.MAX_SHOWN_ROWS]:
        output.print_sentence(f"  {group.line}", VERDICT_STYLES[inspection.verdict])
    output.print_remaining(
        tables.MAX_SHOWN_ROWS
        + sum(len(group.findings) for group in groups[tables.MAX_SHOWN_ROWS :])
    )
    if len(inspection.candidates) > MAX_ALTERNATIVES:
        more_count = len(inspection.candidates) - MAX_SHOWN_CANDIDATES
        names = ", ".join(inspection.candidates[:MAX_SHOWN_CANDIDATES]) + (
            f" and {more_count} more" if more_count > 0 else ""
        )
        output.print_sentence(f"  model type: one of {names} (set it with `-m NAME`)", "dim")
    for scheme, count in Counter(inspection.quantized.values()).items():
        output.print_sentence(f"  quantized: {pluralize(count, 'tensor')}, {scheme}", "dim")
    for note in inspection.notes:
        output.print_sentence(f"  {note}", "dim")
    if leaves := _format_leaves(inspection):
        output.print_sentence(f"  non-tensor values: {leaves}", "dim")
    output.print_line()


def _format_headline(inspection: Inspection) -> Iterator[object]:
    yield from (inspection.format, listing.format_model_type(inspection))
    if inspection.layout and inspection.layout != inspection.format:
        yield f"layout {inspection.layout}"
    if inspection.root:
        yield f"under {inspection.root}"
    yield f"{format_count(inspection.parameters)} params"
    yield " + ".join(listing.shorten_dtype(name) for name in inspection.dtypes)
    yield listing.format_files(inspection)
    yield _format_verdict(inspection)


def _format_verdict(inspection: Inspection) -> StyledText:
    unreadable = sum(tensor.unsupported is not None for tensor in inspection.tensors)
    if unreadable and not inspection.problems and not inspection.lacks:
        return StyledText(
            f"{inspection.verdict}: {pluralize(unreadable, 'tensor')} cannot be read", "bold"
        )
    missing = f": {pluralize(len(inspection.lacks), 'tensor')} missing" if inspection.lacks else ""
    text = "structure complete" if inspection.complete is None else f"{inspection.verdict}{missing}"
    return StyledText(text, VERDICT_STYLES[inspection.verdict])


def _list_rows(inspection: Inspection) -> Iterator[Row]:
    yield "path", inspection.path
    yield "format", inspection.format
    yield "model_type", inspection.model_type or ",".join(inspection.candidates) or "unknown"
    yield "layout", inspection.layout or "unknown"
    yield "root", inspection.root
    yield "parameters", inspection.parameters
    yield "dtypes", ",".join(listing.shorten_dtype(name) for name in inspection.dtypes)
    yield "bytes", inspection.nbytes
    yield "files", len(inspection.files)
    yield "tensors", len(inspection.tensors)
    yield "verdict", inspection.verdict
    yield "scope", inspection.scope
    for scheme, count in Counter(inspection.quantized.values()).items():
        yield "quantized", f"{scheme}: {pluralize(count, 'tensor')}"
    yield from (("value", f"{name} = {value}") for name, value in inspection.values.items())
    yield from (("problem", problem) for problem in inspection.problems)
    yield from (("lacks", name) for name in inspection.lacks)
    yield from (("note", note) for note in inspection.notes)


def _format_leaves(inspection: Inspection) -> str:
    """Format the non-tensor values except optimizer state. Well-known values come first."""
    from ckptctl.conversion.recognition.roots import FOLDED_PARTS, classify_leaf

    names = [
        *inspection.values,
        *(name for name in inspection.blobs if name not in inspection.values),
    ]
    names = [
        name
        for name in names
        if classify_leaf(name, inspection.root, inspection.format) not in FOLDED_PARTS
    ]
    texts = [
        f"`{name}` = {inspection.values[name]}" if name in inspection.values else f"`{name}`"
        for name in names[:MAX_SHOWN_LEAVES]
    ]
    more_count = len(names) - MAX_SHOWN_LEAVES
    return ", ".join(texts) + (f" and {more_count:,} more" if more_count > 0 else "")


def _format_first_problem(problems: Sequence[str]) -> str:
    more_count = len(problems) - 1
    return problems[0] + (f" (and {more_count:,} more)" if more_count else "")
