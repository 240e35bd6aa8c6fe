"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan and publishes the result in one step.

A plan is made by stages, which every conversion has, and by steps (:mod:`.steps`), which options
ask for. Stages and steps take a :class:`~.draft.Draft`, which describes the output as far as it is
decided, and return one that decides more.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ckptctl import families
from ckptctl.notes import Notes
from ckptctl.ops.conversion.contents import collect_contents, map_layout
from ckptctl.ops.conversion.executable import build_plan
from ckptctl.ops.conversion.laying_out import add_side_files, lay_out, open_reference
from ckptctl.ops.conversion.opening import explain_errors, open_draft, understand_model
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.part import choose_part
from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult, describe_plan
from ckptctl.ops.conversion.steps import Step, apply_steps, steps_for
from ckptctl.ops.conversion.summary import summarize
from ckptctl.ops.conversion.writing import require_ready, write_output
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.storage.paths import path_at
from ckptctl.storage.threads import Advance

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "Step",
    "plan_conversion",
    "plan_with_steps",
    "run_conversion",
]


def plan_conversion(src: str | Path, dst: str | Path, options: ConversionOptions) -> ConversionPlan:
    """Decide everything about a conversion; writes nothing."""
    with families.using(options.converter):
        return plan_with_steps(src, dst, options)


def plan_with_steps(
    src: str | Path, dst: str | Path, options: ConversionOptions, *extra_steps: Step
) -> ConversionPlan:
    """Decide everything about a conversion, with steps besides those that options ask for."""
    steps = [*steps_for(options), *extra_steps]
    draft = open_draft(src, dst, options)
    draft = apply_steps(steps, "source", draft)
    draft = understand_model(draft)
    with explain_errors(draft):
        draft = apply_steps(steps, "model", draft)
        # Notes about files next to the source are known last, and printed before those that follow.
        source_notes, draft = draft.notes, replace(draft, notes=Notes())
        if options.like is not None:
            draft = replace(draft, like=open_reference(options.like, draft.target))
        draft = choose_part(draft)
        draft = map_layout(draft)
        draft = unquantized = collect_contents(draft)
        draft = apply_steps(steps, "output", draft)
        draft = lay_out(draft)
        draft = add_side_files(draft)
        plan = build_plan(draft)
    return describe_plan(draft, plan, summarize(unquantized, draft), source_notes)


def run_conversion(
    plan: ConversionPlan, progress: Advance | None = None, ranks: Coordinator | None = None
) -> ConversionResult:
    """Carry out *plan* and publish the output, whole or not at all.

    Args:
        plan: What :func:`plan_conversion` returned.
        progress: Called with the bytes done since its last call, from this thread.
        ranks: Ranks that carry it out together, each with the same plan, or None for this process.

    Raises:
        CkptError: The conversion failed. Source and destination are unchanged: an output that
            fails the verification after it was published is withdrawn, and the error says so.
    """
    start = time.monotonic()
    ranks, notes = ranks or Alone(), Notes()
    require_ready(plan, ranks)
    execution = write_output(plan, progress or (lambda _: None), ranks, notes)
    return ConversionResult(
        plan,
        target=path_at(plan.plan.target),
        nbytes=plan.nbytes,
        seconds=time.monotonic() - start,
        resumed_bytes=execution.resumed_bytes,
        verified=plan.options.verify,
        log=notes,
        out_of_range=execution.lost,
        rounded=execution.rounding,
    )
