"""``ckptctl convert SRC DST --to FORMAT``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from ckptctl.cli.commands import DryRun, Json, Quiet, Typed, Yes, command
from ckptctl.cli.conversions import Published, by_reason, in_short, print_plan, print_result
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.cli.tables import counted
from ckptctl.errors import PartialError, RefusedError, listed
from ckptctl.errors import command as suggested
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.options import Destination, Source
from ckptctl.ops.ranks.coordinator import Coordinator, together
from ckptctl.units import format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.conversion.convert import ConversionPlan

T = TypeVar("T")
SCHEMA = "ckptctl.convert/1"


@command(
    "ckptctl convert llama-3-8b out-dcp --to dcp",
    "ckptctl convert out-dcp out-meta --to meta --mp 2",
    "ckptctl convert out-meta out-hf --to hf --dtype bf16 --verify",
    "ckptctl convert out-dcp model.pt --to torch --dry-run",
    "ckptctl convert out-dcp out-titan --to dcp --to-layout torchtitan@0.3",
    "ckptctl convert deepseek-fp8 deepseek-bf16 --to hf --dequantize bf16",
    "ckptctl convert s3://models/step-2000 hf://org/model --to hf",
)
def convert(
    typed: Typed,
    src: Source,
    dst: Destination,
    options: ConversionOptions,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint to another format, layout or dtype.

    SRC is never changed. DST appears whole, in one step, or not at all.
    """
    from ckptctl.ops.conversion.convert import plan_conversion

    ranks = coordinator()
    output = output_of(ranks, json, quiet)
    plan = planned(ranks, lambda: plan_conversion(src, dst, options), None if dry_run else dst)
    carry_out(typed, output, plan, dst, dry_run, yes, Published(SCHEMA), ranks)


def planned(ranks: Coordinator, plan: Callable[[], T], dst: Path | None) -> T:
    """Return what is planned, the same on all ranks.

    Args:
        ranks: Those that will carry it out.
        plan: Makes it.
        dst: What an earlier run may have left something beside, which goes if its output is there
            already; None: nothing is touched.
    """
    from ckptctl.storage.publish import sweeping

    with sweeping(dst if ranks.rank == 0 else None):
        return together(ranks, plan)


def carry_out(
    typed: Typed,
    output: Output,
    plan: ConversionPlan,
    dst: Path,
    dry_run: bool,
    yes: bool,
    published: Published,
    ranks: Coordinator,
) -> None:
    """Show *plan*, or carry it out and show the result.

    Args:
        typed: The command line.
        output: Where to print.
        plan: What to do.
        dst: The destination as it was typed.
        dry_run: Whether nothing is to be done.
        yes: Whether to upload to the Hub without asking.
        published: What ``--json`` prints.
        ranks: Those that carry it out.
    """
    from ckptctl.ops.conversion.convert import run_conversion
    from ckptctl.storage.remote.urls import HUB, scheme_of

    output.statement(plan.statement)
    for warning in plan.warnings:
        output.warning(warning)
    for note in plan.notes:
        output.note(note)
    if dry_run:
        print_plan(output, plan, dst, published)
        if plan.nbytes > plan.free_bytes and not (plan.options.resume or plan.upload):
            output.warning("there is not enough space for the output: it would be refused")
        together(ranks, lambda: _require_all(plan, dst))
        output.hint(f"run it with `{typed.again()}`")
        return
    for reason, names in by_reason(plan.left_out):
        output.note(f"left out, {reason}: {in_short(names)}")
    if scheme_of(plan.plan.target) == HUB:
        _announce(output, plan, dst, yes)
    ending = "verifying" if plan.options.verify else "syncing"
    with (
        _resumable(output, plan.options.resume),
        progress(output, "copying", plan.nbytes, ending) as advance,
    ):
        result = run_conversion(plan, advance, ranks)
    print_result(output, result, dst, published)
    together(ranks, lambda: _require_all(plan, dst))
    output.hint(f"look at it with {suggested('inspect', dst)}")


def _announce(output: Output, plan: ConversionPlan, dst: Path, yes: bool) -> None:
    """Say which files others will see, and go on if the user, where there is one, agrees.

    Raises:
        RefusedError: The user does not.
    """
    if output.mode != "json":
        output.report(f"to be uploaded to {dst}:")
        for path, nbytes in plan.files:
            output.report(f"  {path}  {format_bytes(nbytes)}")
    question = f"Upload {counted(len(plan.files), 'file')} to {dst}?"
    if output.asks and not yes and not typer.confirm(question, err=True):
        raise RefusedError("nothing was uploaded", where=str(dst))


@contextmanager
def _resumable(output: Output, resume: bool) -> Iterator[None]:
    """Say after Ctrl-C what becomes of the work that was done."""
    try:
        yield
    except KeyboardInterrupt:
        if resume:
            output.note("what was copied is kept; the same command goes on from there")
        raise


def _require_all(plan: ConversionPlan, dst: Path) -> None:
    """Raise PartialError if something is missing, after all that is whole has been dealt with."""
    if plan.missing:
        found = [reason for reason, _ in by_reason(plan.missing)]
        raise PartialError(
            f"the source is not whole: {counted(len(plan.missing), 'item')} not in {dst}",
            where=plan.source.path,
            why=f"{listed(list(plan.missing))}: {found[0]}"
            + (f"; and {len(found) - 1:,} other reasons" if found[1:] else ""),
            hint="`--json` lists all of them; "
            f"{suggested('verify', plan.source.path)} says what is wrong with the source",
        )
