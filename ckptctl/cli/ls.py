"""``ckptctl ls ROOT``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.cli.commands import Json, Quiet, command
from ckptctl.cli.output import Output, Row
from ckptctl.errors import listed
from ckptctl.ops.options import RootOrHere
from ckptctl.units import counted, format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.runs.health import Checkpoint
    from ckptctl.ops.runs.listing import RunFolder

SHOWN = 3
WITHOUT_STEP = "`{}` is passed over: it does not say at which step it was saved"
LACKS = "lacks `{}`, which most others have"
HEADER = ("name", "step", "time", "size", "format", "state", "protected by")


@command(
    "ckptctl ls runs/llama",
    "ckptctl ls runs/llama -q",
    "ckptctl ls runs/llama --json | jq '.checkpoints[] | select(.state == \"complete\").step'",
    prints="ckptctl.ops.runs.listing:RunFolder",
    bare=True,
)
def ls(root: RootOrHere = Path(), json: Json = False, quiet: Quiet = False) -> None:
    """List the checkpoints of a run, and which are complete.

    With step, time, size, format, and what protects each from being pruned.
    """
    from ckptctl.ops.runs.entries import unstated
    from ckptctl.ops.runs.listing import read_run

    output = Output(json, quiet)
    run = read_run(root)
    output.answer(
        "ls",
        run,
        names=(one.path for one in run.checkpoints),
        rows=rows(output, run),
        human=lambda: _show(output, run),
    )
    for name in unstated(run.root):
        output.note(WITHOUT_STEP.format(name))


def _show(output: Output, run: RunFolder) -> None:
    """Print the table, and how much else lies there that is named as no checkpoint is."""
    from ckptctl.ops.runs.protections import POINTERS

    show_run(output, run)
    others = [name for name in run.others if name not in POINTERS]
    if others:
        count = counted(len(others), "other name")
        output.report(f"{count} not recognised as checkpoints: {listed(others, SHOWN)}", "dim")


def show_run(output: Output, run: RunFolder) -> None:
    """Print the checkpoints of a run as a table, with a header on a terminal."""
    head = [HEADER] if output.mode == "human" else []
    output.table([*head, *rows(output, run)], right=(1, 3), wrap=(5,))


def rows(output: Output, run: RunFolder) -> Iterator[Row]:
    """Yield a row for each checkpoint of a run."""
    newest = run.newest
    return (_row(output, one, one.name in newest) for one in run.checkpoints)


def _row(output: Output, one: Checkpoint, newest: bool) -> tuple[str, ...]:
    from ckptctl.ops.runs.health import rfc3339

    nbytes = one.entry.nbytes
    state = one.state + (f": {one.problem}" if one.problem else "")
    state += f", but {LACKS.format(one.lacks)}" if one.lacks else ""
    return (
        one.name,
        str(one.step),
        rfc3339(one.entry.time),
        format_bytes(nbytes) if output.mode == "human" else str(nbytes),
        one.format or "-",
        state,
        ", ".join((*_protection(one), *(["newest"] if newest else []))),
    )


def _protection(one: Checkpoint) -> tuple[str, ...]:
    """Return what protects a checkpoint; of a link, where it leads."""
    link, said = one.entry.link, one.protection
    return (*said[:-1], f"{said[-1]} to `{link}`") if link else said
