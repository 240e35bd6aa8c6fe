"""``ckptctl schema [COMMAND]``."""

from __future__ import annotations

from typing import Annotated

from ckptctl.cli import commands, schemas
from ckptctl.cli.commands import Json, Quiet
from ckptctl.cli.output import Output
from ckptctl.options import Argument, Given

SCHEMA = "ckptctl.schema/1"


def _names(_: Given) -> list[str]:
    return list(schemas.documents())


@commands.command(
    "ckptctl schema",
    "ckptctl schema inspect > inspect.schema.json",
    "ckptctl schema error",
    bare=True,
)
def schema(
    command: Annotated[
        str | None,
        Argument(
            "Print the schema of what it prints; error: of errors.",
            metavar="COMMAND",
            offers=_names,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
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
