"""``ckptctl consolidate SRC [DST]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli.commands import InPanel, RunOptions, command
from ckptctl.cli.convert import make_plan, run_or_show_plan
from ckptctl.cli.output import Printer
from ckptctl.cli.ranks import join_ranks, make_rank_printer
from ckptctl.cli.typed_paths import format_command_line, restore_typed_paths
from ckptctl.conversion.conversion_options import NON_CONSOLIDATION_OPTIONS, ConsolidationOptions
from ckptctl.option_checks import check_new_location
from ckptctl.ranks.coordinator import run_on_rank_zero
from ckptctl.results import Result
from ckptctl.run_options import RunBatchOptions
from ckptctl.shared_options import Source
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize

if TYPE_CHECKING:
    from ckptctl.verbs.consolidate_metadata import MetadataPlan


@command(
    "ckptctl consolidate global_step1000 model",
    "ckptctl consolidate step-100 --metadata-only",
    "ckptctl consolidate global_step1000 model --weights module --max-shard-size 2GB",
    "ckptctl consolidate fsdp-ranks merged --to dcp --optimizer",
    "ckptctl consolidate step-100 model --dry-run",
    "ckptctl consolidate runs/llama models --each --keep-last 5",
    prints="ckptctl.conversion.plan:ConversionPlan | "
    "ckptctl.conversion.plan:ConversionResult, "
    "--metadata-only: ckptctl.verbs.consolidate_metadata:MetadataPlan | "
    "ckptctl.verbs.consolidate_metadata:MetadataResult, "
    "--each: ckptctl.verbs.run_conversion_result:RunConversionPlan | "
    "ckptctl.verbs.run_conversion_result:RunConversionResult",
    omitted_fields=NON_CONSOLIDATION_OPTIONS,
)
def consolidate(
    src: Source,
    *,
    options: ConsolidationOptions,
    run: RunOptions,
    batch: Annotated[RunBatchOptions, InPanel("Run")],
) -> None:
    """Merge per-rank shards into one checkpoint.

    The source format is detected. The training framework is not required, and its classes are never
    loaded. Keys are not renamed. If tensors are missing, they are listed, and nothing is written
    unless --allow-missing is given. With --each, SRC is the folder of a run, and each of its
    checkpoints becomes a folder in DST.
    """
    if batch.each:
        from ckptctl.cli.run_batches import convert_run  # only needed for runs

        dst = check_new_location(options.dst or "")
        convert_run("consolidate", src, dst, options.to_conversion_options(), batch, run)
        return
    from ckptctl.conversion.convert import plan_conversion

    ranks = join_ranks(run.single_process, run.json)
    output = make_rank_printer(ranks, run.json, run.quiet)
    if options.metadata_only:
        run_on_rank_zero(ranks, lambda: _run_metadata_only(output, src, run.dry_run))
        return
    dst, conversion_options = Path(options.dst or ""), options.to_conversion_options()
    plan = make_plan(
        ranks, lambda: plan_conversion(src, dst, conversion_options), None if run.dry_run else dst
    )
    run_or_show_plan("consolidate", output, plan, dst, run, ranks)


def _run_metadata_only(output: Printer, src: TreePath, dry_run: bool) -> None:
    from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata

    plan = plan_metadata(src)
    output.print_statement(
        f"dcp-rank-local · {pluralize(plan.ranks, 'rank')} · "
        f"{pluralize(plan.tensors, 'tensor')} in "
        f"{pluralize(plan.chunks, 'chunk')}, {format_bytes(plan.data_bytes)}"
    )
    for note in plan.notes:
        output.print_note(note)
    if dry_run:
        _show_result(output, plan, plan, "would write")
        output.print_hint(f"run it with `{format_command_line()}`")
        return
    result = run_metadata(plan)
    _show_result(output, plan, result, "wrote")
    output.print_hint(f"`{src}` can now be loaded with any world size")


def _show_result(output: Printer, plan: MetadataPlan, printed: Result, verb: str) -> None:
    size = format_bytes(plan.nbytes)
    output.print_answer(
        "consolidate",
        printed,
        names=(plan.target,),
        rows=(("target", plan.target), ("ranks", plan.ranks), ("bytes", plan.nbytes)),
        human=lambda: output.print_line(
            f"{verb} {restore_typed_paths(str(plan.target))} ({size})", "bold"
        ),
    )
