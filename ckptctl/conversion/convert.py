"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan. It proves that dropped data is redundant, copies into a staging directory,
renames that to its final name, and with ``--verify`` reads the output again. Behind a URL, files
are made in a scratch directory and uploaded one by one, the index last; the Hugging Face Hub shows
them all in one step.

Stages of planning run in this order. Steps (:mod:`.steps`) run between them: those that options
select, and some for every conversion. ``open_draft`` makes a :class:`~.draft.Draft`, and
``build_plan`` makes the plan of it; all between them take a draft and return an updated copy. Only
its notes are changed in place.

1. ``open_draft`` checks options, refuses a local destination that exists, and reads the index of
   the source and its configuration. A URL as destination is checked when the run begins. Steps at
   ``source`` change the checkpoint before detection: with ``--dequantize``, quantized tensors
   become virtual unquantized tensors.
2. ``understand_model`` detects model type, layout and prefix. Steps at ``model`` add or replace
   tensors: ``--fill-from``.
3. ``select_tensors`` applies ``--include`` and the like, and requires every tensor of the model
   unless ``--allow-missing`` is given. Steps at ``selection`` compare descriptions of the model.
4. ``plan_layout_change`` maps the tensors to the target layout. Steps at ``layout`` refuse changes
   that would lose scales.
5. ``list_output_tensors`` determines the elements of each output tensor, and verifies that stored
   boxes cover them. Steps at ``output`` change the tensors, such as ``--quantize``.
6. ``lay_out`` gives every tensor a place in files. Steps at ``files`` add config.json and others
   next to them; ``build_plan`` freezes it.

Dequantizing, casting and quantizing are planned here and computed while tensors are copied.
Planning reads non-tensor values and small tensors such as scales, but no weights.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ckptctl import families
from ckptctl.conversion.contents import list_output_tensors, plan_layout_change
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.executable import build_plan
from ckptctl.conversion.laying_out import lay_out, open_reference
from ckptctl.conversion.opening import explain_errors, open_draft, understand_model
from ckptctl.conversion.plan import ConversionPlan, ConversionResult, describe_plan
from ckptctl.conversion.selection import select_tensors
from ckptctl.conversion.steps import Step, apply_steps, select_steps
from ckptctl.conversion.summary import summarize
from ckptctl.conversion.writing import require_same_plans, write_output
from ckptctl.notes import Notes
from ckptctl.ranks.coordinator import Coordinator, SingleProcess
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "Step",
    "plan_conversion",
    "plan_with_steps",
    "run_conversion",
]


def plan_conversion(
    src: str | TreePath, dst: str | TreePath, options: ConversionOptions
) -> ConversionPlan:
    """Plan a conversion. Writes nothing."""
    with families.use_converter_file(options.converter):
        return plan_with_steps(src, dst, options)


def plan_with_steps(
    src: str | TreePath, dst: str | TreePath, options: ConversionOptions, *extra_steps: Step
) -> ConversionPlan:
    """Plan a conversion with *extra_steps* in addition to those that options ask for.

    ``merge`` and ``prune`` add steps this way.
    """
    steps = [*select_steps(options), *extra_steps]
    draft = open_draft(src, dst, options)
    draft = apply_steps(steps, "source", draft)
    draft = understand_model(draft)
    with explain_errors(draft):
        draft = apply_steps(steps, "model", draft)
        # Notes are shown in the order source, side files, the rest; side files are known last.
        source_notes, draft = draft.notes, replace(draft, notes=Notes())
        if options.like is not None:
            draft = replace(draft, like=open_reference(options.like, draft.target))
        draft = select_tensors(draft)
        draft = apply_steps(steps, "selection", draft)
        draft = plan_layout_change(draft)
        draft = apply_steps(steps, "layout", draft)
        draft = before_output_steps = list_output_tensors(draft)
        draft = apply_steps(steps, "output", draft)
        draft = lay_out(draft)
        draft = apply_steps(steps, "files", draft)
        plan = build_plan(draft)
    return describe_plan(draft, plan, summarize(before_output_steps, draft), source_notes)


def run_conversion(
    plan: ConversionPlan, progress: Advance | None = None, ranks: Coordinator | None = None
) -> ConversionResult:
    """Carry out *plan* and publish the output.

    ``require_ready`` reads the data that the plan drops, and verifies that it is duplicated or
    zero. Checksums that the source records are compared while its bytes are copied.

    Args:
        plan: What :func:`plan_conversion` returned.
        progress: Called with the bytes done since its last call, from this thread.
        ranks: Ranks that carry it out together, each with the same plan, or None for this process.

    Raises:
        CkptError: The conversion failed. The source is unchanged. So is the destination, unless the
            error says otherwise: a directory that cannot be synced, or an output that was found
            damaged after it was published and cannot be withdrawn.
    """
    start = time.monotonic()
    ranks, notes = ranks or SingleProcess(), Notes()
    require_same_plans(plan, ranks)
    execution = write_output(plan, progress or (lambda _: None), ranks, notes)
    return ConversionResult(
        plan,
        target=plan.plan.target,
        nbytes=plan.nbytes,
        seconds=time.monotonic() - start,
        resumed_bytes=execution.resumed_bytes,
        verified=plan.options.verify,
        log=notes,
        out_of_range=execution.lost,
        rounded=execution.rounding,
    )
