"""What every failing command prints on stderr with ``--json``."""

from __future__ import annotations

from ckptctl.cli.schemas.words import document, integer, record, string

ERROR = {
    "code": string("[error code](exit-codes.md)"),
    "exit_code": integer("what the program ends with"),
    "message": string("what went wrong"),
    "where": string("the file, tensor or option concerned", null=True),
    "why": string("the evidence", null=True),
    "hint": string("the next step", null=True),
}
DOCUMENT = document(
    "error",
    {
        "error": record(
            {**ERROR, "traceback": string("with `--debug` only", optional=True)},
        )
    },
    "On stderr; stdout is empty, unless the exit code is 7, or 6 of `prune` for want of `--yes`.",
)
