"""``ckptctl doctor [DIR]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl.cli.commands import Json, command, make_quiet_option
from ckptctl.cli.output import Printer, Style
from ckptctl.option_checks import check_location
from ckptctl.options import Argument
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.verbs.doctor import Diagnosis, Status

EXIT_BROKEN = 1
STATUS_STYLES: dict[Status, Style | None] = {"ok": None, "warn": "missing", "fail": "damaged"}


@command(
    "ckptctl doctor",
    "ckptctl doctor /mnt/checkpoints",
    "ckptctl doctor --json | jq '.checks[] | select(.status != \"ok\")'",
    prints="ckptctl.verbs.doctor:Diagnosis",
    runs_without_arguments=True,
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
    quiet: Annotated[
        bool, make_quiet_option("Print only the names of checks that are not OK.")
    ] = False,
) -> None:
    """Check the installation and a folder for problems.

    Plug-ins and the environment are checked as well. File operations are tested in a hidden folder
    in DIR, which is removed afterwards. The exit code is 1 if something is broken, otherwise 0.
    """
    from ckptctl.verbs.doctor import diagnose_directory as op

    output = Printer(json, quiet)
    diagnosis = op(directory)
    output.print_answer(
        "doctor",
        diagnosis,
        names=(check.name for check in diagnosis.checks if check.status != "ok"),
        rows=(
            (check.status, check.group, check.name, check.found, check.hint or "")
            for check in diagnosis.checks
        ),
        human=lambda: _show_result(output, diagnosis),
    )
    if not diagnosis.healthy:
        raise typer.Exit(EXIT_BROKEN)


def _show_result(output: Printer, diagnosis: Diagnosis) -> None:
    width = max(len(check.name) for check in diagnosis.checks)
    group = ""
    for check in diagnosis.checks:
        if check.group != group:
            output.print_line(check.group, "bold")
            group = check.group
        output.print_line(
            f"  {check.status:4}  {check.name:{width}}  {check.found}", STATUS_STYLES[check.status]
        )
        if check.hint:
            output.print_line(f"        {'':{width}}  {check.hint}", "dim")
    counts = ["no problems" if diagnosis.healthy else pluralize(diagnosis.failures, "problem")]
    if diagnosis.warnings:
        counts.append(pluralize(diagnosis.warnings, "warning"))
    output.print_line(", ".join(counts), "bold")
