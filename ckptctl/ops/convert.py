"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan and publishes the result in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.errors import CkptError, MappingError, UsageError
from ckptctl.ops import checks
from ckptctl.ops.adapter_files import beside
from ckptctl.ops.adapters import factors_only, require_adapter
from ckptctl.ops.conversion import ConversionPlan, ConversionResult
from ckptctl.ops.dequantise import dequantised
from ckptctl.ops.documents import gather, unquantised
from ckptctl.ops.draft import Draft
from ckptctl.ops.missing import Missing, find_missing
from ckptctl.ops.options import ConversionOptions
from ckptctl.ops.overwrite import replaceable
from ckptctl.ops.quantised import advised
from ckptctl.ops.recognise import Json, Recognition, recognise
from ckptctl.ops.replicas import replicated
from ckptctl.ops.replicas import require_equal as replicas_equal
from ckptctl.ops.tiles import require_regular
from ckptctl.storage.compare import all_zero, equal
from ckptctl.storage.computed import open_reader
from ckptctl.storage.executor import execute
from ckptctl.storage.publish import Staging, free_space, staging

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "plan_conversion",
    "run_conversion",
]

Progress = Callable[[int], None]
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
    checks.options(options, target)
    source = formats.existing(src)
    destination = checks.destination(source, Path(dst), options.overwrite, replaceable)
    catalog = formats.open_checkpoint(
        source,
        options.from_format,
        options.model_type,
        weights=options.weights,
        tag=options.tag,
        rules=options.rules,
        partial=options.allow_missing,
        replicas=options.verify_replicas,
    )
    missing = find_missing(catalog) if options.allow_missing else Missing()
    opened = catalog
    if target.adapters:
        catalog = factors_only(catalog)
        require_adapter(catalog, UsageError, f"format {target.name} holds adapters only")
    assets = beside(catalog, gather(catalog, options.assets))
    if options.dequantize:
        catalog = dequantised(catalog, options.dequantize)
        assets = unquantised(assets)
    known = recognise(
        catalog, options.model_type, options.from_layout, options.root, assets.documents
    )
    with advised(catalog, known.root):
        changed = change(catalog, known, assets.documents)
        plan = Draft(changed, known, options, target, destination, assets, missing).plan()
    if not options.verify_replicas:
        return plan
    wanted = opened.replicas.keys() - plan.missing.keys() - plan.left_out.keys()
    return replace(plan, replicated=replicated(opened, wanted))


def run_conversion(plan: ConversionPlan, progress: Progress | None = None) -> ConversionResult:
    """Carry out *plan* and publish the output, whole or not at all.

    Args:
        plan: What :func:`plan_conversion` returned.
        progress: Called with the bytes done since its last call, from this thread.

    Raises:
        CkptError: The destination and the source are as they were. An error of the verification
            says so itself, because its output had been published and is taken back.
    """
    start = time.monotonic()
    options = plan.options
    _require_equal(plan)
    with staging(
        Path(plan.plan.target),
        overwrite=options.overwrite,
        resume=options.resume,
        keep_on_error=options.resume,
        single_file=plan.plan.single_file,
        is_checkpoint=replaceable,
    ) as stage:
        free_space(stage.data, plan.nbytes, stage.held())
        done = execute(
            plan.plan,
            stage.data,
            options.execution(),
            progress or (lambda _: None),
            journal=stage.journal,
        )
        stage.publish()
        if options.verify:
            _verify(plan, stage, done.crcs)
    return ConversionResult(
        plan,
        Path(plan.plan.target),
        plan.nbytes,
        time.monotonic() - start,
        done.resumed_bytes,
        options.verify,
        tuple(stage.notes),
    )


def _verify(plan: ConversionPlan, stage: Staging, crcs: Sequence[int]) -> None:
    """Read the published output again, and take it back if it is not what was written."""
    try:
        checks.published(plan.plan, crcs)
    except BaseException as error:
        try:
            outcome = stage.revert()
        except CkptError as failure:
            outcome = f"it could not be taken back ({failure.what}) and is still there"
        if isinstance(error, CkptError):
            error.why = "; ".join(filter(None, (error.why, outcome)))
        raise


def _require_equal(plan: ConversionPlan) -> None:
    """Prove that tensors which are dropped hold what the kept ones hold, or nothing at all."""
    root = plan.recognition.root
    if plan.replicated is not None:
        replicas_equal(plan.replicated)
    with open_reader(plan.source) as files:
        for name in plan.change.must_be_zero:
            if not all_zero(files, plan.source.tensors[root + name]):
                raise MappingError(
                    f"`{name}` has no place in layout `{plan.to_layout}` and is not zero",
                    where=plan.source.path,
                    why="leaving it out would change the model",
                    hint=f"`--exclude {name}` leaves it out all the same",
                )
        for tiling in plan.change.tilings:
            require_regular(files, plan.source, root, tiling)
        for kept, dropped in plan.must_equal:
            pair = (plan.source.tensors[name] for name in (kept, dropped))
            if not equal(files, *pair):
                raise _differ(plan, kept, dropped)


def _differ(plan: ConversionPlan, kept: str, dropped: str) -> MappingError:
    tied = dropped.removeprefix(plan.recognition.root) in plan.dropped
    return MappingError(
        f"`{dropped}` is tied to `{kept}` but holds other values"
        if tied
        else f"`{dropped}` and `{kept}` hold different values",
        where=plan.source.path,
        why="the configuration or the model type says that the two are one"
        if tied
        else f"in layout `{plan.to_layout}` one tensor stands for both",
        hint="`--untie` keeps both" if tied else None,
    )
