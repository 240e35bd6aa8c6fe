"""``ckptctl browse PATH [OTHER]``."""

from __future__ import annotations

import sys
from typing import Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import Printer
from ckptctl.errors import UsageError, format_command
from ckptctl.option_checks import AnyPath, check_location
from ckptctl.options import Argument
from ckptctl.shared_options import Checkpoint
from ckptctl.verbs.inspection.inspect_options import InspectOptions

NOT_ABOUT_BROWSING = (
    *("stats", "include", "reference"),
    *("fit", "context", "kv_dtype", "tp", "pp", "ep"),
)
"""Options of ``inspect`` that do not affect the tree."""
COLUMNS = tables.titled_columns("name", "tensors", "bytes")


@command(
    "ckptctl browse step-2000",
    "ckptctl browse hf://org/model@main",
    "ckptctl browse step-1000 step-2000            (both side by side)",
    prints="ckptctl.verbs.browsing:Contents",
    omitted_fields=(
        "stats",
        "include",
        "reference",
        "fit",
        "context",
        "kv_dtype",
        "tp",
        "pp",
        "ep",
    ),
)
def browse(
    path: Checkpoint,
    other: Annotated[
        AnyPath | None,
        Argument("Checkpoint to show next to it.", metavar="OTHER", check=check_location),
    ] = None,
    *,
    options: InspectOptions,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Browse the tensors of a checkpoint in the terminal.

    Shows modules and tensors with their sizes, where their bytes are, and statistics on request.
    Press ? for the keys. Without a terminal, only the top level is printed.
    """
    from ckptctl.verbs import browsing

    output = Printer(json, quiet, header=not no_header)
    # textual draws on stderr.
    streams = (sys.stdin, sys.stdout, sys.stderr)
    is_interactive = output.mode == "human" and all(stream.isatty() for stream in streams)
    if other is not None and not is_interactive:
        raise UsageError(
            "two checkpoints are only shown in a terminal",
            hint=f"{format_command('diff', path, other, options=['--structure'])} compares them",
        )
    if is_interactive:
        from ckptctl.installed import require_package  # only for a terminal

        require_package("textual", "`browse`")
    paths = [path] if other is None else [path, other]
    checkpoints = [browsing.open_for_browsing(item, options) for item in paths]
    if is_interactive:
        from ckptctl.cli.views.browser import run_browser  # imports textual

        run_browser(checkpoints)
        return
    contents = browsing.list_contents(checkpoints[0])
    if json:
        output.print_document("browse", contents)
    elif quiet:
        for entry in contents.entries:
            output.print_line(entry.name)
    else:
        rows = [(entry.name, str(entry.tensors), str(entry.nbytes)) for entry in contents.entries]
        output.print_table(rows, COLUMNS)
