"""``ckptctl ls ROOT``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import VERDICT_STYLES, Printer, Row
from ckptctl.cli.tables import Column, StyledText
from ckptctl.errors import StorageError, quote_names
from ckptctl.shared_options import RootOrHere
from ckptctl.units import format_bytes, format_rfc3339, pluralize

if TYPE_CHECKING:
    from ckptctl.runs.health import Checkpoint
    from ckptctl.runs.listing import RunFolder

MAX_SHOWN_NAMES = 3
MISSING_STEP_NOTE = "skipped `{}`: it does not record the step at which it was saved"
MISSING_PART_NOTE = "has no `{}`, which most of the other checkpoints have"
COLUMNS = (
    tables.name_column("name", keep=24),
    tables.number_column("step", drop=1),
    Column("time", drop=3),
    tables.number_column("size"),
    Column("format", drop=2),
    tables.prose_column("verdict", keep=40),
    tables.prose_column("protected by", drop=5),
    tables.prose_column("metrics", drop=4),
)


@command(
    "ckptctl ls runs/llama",
    "ckptctl ls runs/llama -q",
    "ckptctl ls runs/llama --json | jq '.checkpoints[] | select(.verdict == \"complete\").step'",
    prints="ckptctl.runs.listing:RunFolder",
    runs_without_arguments=True,
)
def ls(
    root: RootOrHere = Path(), no_header: NoHeader = False, json: Json = False, quiet: Quiet = False
) -> None:
    """List the checkpoints of a training run and their verdicts.

    Shows the step, time, size, format and metrics of each checkpoint, and what protects it from
    pruning.
    """
    from ckptctl.runs.entries import list_last_ckpts_without_step
    from ckptctl.runs.listing import read_run

    output = Printer(json, quiet, header=not no_header)
    run = read_run(root)
    output.print_answer(
        "ls",
        run,
        names=(checkpoint.path for checkpoint in run.checkpoints),
        rows=make_run_rows(output, run),
        columns=COLUMNS,
        human=lambda: _show_result(output, run),
    )
    for name in list_last_ckpts_without_step(run.root):
        output.print_note(MISSING_STEP_NOTE.format(name))
    for note in run.pointers.iterate_dangling_notes():
        output.print_note(note)
    if any(checkpoint.read_failed for checkpoint in run.checkpoints):
        raise typer.Exit(StorageError.exit_code)


def _show_result(output: Printer, run: RunFolder) -> None:
    """Print the checkpoints of a run, and mention other entries of its folder."""
    from ckptctl.runs.entries import INITIAL_WEIGHTS
    from ckptctl.runs.protections import POINTERS

    show_run(output, run)
    ignored = [name for name in run.others if name not in (*POINTERS, INITIAL_WEIGHTS)]
    if INITIAL_WEIGHTS in run.others:
        output.print_to_stderr(
            f"`{INITIAL_WEIGHTS}` contains weights from before the first step of the run", "dim"
        )
    if ignored:
        count = pluralize(len(ignored), "other entry", "other entries")
        output.print_to_stderr(f"ignored {count}: {quote_names(ignored, MAX_SHOWN_NAMES)}", "dim")


def show_run(output: Printer, run: RunFolder) -> None:
    """Print the checkpoints of a run as a table."""
    output.print_table(make_run_rows(output, run), COLUMNS)


def make_run_rows(output: Printer, run: RunFolder) -> Iterator[Row]:
    """Yield a row for each checkpoint of a run."""
    newest = run.newest
    return (
        _make_row(output, checkpoint, checkpoint.name in newest) for checkpoint in run.checkpoints
    )


def _make_row(output: Printer, checkpoint: Checkpoint, newest: bool) -> Row:
    nbytes, human = checkpoint.entry.nbytes, output.mode == "human"
    state = checkpoint.state + (f": {checkpoint.problem}" if checkpoint.problem else "")
    state += f", but {MISSING_PART_NOTE.format(checkpoint.lacks)}" if checkpoint.lacks else ""
    # On a terminal, it is part of the verdict, because a separate column would be mostly empty.
    state += ", newest" if newest and human else ""
    protection = checkpoint.protection
    if link := checkpoint.entry.link:
        protection = (*protection[:-1], f"{protection[-1]} to `{link}`")
    return (
        checkpoint.name,
        str(checkpoint.step),
        format_rfc3339(checkpoint.entry.time),
        format_bytes(nbytes) if human else str(nbytes),
        checkpoint.format or "-",
        StyledText(state, "missing" if checkpoint.writing else VERDICT_STYLES[checkpoint.verdict]),
        ", ".join((*protection, *(["newest"] if newest and not human else []))),
        ", ".join(f"{n} {x:g}" if human else f"{n} {x!r}" for n, x in checkpoint.metrics.items()),
    )
