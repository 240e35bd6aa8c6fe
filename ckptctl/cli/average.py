"""``ckptctl average SRC... DST``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ckptctl.cli.commands import RunOptions, command
from ckptctl.cli.convert import make_plan, run_or_show_plan
from ckptctl.cli.ranks import join_ranks, make_rank_printer
from ckptctl.conversion.conversion_options import NON_AVERAGE_OPTIONS, AverageOptions
from ckptctl.option_checks import check_locations
from ckptctl.options import Argument
from ckptctl.ranks.coordinator import run_on_all_ranks
from ckptctl.shared_options import Destination
from ckptctl.tree import TreePath
from ckptctl.units import pluralize


@command(
    "ckptctl average step-800 step-900 step-1000 averaged",
    "ckptctl average runs/llama averaged --last 5 --to hf",
    "ckptctl average runs/llama averaged --last 4 --schedule 1-sqrt --verify",
    "ckptctl average step-800 step-900 step-1000 averaged --weights 1,1,2 --dry-run",
    "ckptctl average runs/llama averaged --every 1000 --ema 0.9 --dtype bf16",
    prints="ckptctl.conversion.plan:ConversionPlan | "
    "ckptctl.conversion.plan:ConversionResult & "
    "ckptctl.verbs.averaging:AveragePlan",
    omitted_fields=NON_AVERAGE_OPTIONS,
)
def average(
    sources: Annotated[
        Sequence[TreePath],
        Argument(
            "Checkpoints of one model, oldest first, or a run's folder with --last or --every.",
            metavar="SRC",
            check=check_locations,
        ),
    ],
    dst: Destination,
    options: AverageOptions,
    run: RunOptions,
) -> None:
    """Average checkpoints of one model.

    Floating-point tensors are summed in fp64, in the order of the checkpoints, and rounded once.
    Other tensors must be equal. Sources may have different formats and layouts. The last one
    provides configuration and tokenizer. Optimizer state is only written with --only all, which
    averages moments and takes step counters from the last checkpoint.
    """
    from ckptctl.verbs.averaging import plan_average

    ranks = join_ranks(run.single_process, run.json)
    output = make_rank_printer(ranks, run.json, run.quiet)
    plan = make_plan(
        ranks, lambda: plan_average(sources, dst, options), None if run.dry_run else dst
    )
    total = sum(plan.weights)
    shares = ", ".join(f"{weight / total:.4g}" for weight in plan.weights)
    output.print_statement(
        f"{pluralize(len(plan.sources), 'checkpoint')} · weights {shares} · "
        f"{pluralize(plan.averaged, 'tensor')} averaged"
        + (f", {plan.equal:,} compared" if plan.equal else "")
    )
    if not run.dry_run:
        run_on_all_ranks(ranks, plan.require_redundant_data)
    run_or_show_plan("average", output, plan.conversion, dst, run, ranks, plan)
