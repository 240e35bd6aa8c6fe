"""``ckptctl schema [COMMAND]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import commands, tables
from ckptctl.cli.commands import Json, NoHeader, Quiet
from ckptctl.cli.output import Printer
from ckptctl.options import Argument, require_choice

if TYPE_CHECKING:
    from ckptctl.documents import Document

COLUMNS = tables.titled_columns("schema", "document", "id")
ERROR_DOCUMENT = "ckptctl.documents:ErrorDocument"


def get_documents_by_name() -> dict[str, Document]:
    """Map the name of each command, and ``error``, to the JSON document that it prints."""
    from ckptctl.documents import Document

    prints = {command.name: command.prints for command in commands.iterate_commands()} | {
        "error": ERROR_DOCUMENT
    }
    return {name: Document(name, prints[name]) for name in sorted(prints)}


def require_json_document(name: str) -> Document:
    """Return the JSON document of the command *name*, or raise `UsageError`."""
    by_name = get_documents_by_name()
    return by_name[require_choice(name, "schema", list(by_name))]


@commands.command(
    "ckptctl schema",
    "ckptctl schema inspect > inspect.schema.json",
    "ckptctl schema error",
    prints="ckptctl.documents:Documents",
    runs_without_arguments=True,
)
def schema(
    command: Annotated[
        str | None,
        Argument(
            "Command to print the JSON Schema of, or error for the schema of errors.",
            metavar="COMMAND",
            offers=lambda _: list(get_documents_by_name()),
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
        output.print_schema(require_json_document(command).build_schema())
        return
    by_name = get_documents_by_name()
    from ckptctl.documents import Documents

    rows = [(name, document.title, document.id) for name, document in by_name.items()]
    output.print_answer(
        "schema",
        Documents(tuple(by_name.values())),
        names=by_name,
        rows=rows,
        columns=COLUMNS,
        human=lambda: output.print_table(rows, COLUMNS),
    )
    output.print_hint("print one with `ckptctl schema NAME`")
