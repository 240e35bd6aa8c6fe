"""``ckptctl latest ROOT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ckptctl.cli.commands import Json, command, make_quiet_option
from ckptctl.cli.ls import MISSING_PART_NOTE, MISSING_STEP_NOTE
from ckptctl.cli.output import Printer
from ckptctl.shared_options import RootOrHere
from ckptctl.units import format_rfc3339


@command(
    "ckptctl latest runs/llama",
    'ckptctl convert "$(ckptctl latest runs/llama)" out --to hf',
    "ckptctl latest runs/llama --json | jq .step",
    prints="ckptctl.runs.listing:Newest",
    runs_without_arguments=True,
)
def latest(
    root: RootOrHere = Path(),
    json: Json = False,
    quiet: Annotated[
        bool, make_quiet_option("Omit the notes on skipped newer checkpoints.")
    ] = False,
) -> None:
    """Print the path of a run's newest complete checkpoint.

    Newer checkpoints that are skipped are reported on stderr with the reason. The command fails if
    the verdict on a newer checkpoint is unknown, because it may be complete.
    """
    from ckptctl.runs.entries import list_last_ckpts_without_step
    from ckptctl.runs.listing import find_newest_checkpoint
    from ckptctl.runs.protections import Pointers

    output = Printer(json, quiet)
    result = find_newest_checkpoint(root)
    chosen = result.chosen
    if json:
        output.print_document("latest", result)
        return
    output.print_line(str(chosen.path))
    output.flush_answer()
    if chosen.lacks:
        output.print_note(f"`{chosen.name}` {MISSING_PART_NOTE.format(chosen.lacks)}")
    for checkpoint in result.skipped:
        output.print_note(f"skipped {checkpoint.name}: {checkpoint.problem}")
    for name in list_last_ckpts_without_step(chosen.path.parent):
        output.print_note(MISSING_STEP_NOTE.format(name))
    for checkpoint in result.others:
        own_time, other_time = (
            format_rfc3339(chosen.entry.time),
            format_rfc3339(checkpoint.entry.time),
        )
        times = f"it was written {other_time}, and `{chosen.name}` was written {own_time}"
        output.print_note(f"skipped {checkpoint.name} of another series: {times}")
    for note in (*result.doubts, *Pointers.read(chosen.path.parent).iterate_dangling_notes()):
        output.print_note(note)
