"""``ckptctl ls ROOT``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import VERDICTS, Printer, Row
from ckptctl.cli.tables import Column, Painted
from ckptctl.errors import StorageError, quote_names
from ckptctl.shared_options import RootOrHere
from ckptctl.units import format_bytes, format_rfc3339, pluralize

if TYPE_CHECKING:
    from ckptctl.runs.health import Checkpoint
    from ckptctl.runs.listing import RunFolder

SHOWN = 3
WITHOUT_STEP = "skipped `{}`: it does not record the step at which it was saved"
LACKS = "has no `{}`, which most of the other checkpoints have"
COLUMNS = (
    tables.name("name", keep=24),
    tables.number("step", drop=1),
    Column("time", drop=3),
    tables.number("size"),
    Column("format", drop=2),
    tables.prose("verdict", keep=40),
    tables.prose("protected by", drop=5),
    tables.prose("metrics", drop=4),
)


@command(
    "ckptctl ls runs/llama",
    "ckptctl ls runs/llama -q",
    "ckptctl ls runs/llama --json | jq '.checkpoints[] | select(.verdict == \"complete\").step'",
    prints="ckptctl.runs.listing:RunFolder",
    bare=True,
)
def ls(
    root: RootOrHere = Path(), no_header: NoHeader = False, json: Json = False, quiet: Quiet = False
) -> None:
    """List the checkpoints of a training run and their verdicts.

    Shows the step, time, size, format and metrics of each checkpoint, and what protects it from
    pruning.
    """
    from ckptctl.runs.entries import list_last_without_step
    from ckptctl.runs.listing import read_run

    output = Printer(json, quiet, header=not no_header)
    run = read_run(root)
    output.answer(
        "ls",
        run,
        names=(one.path for one in run.checkpoints),
        rows=rows(output, run),
        columns=COLUMNS,
        human=lambda: _show(output, run),
    )
    for name in list_last_without_step(run.root):
        output.note(WITHOUT_STEP.format(name))
    for note in run.pointers.iterate_dangling():
        output.note(note)
    if any(one.read_failed for one in run.checkpoints):
        raise typer.Exit(StorageError.exit_code)


def _show(output: Printer, run: RunFolder) -> None:
    """Print the table, and mention entries of the folder that are not checkpoints."""
    from ckptctl.runs.entries import INITIAL_WEIGHTS
    from ckptctl.runs.protections import POINTERS

    show_run(output, run)
    others = [name for name in run.others if name not in (*POINTERS, INITIAL_WEIGHTS)]
    if INITIAL_WEIGHTS in run.others:
        output.report(
            f"`{INITIAL_WEIGHTS}` contains weights from before the first step of the run", "dim"
        )
    if others:
        count = pluralize(len(others), "other entry", "other entries")
        output.report(f"ignored {count}: {quote_names(others, SHOWN)}", "dim")


def show_run(output: Printer, run: RunFolder) -> None:
    """Print the checkpoints of a run as a table."""
    output.table(rows(output, run), COLUMNS)


def rows(output: Printer, run: RunFolder) -> Iterator[Row]:
    """Yield a row for each checkpoint of a run."""
    newest = run.newest
    return (_row(output, one, one.name in newest) for one in run.checkpoints)


def _row(output: Printer, one: Checkpoint, newest: bool) -> Row:
    nbytes, human = one.entry.nbytes, output.mode == "human"
    state = one.state + (f": {one.problem}" if one.problem else "")
    state += f", but {LACKS.format(one.lacks)}" if one.lacks else ""
    # On a terminal, it is part of the verdict, because a separate column would be mostly empty.
    state += ", newest" if newest and human else ""
    protection = one.protection
    if link := one.entry.link:
        protection = (*protection[:-1], f"{protection[-1]} to `{link}`")
    return (
        one.name,
        str(one.step),
        format_rfc3339(one.entry.time),
        format_bytes(nbytes) if human else str(nbytes),
        one.format or "-",
        Painted(state, "missing" if one.writing else VERDICTS[one.verdict]),
        ", ".join((*protection, *(["newest"] if newest and not human else []))),
        ", ".join(f"{n} {x:g}" if human else f"{n} {x!r}" for n, x in one.metrics.items()),
    )
