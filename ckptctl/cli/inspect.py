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
from ckptctl.cli.findings import grouped
from ckptctl.cli.ls import show_run
from ckptctl.cli.output import VERDICTS, Printer, Row
from ckptctl.cli.progress import progress
from ckptctl.cli.tables import Column, Painted
from ckptctl.errors import MAX_ALTERNATIVES, StorageError, quote_names
from ckptctl.errors import format_command as suggested
from ckptctl.option_checks import check_location, check_positive
from ckptctl.options import Argument, Option, Options
from ckptctl.units import format_count, pluralize
from ckptctl.verbs.inspection.inspect_options import InspectOptions, build_output_exclusion

if TYPE_CHECKING:
    from ckptctl.verbs.inspection.inspect_result import Inspection, TensorInfo

CANDIDATES = 12
"""Most candidate model types that a terminal shows."""
LEAVES = 8
"""Most non-tensor values that a terminal shows."""
RUN = (tables.name("path"), Column("format"), tables.number("bytes"), tables.prose("verdict"))


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    """Selection and order of the listed tensors."""

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
    "ckptctl inspect step-2000 --json | jq .parameters",
    prints="ckptctl.verbs.inspection.inspect_result:Inspection",
    bare=True,
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

    Only the index is read, unless --stats is given.
    """
    from ckptctl.verbs.inspection import inspect as op

    output = Printer(json, quiet, header=not no_header)
    found = op.inspect_checkpoint(path, options, partial(progress, output, "reading"))
    asked = {"--tensors": show.tensors, "--markdown": markdown}
    op.require_single(found, [name for name, given in asked.items() if given])
    shown = op.select_tensors(found.tensors, options.include)
    if json:
        output.document("inspect", replace(found, tensors=tuple(shown)))
    elif quiet:
        for name in [member.path for member in found.checkpoints] or [t.name for t in shown]:
            output.line(name)
    elif found.checkpoints:
        _print_run(output, found)
    elif markdown:
        for line in listing.markdown(found, _branches(found, shown, show, options)):
            output.line(line)
    else:
        _print_tensors(output, found, shown, show, options)
    if found.lacks:
        count = pluralize(len(found.lacks), "tensor of the model is", "tensors of the model are")
        output.warning(f"{count} missing: {quote_names(found.lacks)}")
    if found.problems:
        _warn(output, found)
        if not found.checkpoints:
            output.hint(f"run {suggested('verify', found.path)} for details")
    if found.read_failed:
        raise typer.Exit(StorageError.exit_code)


def _print_tensors(
    output: Printer,
    found: Inspection,
    shown: Sequence[TensorInfo],
    show: ShowOptions,
    options: InspectOptions,
) -> None:
    """Print the summary of a checkpoint and its tensors as a table or a tree."""
    if output.mode == "human" or not show.tensors:
        _print_summary(output, found)
    if show.tensors or options.stats:
        columns = listing.TENSORS[: None if options.stats else listing.PLAIN]
        output.table(listing.listed_tensors(output, shown, show.sort, options.stats), columns)
    else:
        columns = listing.TREE if output.mode == "human" else listing.LEAVES
        output.table(listing.collapsed(output, _branches(found, shown, show, options)), columns)
    if found.dequantizable:
        target = ("--to", "hf", "--dequantize", "bf16")
        convert = suggested("convert", found.path, "DST", options=target)
        output.hint(f"dequantize with {convert}")


def _branches(
    found: Inspection, shown: Sequence[TensorInfo], show: ShowOptions, options: InspectOptions
) -> list[listing.Branch]:
    """Build the tree, with collapsed training state unless the user selects tensors."""
    if show.depth or options.include:
        return listing.tree(shown, show.sort, show.depth)
    return listing.folded(shown, found.root, found.format, show.sort)


def _warn(output: Printer, found: Inspection) -> None:
    """Warn that a checkpoint, or some checkpoints of a run, are not complete."""
    if not found.checkpoints:
        if output.mode != "human":  # on a terminal, it is listed below the headline
            output.warning(f"{found.verdict}: {_first(found.problems)}")
        return
    count = pluralize(len(found.checkpoints), "checkpoint")
    verb = "is" if len(found.problems) == 1 else "are"
    output.warning(f"{len(found.problems):,} of {count} {verb} not complete")


def _print_run(output: Printer, found: Inspection) -> None:
    if output.mode == "human":
        count = pluralize(len(found.checkpoints), "checkpoint")
        output.line(f"{found.path}  folder of {count}", "bold")
        output.line()
    if found.run:
        show_run(output, found.run)
        others = [one for one in found.run.checkpoints if not one.complete]
        answers = all(one.torn or one.writing for one in others)  # otherwise `latest` may fail
        if answers and len(others) < len(found.run.checkpoints):
            output.hint(f"{suggested('latest', found.path)} prints the newest complete checkpoint")
        return
    rows = [
        (
            member.path,
            member.format or "unreadable",
            listing.size(output, member.nbytes) if member.format else "",
            Painted(
                f"{member.verdict}: {_first(member.problems)}"
                if member.problems
                else str(member.verdict),
                VERDICTS[member.verdict],
            ),
        )
        for member in found.checkpoints
    ]
    output.table(rows, RUN)


def _print_summary(output: Printer, found: Inspection) -> None:
    if output.mode == "plain":
        output.table((*_rows(found), ("",)), ())
        return
    output.headline(found.path, *_headline(found))
    groups = grouped(found.findings)
    for group in groups[: tables.SHOWN]:
        output.sentence(f"  {group.line}", VERDICTS[found.verdict])
    output.more(tables.SHOWN + sum(len(group.findings) for group in groups[tables.SHOWN :]))
    if len(found.candidates) > MAX_ALTERNATIVES:
        more = len(found.candidates) - CANDIDATES
        names = ", ".join(found.candidates[:CANDIDATES]) + (f" and {more} more" if more > 0 else "")
        output.sentence(f"  model type: one of {names} (set it with `-m NAME`)", "dim")
    for how, count in Counter(found.quantized.values()).items():
        output.sentence(f"  quantized: {pluralize(count, 'tensor')}, {how}", "dim")
    for note in found.notes:
        output.sentence(f"  {note}", "dim")
    if leaves := _leaves(found):
        output.sentence(f"  non-tensor values: {leaves}", "dim")
    output.line()


def _headline(found: Inspection) -> Iterator[object]:
    yield from (found.format, listing.model(found))
    if found.layout and found.layout != found.format:
        yield f"layout {found.layout}"
    if found.root:
        yield f"under {found.root}"
    yield f"{format_count(found.parameters)} params"
    yield " + ".join(listing.short(name) for name in found.dtypes)
    yield listing.files(found)
    yield _verdict(found)


def _verdict(found: Inspection) -> Painted:
    unread = sum(one.unsupported is not None for one in found.tensors)
    if unread and not found.problems and not found.lacks:
        return Painted(f"{found.verdict}: {pluralize(unread, 'tensor')} cannot be read", "bold")
    missing = f": {pluralize(len(found.lacks), 'tensor')} missing" if found.lacks else ""
    text = "structure complete" if found.complete is None else f"{found.verdict}{missing}"
    return Painted(text, VERDICTS[found.verdict])


def _rows(found: Inspection) -> Iterator[Row]:
    yield "path", found.path
    yield "format", found.format
    yield "model_type", found.model_type or ",".join(found.candidates) or "unknown"
    yield "layout", found.layout or "unknown"
    yield "root", found.root
    yield "parameters", found.parameters
    yield "dtypes", ",".join(listing.short(name) for name in found.dtypes)
    yield "bytes", found.nbytes
    yield "files", len(found.files)
    yield "tensors", len(found.tensors)
    yield "verdict", found.verdict
    yield "scope", found.scope
    for how, count in Counter(found.quantized.values()).items():
        yield "quantized", f"{how}: {pluralize(count, 'tensor')}"
    yield from (("value", f"{name} = {value}") for name, value in found.values.items())
    yield from (("problem", problem) for problem in found.problems)
    yield from (("lacks", name) for name in found.lacks)
    yield from (("note", note) for note in found.notes)


def _leaves(found: Inspection) -> str:
    """Format the non-tensor values other than the optimizer's, those with known values first."""
    from ckptctl.conversion.recognition.roots import FOLDED_PARTS, classify_part

    names = [*found.values, *(name for name in found.blobs if name not in found.values)]
    names = [
        name for name in names if classify_part(name, found.root, found.format) not in FOLDED_PARTS
    ]
    shown = [
        f"`{name}` = {found.values[name]}" if name in found.values else f"`{name}`"
        for name in names[:LEAVES]
    ]
    more = len(names) - LEAVES
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")


def _first(problems: Sequence[str]) -> str:
    more = len(problems) - 1
    return problems[0] + (f" (and {more:,} more)" if more else "")
