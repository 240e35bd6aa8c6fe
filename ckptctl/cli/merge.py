"""``ckptctl merge BASE ADAPTER DST``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ckptctl.cli.commands import RunOptions, command
from ckptctl.cli.convert import make_plan, run_or_show_plan
from ckptctl.cli.ranks import join_ranks, make_rank_printer
from ckptctl.conversion.conversion_options import MergeOptions
from ckptctl.option_checks import check_location
from ckptctl.options import Argument
from ckptctl.shared_options import Destination
from ckptctl.units import pluralize


@command(
    "ckptctl merge llama-3-8b adapter merged",
    "ckptctl merge llama-3-8b adapter merged.pt --to torch --to-layout torchtune",
    "ckptctl merge base-dcp adapter_model.pt merged --to hf --lora-alpha 16 --dtype bf16",
    "ckptctl merge mistral-7b lora.safetensors merged --scaling 2.0 --dry-run",
    prints="ckptctl.conversion.plan:ConversionPlan | "
    "ckptctl.conversion.plan:ConversionResult & "
    "ckptctl.adapters.merging:MergePlan",
)
def merge(
    base: Annotated[
        Path, Argument("Checkpoint of the base model.", metavar="BASE", check=check_location)
    ],
    adapter: Annotated[
        Path,
        Argument(
            "LoRA or DoRA adapter. Accepts PEFT folders, and files of torchtune and Mistral.",
            metavar="ADAPTER",
            check=check_location,
        ),
    ],
    dst: Destination,
    options: MergeOptions,
    run: RunOptions,
) -> None:
    """Merge a LoRA or DoRA adapter into its base model.

    Sums are computed in fp32 and rounded once. BASE and ADAPTER may have different formats and
    layouts, and neither is changed. DST is published atomically, either complete or not at all.
    All options except --lora-alpha and --scaling apply to the model, as in convert.
    """
    from ckptctl.adapters.merging import plan_merge

    ranks = join_ranks(run.single_process, run.json)
    output = make_rank_printer(ranks, run.json, run.quiet)
    plan = make_plan(
        ranks, lambda: plan_merge(base, adapter, dst, options), None if run.dry_run else dst
    )
    scales = ", ".join(f"{scale:g}" for scale in plan.scales)
    output.print_statement(
        f"adapter {plan.adapter_format}, layout {plan.adapter_layout} · "
        f"{pluralize(plan.merged, 'tensor')} changed"
        + (f" (scale {scales})" if scales else "")
        + (f", {plan.replaced:,} replaced" if plan.replaced else "")
    )
    run_or_show_plan("merge", output, plan.conversion, dst, run, ranks, plan)
