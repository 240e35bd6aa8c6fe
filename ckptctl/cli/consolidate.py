"""``ckptctl consolidate SRC [DST]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli.commands import DryRun, Json, Quiet, Typed, Yes, command
from ckptctl.cli.convert import carry_out, planned
from ckptctl.cli.output import Output
from ckptctl.cli.ranks import coordinator, output_of
from ckptctl.errors import UsageError
from ckptctl.ops.conversion.options import WriteOptions
from ckptctl.ops.option_checks import new_place
from ckptctl.ops.options import FORMATS, Source, target_format
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.options import Argument, Option
from ckptctl.results import Result
from ckptctl.units import counted, format_bytes

if TYPE_CHECKING:
    from ckptctl.ops.consolidate_metadata import MetadataPlan

METADATA_OPTIONS = ("src", "dst", "metadata_only", "dry_run", "json", "quiet")


@command(
    "ckptctl consolidate global_step1000 model",
    "ckptctl consolidate step-100 --metadata-only",
    "ckptctl consolidate global_step1000 model --weights module --max-shard-size 2GB",
    "ckptctl consolidate fsdp-ranks whole --to dcp --optimizer",
    "ckptctl consolidate step-100 model --dry-run",
    prints="ckptctl.ops.conversion.plan:ConversionPlan | "
    "ckptctl.ops.conversion.plan:ConversionResult, "
    "--metadata-only: ckptctl.ops.consolidate_metadata:MetadataPlan | "
    "ckptctl.ops.consolidate_metadata:MetadataResult",
    without=(
        *("converter", "sizes", "from_layout", "to_layout", "dequantize", "only", "mp", "like"),
        *("untie", "vocab_size", "lora_alpha"),
    ),
)
def consolidate(
    typed: Typed,
    src: Source,
    *,
    dst: Annotated[
        Path | None,
        Argument("What to write; none with --metadata-only.", metavar="DST", check=new_place),
    ] = None,
    to: Annotated[
        str | None,
        target_format(f"Format to write: {FORMATS}.  [default: hf; dcp with --optimizer]"),
    ] = None,
    metadata_only: Annotated[
        bool, Option("Add the .metadata that ranks left out; move no tensor.")
    ] = False,
    optimizer: Annotated[bool, Option("Keep the optimizer state: --to dcp or torch.")] = False,
    options: WriteOptions,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make one whole checkpoint of what ranks left in pieces.

    The form is recognised; no framework of the trainer is needed and none of its classes is
    loaded. Names stay as the trainer wrote them. Whatever is missing is named, and nothing is
    written, unless --allow-missing asks for what is whole.
    """
    from ckptctl.ops.conversion.convert import plan_conversion

    ranks = coordinator()
    output = output_of(ranks, json, quiet)
    if metadata_only:
        _require_meaning(typed)
        on_first(ranks, lambda: _metadata(typed, output, src, dst, dry_run))
        return
    if dst is None:
        raise UsageError("DST is missing", hint="only --metadata-only needs none")
    asked = options.to_format(
        to or ("dcp" if optimizer else "hf"), only="all" if optimizer else "model"
    )
    plan = planned(ranks, lambda: plan_conversion(src, dst, asked), None if dry_run else dst)
    carry_out("consolidate", typed, output, plan, dst, dry_run, yes, ranks)


def _require_meaning(typed: Typed) -> None:
    """Raise UsageError if there is an option that says how tensors are to be written."""
    parameters = consolidate.parameters().values()
    for one in (one for many in parameters for one in many or ()):
        if one.name in typed.given and one.name not in METADATA_OPTIONS:
            raise UsageError(
                f"{one.shown} has no meaning with --metadata-only", why="no tensor is written"
            )


def _metadata(typed: Typed, output: Output, src: Path, dst: Path | None, dry_run: bool) -> None:
    from ckptctl.ops.consolidate_metadata import plan_metadata, run_metadata

    if dst is not None:
        raise UsageError("--metadata-only adds a file to SRC and takes no DST", where=str(dst))
    plan = plan_metadata(src)
    _state(output, plan)
    if dry_run:
        _show(output, plan, plan, "would write")
        output.hint(f"run it with `{typed.again()}`")
        return
    done = run_metadata(plan)
    _show(output, plan, done, "wrote")
    output.hint(f"any world size can load {src} now")


def _state(output: Output, plan: MetadataPlan) -> None:
    output.statement(
        f"dcp-rank-local · {counted(plan.ranks, 'rank')} · {counted(plan.tensors, 'tensor')} in "
        f"{counted(plan.chunks, 'chunk')}, {format_bytes(plan.data_bytes)}"
    )
    for note in plan.notes:
        output.note(note)


def _show(output: Output, plan: MetadataPlan, printed: Result, verb: str) -> None:
    size = format_bytes(plan.nbytes)
    output.answer(
        "consolidate",
        printed,
        names=(plan.target,),
        rows=(("target", plan.target), ("ranks", plan.ranks), ("bytes", plan.nbytes)),
        human=lambda: output.line(f"{verb} {plan.target} ({size})", "bold"),
    )
