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


TEST = re.compile(r" \(tests/[^()]*\)")
COLUMNS = (
    tables.name("format"),
    Column("access"),
    Column("layout", drop=1),
    tables.prose("description", keep=48),
)


@command(
    "ckptctl formats",
    "ckptctl formats dcp",
    "ckptctl formats deepspeed",
    "ckptctl formats -q",
    "ckptctl formats --json | jq '.formats[] | select(.written).name'",
    prints="ckptctl.verbs.known_formats:KnownFormats",
    bare=True,
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
    found = op.list_known_formats(name)
    listed = [(o.format.name, access(o), layout(o.format), _title(o)) for o in found]
    output.answer(
        "formats",
        op.KnownFormats(found),
        names=(one.format.name for one in found),
        rows=listed if name is None else _facts(found[0]),
        columns=COLUMNS if name is None else (),
        human=lambda: output.table(listed, COLUMNS) if name is None else _show(output, found[0]),
    )
    if name is None:
        output.hint("use `ckptctl formats NAME` for details of one format")


def _title(known: KnownFormat) -> str:
    added = f" (added by {known.package})" if known.package else ""
    return f"{known.format.title}{added}"


def access(known: KnownFormat) -> str:
    """Return whether a format can be written or only read, as text."""
    return "read, written" if known.written else "read only"


def layout(known: Format) -> str:
    """Return the layout of a format as text."""
    return (known.layout or "any") + (", others" if known.layout and known.other_layouts else "")


def _show(output: Printer, known: KnownFormat) -> None:
    _, _, *pairs = _facts(known)
    output.headline(known.format.name, _title(known))
    labels = ["", *(label for label, _ in pairs)]
    shown = [
        (f"  {'' if label == before else label}", text)
        for before, (label, text) in zip(labels, pairs, strict=False)
    ]
    output.facts(shown)


def _facts(known: KnownFormat) -> Iterator[tuple[str, str]]:
    texts = known.format
    yield "format", texts.name
    yield "description", _title(known)
    yield "access", access(known)
    yield "layout", layout(texts) + (" (adapters only)" if texts.adapters else "")
    for text in facts(texts.recognized) or ("not stated",):
        yield "detected by", text
    for text in facts(texts.wholeness) or ("not stated",):
        yield "complete when", text
    for choice in known.choices:
        yield "options", f"{choice.option}  {choice.meaning}"
    for text in written(known.written) if known.written else ():
        yield "written as", text
    for text in facts(texts.tested or TEST.sub("", texts.proof)) or ("not stated",):
        yield "tested against", text


def facts(text: str) -> list[str]:
    """Split the text of a format into its facts."""
    return text.split("; ") if text else []


def written(known: WrittenFormat) -> Iterator[str]:
    """Yield the properties of checkpoints written in a format, as text."""
    yield (
        "directory, with sidecar files" if known.directory else "single file, without sidecar files"
    )
    yield f"non-tensor values: {'kept' if known.leaves else 'skipped'}"
    if known.ties:
        yield f"tied tensors: {known.ties}"
    if known.cut_by:
        yield f"split into files with {', '.join(known.cut_by)}"
    if known.lacks:
        yield f"unsupported dtypes: {', '.join(known.lacks)}"
