"""``ckptctl doctor [DIR]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli.commands import Json, command, only_quiet
from ckptctl.cli.output import Printer, Style
from ckptctl.option_checks import check_location
from ckptctl.options import Argument
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.verbs.doctor import Diagnosis, Status

BROKEN = 1
STYLES: dict[Status, Style | None] = {"ok": None, "warn": "missing", "fail": "damaged"}


@command(
    "ckptctl doctor",
    "ckptctl doctor /mnt/checkpoints",
    "ckptctl doctor --json | jq '.checks[] | select(.status != \"ok\")'",
    prints="ckptctl.verbs.doctor:Diagnosis",
    bare=True,
)
def doctor(
    directory: Annotated[
        Path,
        Argument(
            "Folder of checkpoints to test.  [default: current directory]",
            metavar="DIR",
            check=check_location,
        ),
    ] = Path(),
    json: Json = False,
    quiet: Annotated[bool, only_quiet("Print only the names of checks that are not OK.")] = False,
) -> None:
    """Check the installation and a folder for problems.

    Plug-ins and the environment are checked as well. File operations are tested in a hidden folder
    in DIR, which is removed afterwards. The exit code is 1 if something is broken, otherwise 0.
    """
    from ckptctl.verbs.doctor import diagnose_directory as op

    output = Printer(json, quiet)
    found = op(directory)
    output.answer(
        "doctor",
        found,
        names=(one.name for one in found.checks if one.status != "ok"),
        rows=((one.status, one.group, one.name, one.found, one.hint or "") for one in found.checks),
        human=lambda: _show(output, found),
    )
    if not found.healthy:
        raise typer.Exit(BROKEN)


def _show(output: Printer, found: Diagnosis) -> None:
    width = max(len(one.name) for one in found.checks)
    group = ""
    for one in found.checks:
        if one.group != group:
            output.line(one.group, "bold")
            group = one.group
        output.line(f"  {one.status:4}  {one.name:{width}}  {one.found}", STYLES[one.status])
        if one.hint:
            output.line(f"        {'':{width}}  {one.hint}", "dim")
    counts = ["no problems" if found.healthy else pluralize(found.failures, "problem")]
    if found.warnings:
        counts.append(pluralize(found.warnings, "warning"))
    output.line(", ".join(counts), "bold")
