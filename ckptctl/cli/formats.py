"""``ckptctl formats [NAME]``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import Printer
from ckptctl.cli.tables import Column
from ckptctl.option_checks import check_readable_format, list_readable_formats
from ckptctl.options import Argument

if TYPE_CHECKING:
    from ckptctl.formats.base import Format
    from ckptctl.verbs.known_formats import KnownFormat, WrittenFormat


TEST_REFERENCE = re.compile(r" \(tests/[^()]*\)")
COLUMNS = (
    tables.name_column("format"),
    Column("access"),
    Column("layout", drop=1),
    tables.prose_column("description", keep=48),
)


@command(
    "ckptctl formats",
    "ckptctl formats dcp",
    "ckptctl formats deepspeed",
    "ckptctl formats -q",
    "ckptctl formats --json | jq '.formats[] | select(.written).name'",
    prints="ckptctl.verbs.known_formats:KnownFormats",
    runs_without_arguments=True,
)
def formats(
    name: Annotated[
        str | None,
        Argument(
            "Format to show in detail.",
            metavar="NAME",
            check=check_readable_format,
            offers=list_readable_formats,
        ),
    ] = None,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the supported formats, or show one.

    With NAME, shows how the format is detected, when a checkpoint is complete, what a written
    checkpoint contains, and what the format was tested against.
    """
    from ckptctl.verbs import known_formats as op

    output = Printer(json, quiet, header=not no_header)
    entries = op.list_known_formats(name)
    overview_rows = [
        (entry.format.name, format_access(entry), format_layout(entry.format), _format_title(entry))
        for entry in entries
    ]
    output.print_answer(
        "formats",
        op.KnownFormats(entries),
        names=(shown_entry.format.name for shown_entry in entries),
        rows=overview_rows if name is None else _list_facts(entries[0]),
        columns=COLUMNS if name is None else (),
        human=lambda: (
            output.print_table(overview_rows, COLUMNS)
            if name is None
            else _show_result(output, entries[0])
        ),
    )
    if name is None:
        output.print_hint("use `ckptctl formats NAME` for details of one format")


def _format_title(entry: KnownFormat) -> str:
    added = f" (added by {entry.package})" if entry.package else ""
    return f"{entry.format.title}{added}"


def format_access(entry: KnownFormat) -> str:
    """Format, as text, whether a format can be written or only read."""
    return "read, written" if entry.written else "read only"


def format_layout(checkpoint_format: Format) -> str:
    """Format the layout of a checkpoint format as text."""
    return (checkpoint_format.layout or "any") + (
        ", others" if checkpoint_format.layout and checkpoint_format.other_layouts else ""
    )


def _show_result(output: Printer, entry: KnownFormat) -> None:
    _, _, *pairs = _list_facts(entry)
    output.print_headline(entry.format.name, _format_title(entry))
    labels = ["", *(label for label, _ in pairs)]
    labeled_facts = [
        (f"  {'' if label == previous_label else label}", text)
        for previous_label, (label, text) in zip(labels, pairs, strict=False)
    ]
    output.print_facts(labeled_facts)


def _list_facts(entry: KnownFormat) -> Iterator[tuple[str, str]]:
    checkpoint_format = entry.format
    yield "format", checkpoint_format.name
    yield "description", _format_title(entry)
    yield "access", format_access(entry)
    yield (
        "layout",
        format_layout(checkpoint_format)
        + (" (adapters only)" if checkpoint_format.adapters else ""),
    )
    for text in split_facts(checkpoint_format.recognized) or ("not stated",):
        yield "detected by", text
    for text in split_facts(checkpoint_format.wholeness) or ("not stated",):
        yield "complete when", text
    for choice in entry.choices:
        yield "options", f"{choice.option}  {choice.meaning}"
    for text in describe_written(entry.written) if entry.written else ():
        yield "written as", text
    for text in split_facts(
        checkpoint_format.tested or TEST_REFERENCE.sub("", checkpoint_format.proof)
    ) or ("not stated",):
        yield "tested against", text


def split_facts(text: str) -> list[str]:
    """Split the description of a format into separate facts."""
    return text.split("; ") if text else []


def describe_written(traits: WrittenFormat) -> Iterator[str]:
    """Yield, as text, the properties of checkpoints that are written in a format."""
    yield (
        "directory, with sidecar files"
        if traits.directory
        else "single file, without sidecar files"
    )
    yield f"non-tensor values: {'kept' if traits.leaves else 'skipped'}"
    if traits.ties:
        yield f"tied tensors: {traits.ties}"
    if traits.cut_by:
        yield f"split into files with {', '.join(traits.cut_by)}"
    if traits.lacks:
        yield f"unsupported dtypes: {', '.join(traits.lacks)}"
