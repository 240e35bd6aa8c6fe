"""``ckptctl ls ROOT``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli import checks
from ckptctl.cli import options as opt
from ckptctl.cli.output import Output
from ckptctl.units import format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.runs.listing import Checkpoint, Run

SCHEMA = "ckptctl.ls/1"
HEADER = ("name", "step", "time", "size", "format", "state", "protected by")
EPILOG = opt.examples(
    "ckptctl ls runs/llama",
    "ckptctl ls runs/llama -q",
    "ckptctl ls runs/llama --json | jq '.checkpoints[] | select(.state == \"complete\").step'",
)


def ls(
    root: Annotated[
        Path,
        typer.Argument(
            parser=checks.place, metavar="ROOT", show_default=False, help="Folder of checkpoints."
        ),
    ],
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """List the checkpoints of a run, and which are complete.

    With step, time, size, format, and what protects each from being pruned.
    """
    from ckptctl.ops.runs.listing import read_run

    output = Output(json, quiet)
    run = read_run(root)
    if output.mode == "json":
        output.document(SCHEMA, _document(run))
    elif output.mode == "quiet":
        for one in run.checkpoints:
            output.line(str(one.entry.path))
    else:
        head = [HEADER] if output.mode == "human" else []
        output.table(
            [*head, *(_row(output, one) for one in run.checkpoints)], right=(1, 3), wrap=(5,)
        )


def _document(run: Run) -> dict[str, object]:
    return {
        "root": str(run.root),
        "series": list(run.series),
        "checkpoints": [one.to_json() for one in run.checkpoints],
        "others": list(run.others),
    }


def _row(output: Output, one: Checkpoint) -> tuple[str, ...]:
    from ckptctl.ops.runs.listing import rfc3339

    found, nbytes = one.candidate, one.entry.nbytes
    state = found.state + (f": {found.problem}" if found.problem else "")
    return (
        found.name,
        str(found.step),
        rfc3339(one.entry.time),
        format_bytes(nbytes) if output.mode == "human" else str(nbytes),
        one.format or "-",
        state,
        ", ".join(found.pinned),
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ls", epilog=EPILOG, no_args_is_help=True)(ls)
