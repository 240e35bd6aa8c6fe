"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan and publishes the result in one step.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ckptctl import families, formats
from ckptctl.errors import UsageError
from ckptctl.formats.base import WritableFormat
from ckptctl.notes import Notes
from ckptctl.ops.adapters import factors_only, require_adapter
from ckptctl.ops.conversion.adapter_files import adapter_files
from ckptctl.ops.conversion.assets import (
    gather,
    note_files,
    stated_in,
    with_model_config,
)
from ckptctl.ops.conversion.checks import (
    existing_source,
    reference,
    require_fitting_name,
    require_sense,
)
from ckptctl.ops.conversion.config_files import config_files
from ckptctl.ops.conversion.contents import collect_contents
from ckptctl.ops.conversion.draft import Draft
from ckptctl.ops.conversion.executable import executable
from ckptctl.ops.conversion.laying_out import lay_out
from ckptctl.ops.conversion.mapping import map_layout
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.part import choose_part
from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult
from ckptctl.ops.conversion.steps import Step, apply_steps, steps_for
from ckptctl.ops.conversion.summary import summarize
from ckptctl.ops.conversion.writing import prepare, write_output
from ckptctl.ops.destinations import replaceable, require_destination
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.ops.recognition.model import Model, Request, understand
from ckptctl.ops.recognition.quantized import advised
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.sources import open_source
from ckptctl.ops.verification.items import replicated
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.storage.destinations import Replaceable
from ckptctl.storage.paths import named, path_at
from ckptctl.storage.sources import blaming, require_unreplaced
from ckptctl.storage.threads import Advance

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "plan_conversion",
    "run_conversion",
]


def plan_conversion(src: str | Path, dst: str | Path, options: ConversionOptions) -> ConversionPlan:
    """Decide everything about a conversion; writes nothing."""
    with families.using(options.converter):
        return plan_with_steps(src, dst, options)


def plan_with_steps(
    src: str | Path, dst: str | Path, options: ConversionOptions, *more: Step
) -> ConversionPlan:
    """Decide everything about a conversion with *more* steps than options ask for."""
    target = formats.target(options.to)
    require_sense(options, target)
    source = existing_source(src, dst)
    may_go = Replaceable(replaceable, file=target.single_file)
    destination = require_destination(source, named(dst), options.overwrite, may_go)
    if not destination.upload:
        require_fitting_name(destination.path, target)

    steps = [*steps_for(options), *more]
    draft = _open(source, named(dst), options, target)
    draft = apply_steps(steps, "source", draft)
    draft = _understand(draft)
    opened = draft.source
    with blaming(lambda: require_unreplaced(opened.opened)), advised(draft.model):
        draft = apply_steps(steps, "model", draft)
        told = len(draft.notes)
        draft = replace(draft, like=reference(options.like, options.to))
        draft = choose_part(draft)
        draft = map_layout(draft)
        draft = plain = collect_contents(draft)
        draft = apply_steps(steps, "output", draft)
        output, strings = lay_out(draft, destination.path.name)
        adapter = is_adapter(draft.inputs.tensors)
        files = adapter_files(draft) if adapter else config_files(draft)
        plan = executable(draft, output, files, strings, destination.path)
    notes = Notes()
    notes.add(*draft.catalog.notes)
    notes.extend(draft.notes[:told])
    note_files(draft.assets.besides(files.contents), options.assets, target, notes)
    notes.extend(draft.notes[told:])
    left_out = notes.reasons("skipped")
    replicas = opened.replicas.keys() - draft.missing.keys() - left_out.keys()
    return ConversionPlan(
        source=draft.inputs,
        recognition=draft.model,
        options=options,
        change=draft.change,
        output=draft.tensors,
        plan=plan,
        must_equal=draft.must_equal,
        taken=draft.taken,
        base=draft.base.path if draft.base and draft.taken else None,
        summary=summarize(plain, left_out).with_quantized(draft),
        log=notes,
        free_bytes=destination.free_bytes(),
        upload=destination.upload,
        replicated=replicated(opened, replicas) if options.verify_replicas else None,
        quantization=draft.quantization,
    )


def _open(
    source: Path, destination: Path, options: ConversionOptions, target: WritableFormat
) -> Draft:
    """Read the index of the source, and what describes its model."""
    trusted = options.assets if options.trust_assets else None
    opened = catalog = open_source(
        source,
        options,
        partial=options.allow_missing,
        replicas=options.verify_replicas,
        documents=stated_in(trusted) if trusted else None,
    )
    if options.only == "model":
        opened = catalog = unwrapped(catalog)
    if target.adapters:
        catalog = factors_only(catalog)
        require_adapter(catalog, UsageError, f"the `{target.name}` format only stores adapters")
    assets = gather(catalog, options.assets, options.carry)
    assets = with_model_config(catalog, assets)
    asked = Request(options.model_type, options.from_layout, options.root, options.sizes)
    model = Model.unknown(catalog, assets.documents, asked)
    return Draft(options, target, destination, opened, assets, model, catalog)


def _understand(draft: Draft) -> Draft:
    """Find the model in the checkpoint, as the source's steps have made it."""
    model = understand(draft.catalog, draft.assets.documents, draft.model.request)
    model = replace(model, described=draft.assets.described)
    return replace(draft, model=model)


def run_conversion(
    plan: ConversionPlan, progress: Advance | None = None, ranks: Coordinator | None = None
) -> ConversionResult:
    """Carry out *plan* and publish the output, whole or not at all.

    Args:
        plan: What :func:`plan_conversion` returned.
        progress: Called with the bytes done since its last call, from this thread.
        ranks: Those that carry it out together, each with its own plan of the same; None: this
            process alone.

    Raises:
        CkptError: The destination and the source are as they were. An error of the verification
            says so itself, because its output had been published and is taken back.
    """
    start = time.monotonic()
    ranks, notes = ranks or Alone(), Notes()
    prepare(plan, ranks)
    done = write_output(plan, progress or (lambda _: None), ranks, notes)
    return ConversionResult(
        plan,
        path_at(plan.plan.target),
        plan.nbytes,
        time.monotonic() - start,
        done.resumed_bytes,
        plan.options.verify,
        notes,
        done.lost,
        done.rounding,
    )
