"""Functions that write an output and publish it at a path or URL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path

from ckptctl.conversion.destinations import is_replaceable
from ckptctl.conversion.plan import ConversionPlan
from ckptctl.conversion.proofs import (
    require_intact_output,
    require_redundant_data,
    verify_or_withdraw_output,
)
from ckptctl.errors import UsageError, format_option
from ckptctl.notes import Notes
from ckptctl.ranks import sharing
from ckptctl.ranks.coordinator import (
    RankCollectives,
    require_same_settings,
    run_on_all_ranks,
    run_on_rank_zero,
)
from ckptctl.storage.computed import require_packages_for
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.execution.execution_options import Execution
from ckptctl.storage.outcome import require_in_range
from ckptctl.storage.publish import Staging, stage_output
from ckptctl.storage.threads import Advance


def require_executable_plan(plan: ConversionPlan, ranks: RankCollectives) -> None:
    """Raise unless all ranks have the same plan, can execute it, and drop only redundant data."""
    if ranks.world > 1:
        _require_same_plan(plan, ranks)
    require_packages_for(plan.plan, "this conversion")
    run_on_all_ranks(ranks, lambda: require_redundant_data(plan, ranks))


def write_output(
    plan: ConversionPlan, progress: Advance, ranks: RankCollectives, notes: Notes
) -> Execution:
    """Write all files of the output, then publish the output at its path or URL.

    If the destination is a URL, each file is uploaded when it is complete.
    """
    if plan.upload:
        return _upload_output(plan, progress, ranks, notes)
    options, single_file = plan.options, plan.plan.single_file

    def open_stage() -> AbstractContextManager[Staging]:
        return stage_output(
            Path(plan.plan.target),
            overwrite=options.overwrite,
            resume=options.resume,
            restart=options.restart,
            keep_on_error=options.resume,
            keep_on_interrupt=True,
            single_file=single_file,
            is_checkpoint=Replaceable(is_replaceable, is_file=single_file),
        )

    with sharing.open_stage_on_rank_zero(ranks, open_stage) as stage:
        run_on_rank_zero(ranks, partial(_require_disk_space, plan, stage))
        execution = sharing.execute_on_all_ranks(
            plan.plan, stage, options.to_execution_options(), progress, ranks
        )
        run_on_rank_zero(ranks, lambda: _require_in_range(plan, execution))
        run_on_rank_zero(ranks, lambda: stage and stage.publish())
        if options.verify:
            verify_or_withdraw_output(plan.plan, stage, execution.crcs, ranks)
    notes.add(*(stage.notes if stage else ()))
    return execution


def _upload_output(
    plan: ConversionPlan, progress: Advance, ranks: RankCollectives, notes: Notes
) -> Execution:
    """Write the output to a scratch directory, and upload each file when it is complete."""
    from ckptctl.conversion import upload  # only for URLs

    if ranks.world > 1:
        raise UsageError(
            "multiple ranks cannot write to a URL",
            hint="write to a shared file system and copy the result, or use a single process",
        )
    options = plan.options

    def check_published(crcs: Sequence[int]) -> None:
        if options.verify:
            require_intact_output(plan.plan, crcs)

    execution = upload.upload_output(
        plan.plan,
        options.to_execution_options(),
        progress,
        overwrite=options.overwrite,
        check_written=partial(_require_in_range, plan),
        check_published=check_published,
    )
    if not upload.is_upload_atomic(plan.plan):
        notes.add(upload.NOT_ATOMIC_NOTE)
    return execution


def _require_disk_space(plan: ConversionPlan, stage: Staging | None) -> None:
    if stage:
        require_space(stage.data, plan.nbytes, stage.count_allocated_bytes())


def _require_in_range(plan: ConversionPlan, done: Execution) -> None:
    """Raise if casts made elements infinite, NaN or saturated, unless this is allowed."""
    if not plan.options.allow_overflow:
        require_in_range(
            done.lost, f"pass {format_option('--allow-overflow')} to write them anyway"
        )


def _require_same_plan(plan: ConversionPlan, ranks: RankCollectives) -> None:
    """Raise unless all ranks have the same options, plan and source files."""
    options = plan.options
    buffers = f"{format_option('--jobs')}, {format_option('--memory')}"
    option_values = {
        f"option `{option.name}`": getattr(options, option.name) for option in fields(options)
    }
    require_same_settings(
        ranks,
        {
            **option_values,
            "the destination": str(plan.plan.target),
            f"buffer sizes ({buffers})": options.to_execution_options().compute_tile_limits(),
            "the source files": sharing.hash_sources(plan.plan),
            "the plan": plan.plan.digest,
        },
    )
    if options.resume:
        run_on_all_ranks(ranks, lambda: sharing.require_single_process(ranks))
