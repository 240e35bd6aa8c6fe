"""``ckptctl schema [COMMAND]``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptctl.cli import options as opt
from ckptctl.cli import schemas
from ckptctl.cli.output import Output

SCHEMA = "ckptctl.schema/1"
EPILOG = opt.examples(
    "ckptctl schema",
    "ckptctl schema inspect > inspect.schema.json",
    "ckptctl schema error",
)


def _names() -> list[str]:
    return list(schemas.documents())


def schema(
    command: Annotated[
        str | None,
        typer.Argument(
            metavar="COMMAND",
            autocompletion=_names,
            show_default=False,
            help="Print the schema of what it prints; error: of errors.",
        ),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """List the schemas of what --json prints, or print one.

    With COMMAND: the JSON Schema (2020-12) of what that command prints with --json. It is JSON
    already, so it is the same with and without --json here.
    """
    output = Output(json, quiet)
    if command is not None:
        output.schema(schemas.named(command).schema())
        return
    known = schemas.documents()
    if output.mode == "json":
        rows = [{"name": name, "document": d.title, "id": d.id} for name, d in known.items()]
        output.document(SCHEMA, {"schemas": rows})
    elif output.mode == "quiet":
        for name in known:
            output.line(name)
    else:
        head = [("schema", "document", "id")] if output.mode == "human" else []
        output.table([*head, *((name, d.title, d.id) for name, d in known.items())])
        output.hint("`ckptctl schema NAME` prints one")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema", epilog=EPILOG)(schema)
