"""``ckptctl latest ROOT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ckptctl.cli.commands import Json, command, only_quiet
from ckptctl.cli.ls import LACKS, WITHOUT_STEP
from ckptctl.cli.output import Printer
from ckptctl.shared_options import RootOrHere
from ckptctl.units import format_rfc3339


@command(
    "ckptctl latest runs/llama",
    'ckptctl convert "$(ckptctl latest runs/llama)" out --to hf',
    "ckptctl latest runs/llama --json | jq .step",
    prints="ckptctl.runs.listing:Newest",
    bare=True,
)
def latest(
    root: RootOrHere = Path(),
    json: Json = False,
    quiet: Annotated[bool, only_quiet("Omit the notes on skipped newer checkpoints.")] = False,
) -> None:
    """Print the path of a run's newest complete checkpoint.

    Newer checkpoints that are skipped are reported on stderr with the reason. The command fails if
    the verdict on a newer checkpoint is unknown, because it may be complete.
    """
    from ckptctl.runs.entries import list_last_without_step
    from ckptctl.runs.listing import find_newest
    from ckptctl.runs.protections import Pointers

    output = Printer(json, quiet)
    found = find_newest(root)
    chosen = found.chosen
    if json:
        output.document("latest", found)
        return
    output.line(str(chosen.path))
    output.flush()
    if chosen.lacks:
        output.note(f"`{chosen.name}` {LACKS.format(chosen.lacks)}")
    for one in found.skipped:
        output.note(f"skipped {one.name}: {one.problem}")
    for name in list_last_without_step(chosen.path.parent):
        output.note(WITHOUT_STEP.format(name))
    for one in found.others:
        mine, other = format_rfc3339(chosen.entry.time), format_rfc3339(one.entry.time)
        times = f"it was written {other}, and `{chosen.name}` was written {mine}"
        output.note(f"skipped {one.name} of another series: {times}")
    for note in (*found.doubts, *Pointers.read(chosen.path.parent).iterate_dangling()):
        output.note(note)
