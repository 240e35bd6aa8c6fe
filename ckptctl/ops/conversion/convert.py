"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan and publishes the result in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.errors import CkptError, UsageError
from ckptctl.formats.base import WritableFormat
from ckptctl.ops.adapters import factors_only, require_adapter
from ckptctl.ops.conversion import proofs
from ckptctl.ops.conversion.adapter_files import beside
from ckptctl.ops.conversion.assets import Assets, gather, stated_in, unquantised
from ckptctl.ops.conversion.checks import require_sense
from ckptctl.ops.conversion.draft import Draft
from ckptctl.ops.conversion.missing import Missing, find_missing
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult
from ckptctl.ops.conversion.proofs import require_published
from ckptctl.ops.destinations import Destination, replaceable, require_destination
from ckptctl.ops.ranks import sharing
from ckptctl.ops.ranks.coordinator import Alone, Coordinator, on_first, require_same, together
from ckptctl.ops.recognition.dequantise import dequantised
from ckptctl.ops.recognition.quantised import advised
from ckptctl.ops.recognition.recognise import Recognition, recognise
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.sources import open_source
from ckptctl.ops.verification.items import replicated
from ckptctl.planner.configs.stated import Json
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.execution.options import Execution
from ckptctl.storage.out_of_range import require_in_range
from ckptctl.storage.paths import named, path_at
from ckptctl.storage.publish import Staging, staging
from ckptctl.storage.threads import Advance

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "plan_conversion",
    "run_conversion",
]

Change = Callable[[Catalog, Recognition, Mapping[str, Json]], Catalog]


def plan_conversion(src: str | Path, dst: str | Path, options: ConversionOptions) -> ConversionPlan:
    """Decide everything about a conversion; writes nothing.

    Args:
        src: The checkpoint.
        dst: Where the output will appear; must not exist unless *options* say to overwrite.
        options: What is asked for.

    Raises:
        CkptError: The source is not whole or not understood, or the conversion would not be safe.
    """
    with families.using(options.converter):
        return plan_changed(src, dst, options, lambda catalog, _, __: catalog)


def plan_changed(
    src: str | Path, dst: str | Path, options: ConversionOptions, change: Change
) -> ConversionPlan:
    """Decide everything about the conversion of what *change* makes of a checkpoint.

    Args:
        src: The checkpoint.
        dst: Where the output will appear.
        options: What is asked for.
        change: Takes the checkpoint, what it is, and its documents; returns what is converted.

    Raises:
        CkptError: See :func:`plan_conversion`.
    """
    target = formats.target(options.to)
    source, destination = _preflight(src, dst, options, target)
    opened = _catalog(source, options)
    catalog, assets = _with_assets(opened, options, target)
    recognition = recognise(
        catalog, options.model_type, options.from_layout, options.root, assets.documents
    )
    with advised(catalog, recognition.root):
        changed = change(catalog, recognition, assets.documents)
        missing = find_missing(opened) if options.allow_missing else Missing()
        draft = Draft(changed, recognition, options, target, destination, assets, missing)
        plan = draft.plan()
    if not options.verify_replicas:
        return plan
    written = opened.replicas.keys() - plan.missing.keys() - plan.left_out.keys()
    return replace(plan, replicated=replicated(opened, written))


def _preflight(
    src: str | Path, dst: str | Path, options: ConversionOptions, target: WritableFormat
) -> tuple[Path, Destination]:
    """Refuse options that make no sense together, and a destination that must not be touched."""
    require_sense(options, target)
    source = formats.existing(src)
    kind = Replaceable(replaceable, file=target.single_file)
    return source, require_destination(source, named(dst), options.overwrite, kind)


def _catalog(source: Path, options: ConversionOptions) -> Catalog:
    """Read the index of the source."""
    trusted = options.assets if options.trust_assets else None
    catalog = open_source(
        source,
        options,
        partial=options.allow_missing,
        replicas=options.verify_replicas,
        documents=stated_in(trusted) if trusted else None,
    )
    return unwrapped(catalog) if options.only == "model" else catalog


def _with_assets(
    catalog: Catalog, options: ConversionOptions, target: WritableFormat
) -> tuple[Catalog, Assets]:
    """Return what is converted of the source, and its config files, nothing of it quantised."""
    if target.adapters:
        catalog = factors_only(catalog)
        require_adapter(catalog, UsageError, f"format {target.name} holds adapters only")
    assets = beside(catalog, gather(catalog, options.assets, options.carry))
    if options.dequantize:
        return dequantised(catalog, options.dequantize), unquantised(assets)
    return catalog, assets


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
    ranks = ranks or Alone()
    options = plan.options
    _require_same(plan, ranks)
    together(ranks, lambda: proofs.require_equal(plan, ranks))
    if plan.upload:
        return _run_upload(plan, progress, ranks, start)
    with sharing.staged(ranks, lambda: _staging(plan)) as stage:
        on_first(ranks, lambda: _require_room(plan, stage))
        report = progress or (lambda _: None)
        done = sharing.execute_together(plan.plan, stage, options.execution(), report, ranks)
        on_first(ranks, lambda: _require_in_range(plan, done))
        on_first(ranks, lambda: _publish(stage))
        if options.verify:
            _verify(plan, stage, done.crcs, ranks)
    return ConversionResult(
        plan,
        Path(plan.plan.target),
        plan.nbytes,
        time.monotonic() - start,
        done.resumed_bytes,
        options.verify,
        tuple(stage.notes) if stage else (),
        done.lost,
    )


def _run_upload(
    plan: ConversionPlan, progress: Advance | None, ranks: Coordinator, start: float
) -> ConversionResult:
    """Carry out *plan*, whose destination is a URL."""
    from ckptctl.ops.conversion import upload  # which nothing on this machine needs

    options = plan.options
    upload.require_plain(ranks=ranks.world)

    def proven(crcs: Sequence[int]) -> None:
        if options.verify:
            require_published(plan.plan, crcs)

    done = upload.upload(
        plan.plan,
        options.execution(),
        progress or (lambda _: None),
        overwrite=options.overwrite,
        written=partial(_require_in_range, plan),
        proven=proven,
    )
    seconds = time.monotonic() - start
    target = path_at(plan.plan.target)
    notes = upload.notes(plan.plan)
    resumed = done.resumed_bytes
    return ConversionResult(
        plan, target, plan.nbytes, seconds, resumed, options.verify, notes, done.lost
    )


def _require_in_range(plan: ConversionPlan, done: Execution) -> None:
    """Refuse to publish elements that became infinite, NaN or saturated."""
    if not plan.options.allow_overflow:
        require_in_range(done.lost, "`--allow-overflow` publishes them as they are")


def _require_same(plan: ConversionPlan, ranks: Coordinator) -> None:
    """Prove that all ranks made the same plan, of the same source."""
    if ranks.world == 1:
        return
    options = plan.options
    asked = {f"option `{one.name}`": getattr(options, one.name) for one in fields(options)}
    require_same(
        ranks,
        {
            **asked,
            "the destination": plan.plan.target,
            "sizes of buffers (--jobs, --memory)": options.execution().limits(),
            "the files of the source": sharing.source_summary(plan.plan),
            "the plan": plan.plan.digest,
        },
    )
    if options.resume:
        together(ranks, lambda: sharing.require_alone(ranks))


def _staging(plan: ConversionPlan) -> AbstractContextManager[Staging]:
    options = plan.options
    return staging(
        Path(plan.plan.target),
        overwrite=options.overwrite,
        resume=options.resume,
        keep_on_error=options.resume,
        single_file=plan.plan.single_file,
        is_checkpoint=Replaceable(replaceable, file=plan.plan.single_file),
    )


def _require_room(plan: ConversionPlan, stage: Staging | None) -> None:
    if stage:
        require_space(stage.data, plan.nbytes, stage.held())


def _publish(stage: Staging | None) -> None:
    if stage:
        stage.publish()


def _verify(
    plan: ConversionPlan, stage: Staging | None, crcs: Sequence[int], ranks: Coordinator
) -> None:
    """Read the published output again, and take it back if it is not what was written."""

    def read_again() -> None:
        sharing.wait_for(Path(plan.plan.target))
        require_published(plan.plan, crcs, ranks)

    try:
        together(ranks, read_again)
    except BaseException as error:
        if stage is None:
            raise
        try:
            outcome = stage.revert()
        except CkptError as failure:
            outcome = f"it could not be taken back ({failure.what}) and is still there"
        if isinstance(error, CkptError):
            error.why = "; ".join(filter(None, (error.why, outcome)))
        raise
