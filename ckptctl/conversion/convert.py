"""Conversion of a checkpoint to another format, layout, dtype or sharding.

:func:`plan_conversion` plans a conversion and writes nothing. :func:`run_conversion` executes
exactly that plan: it proves that dropped data is redundant, copies into a staging directory,
renames the directory to its final name, and with ``--verify`` reads the output again. If the
destination is a URL, files are written to a scratch directory and uploaded one by one, the index
last. On the Hugging Face Hub, all files appear in one step.

Planning runs the following stages. Steps (:mod:`.steps`) run between stages. Options select most
steps, and some run in every conversion. ``open_draft`` creates a :class:`~.draft.Draft`, and
``build_plan`` builds the plan from it. The stages and steps between them take a draft and return an
updated copy. Only the notes of a draft are changed in place.

1. ``open_draft`` checks options, refuses a local destination that exists, and reads the index of
   the source and its configuration. A destination URL is checked when the run begins. Steps at
   ``source`` change the checkpoint before detection: with ``--dequantize``, quantized tensors
   become virtual unquantized tensors.
2. ``understand_model`` detects model type, layout and prefix. Steps at ``model`` add or replace
   tensors: ``--fill-from``.
3. ``select_tensors`` applies ``--include`` and ``--exclude``, and requires every tensor of the
   model unless ``--allow-missing`` is given. Steps at ``selection`` compare the descriptions of the
   model.
4. ``plan_layout_change`` maps the tensors to the target layout. Steps at ``layout`` refuse changes
   that would lose scales.
5. ``list_output_tensors`` determines the elements of each output tensor, and verifies that stored
   boxes cover them. Steps at ``output`` change the tensors, such as ``--quantize``.
6. ``lay_out`` assigns every tensor to a file and an offset. Steps at ``files`` add sidecar files
   such as config.json. ``build_plan`` then builds the executable plan.

Dequantizing, casting and quantizing are planned here and computed while tensors are copied.
Planning reads non-tensor values and small tensors such as scales, but no weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ckptctl import families
from ckptctl.conversion.contents import plan_layout_change, plan_output_tensors
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.executable import build_plan
from ckptctl.conversion.laying_out import open_sharding_reference, plan_file_layout
from ckptctl.conversion.opening import detect_model, explain_errors, open_draft
from ckptctl.conversion.plan import ConversionPlan, ConversionResult, build_conversion_plan
from ckptctl.conversion.selection import select_tensors
from ckptctl.conversion.steps import Step, apply_steps, select_steps
from ckptctl.conversion.summary import summarize_conversion
from ckptctl.conversion.writing import require_executable_plan, write_output
from ckptctl.notes import Notes
from ckptctl.ranks.coordinator import RankCollectives, SingleProcess
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "Step",
    "plan_conversion",
    "plan_tensors",
    "plan_with_steps",
    "run_conversion",
]


def plan_conversion(
    src: str | TreePath, dst: str | TreePath, options: ConversionOptions
) -> ConversionPlan:
    """Plan a conversion of *src* to *dst*, without writing anything."""
    with families.use_converter_file(options.converter):
        return plan_with_steps(src, dst, options)


def plan_with_steps(
    src: str | TreePath, dst: str | TreePath, options: ConversionOptions, *extra_steps: Step
) -> ConversionPlan:
    """Plan a conversion with *extra_steps* in addition to those that *options* select.

    Other commands, such as ``merge``, pass the steps that they add.
    """
    steps = [*select_steps(options), *extra_steps]
    before_output_steps, source_notes = plan_tensors(src, dst, options, steps)
    with explain_errors(before_output_steps):
        draft = apply_steps(steps, "output", before_output_steps)
        draft = plan_file_layout(draft)
        draft = apply_steps(steps, "files", draft)
        plan = build_plan(draft)
    return build_conversion_plan(
        draft, plan, summarize_conversion(before_output_steps, draft), source_notes
    )


def plan_tensors(
    src: str | TreePath, dst: str | TreePath, options: ConversionOptions, steps: Sequence[Step]
) -> tuple[Draft, Notes]:
    """Plan the output tensors of a conversion, before steps at ``output`` change them.

    Returns:
        The draft, and the notes on the source, which precede those on sidecar files.
    """
    draft = open_draft(src, dst, options)
    draft = apply_steps(steps, "source", draft)
    draft = detect_model(draft)
    with explain_errors(draft):
        draft = apply_steps(steps, "model", draft)
        # Notes are shown in the order source, sidecar files, others. Sidecar files are known last.
        source_notes, draft = draft.notes, replace(draft, notes=Notes())
        if options.like is not None:
            draft = replace(draft, like=open_sharding_reference(options.like, draft.target))
        draft = select_tensors(draft)
        draft = apply_steps(steps, "selection", draft)
        draft = plan_layout_change(draft)
        draft = apply_steps(steps, "layout", draft)
        return plan_output_tensors(draft), source_notes


def run_conversion(
    plan: ConversionPlan, progress: Advance | None = None, ranks: RankCollectives | None = None
) -> ConversionResult:
    """Execute *plan* and publish the output.

    Before writing, data that the plan drops is read to verify that it is duplicated or zero.
    Recorded checksums of the source are compared while its bytes are copied.

    Args:
        plan: Plan from :func:`plan_conversion`.
        progress: Called from this thread with the number of bytes processed since its last call.
        ranks: Ranks that execute the same plan together, or None for this process only.

    Raises:
        CkptError: The conversion failed. The source is unchanged. The destination is unchanged,
            too, unless a directory could not be synced, or an output was found to be damaged after
            it was published and could not be withdrawn. The error then says so.
    """
    start = time.monotonic()
    ranks, notes = ranks or SingleProcess(), Notes()
    require_executable_plan(plan, ranks)
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
