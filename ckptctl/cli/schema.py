"""``ckptctl schema [COMMAND]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import commands, tables
from ckptctl.cli.commands import Json, NoHeader, Quiet
from ckptctl.cli.output import Printer
from ckptctl.options import Argument, require_choice

if TYPE_CHECKING:
    from ckptctl.documents import Document

COLUMNS = tables.titled("schema", "document", "id")
ERROR = "ckptctl.documents:ErrorDocument"


def documents() -> dict[str, Document]:
    """Map each command, and ``error``, to the JSON document it prints."""
    from ckptctl.documents import Document

    prints = {one.name: one.prints for one in commands.commands()} | {"error": ERROR}
    return {name: Document(name, prints[name]) for name in sorted(prints)}


def named(name: str) -> Document:
    """Return the JSON document of the command *name*, or raise `UsageError`."""
    known = documents()
    return known[require_choice(name, "schema", list(known))]


@commands.command(
    "ckptctl schema",
    "ckptctl schema inspect > inspect.schema.json",
    "ckptctl schema error",
    prints="ckptctl.documents:Documents",
    bare=True,
)
def schema(
    command: Annotated[
        str | None,
        Argument(
            "Command to print the JSON Schema of, or error for the schema of errors.",
            metavar="COMMAND",
            offers=lambda _: list(documents()),
        ),
    ] = None,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List or print the JSON Schemas of --json output.

    With COMMAND, prints the JSON Schema (2020-12) of the --json output of that command. A schema is
    JSON itself, so it is printed as JSON with and without --json.
    """
    output = Printer(json, quiet, header=not no_header)
    if command is not None:
        output.schema(named(command).build_schema())
        return
    known = documents()
    from ckptctl.documents import Documents

    rows = [(name, one.title, one.id) for name, one in known.items()]
    output.answer(
        "schema",
        Documents(tuple(known.values())),
        names=known,
        rows=rows,
        columns=COLUMNS,
        human=lambda: output.table(rows, COLUMNS),
    )
    output.hint("print one with `ckptctl schema NAME`")
