"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan and publishes the result in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.errors import UsageError, spell_option
from ckptctl.formats.base import Output, OutputRequest, WritableFormat
from ckptctl.notes import Notes
from ckptctl.ops.adapters import factors_only, in_peft_words, require_adapter
from ckptctl.ops.conversion.adapter_files import adapter_files, carries
from ckptctl.ops.conversion.assets import (
    CONFIG,
    Assets,
    gather,
    note_files,
    quantization_in,
    stated_in,
    with_model_config,
)
from ckptctl.ops.conversion.checks import (
    Reference,
    division,
    existing_source,
    keep_together,
    reference,
    require_fitting_name,
    require_same_keys,
    require_sense,
    require_whole_blocks,
)
from ckptctl.ops.conversion.config_files import config_files
from ckptctl.ops.conversion.contents import Contents, contents, written_in_full
from ckptctl.ops.conversion.executable import executable, provenance
from ckptctl.ops.conversion.filling import fill
from ckptctl.ops.conversion.leaves import kept_strings, same_data, without_hashes
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.part import Missing, Part, Task, choose, find_missing
from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult
from ckptctl.ops.conversion.proofs import require_equal, require_published, require_readable
from ckptctl.ops.conversion.quantizing import with_quantized
from ckptctl.ops.conversion.summary import summary
from ckptctl.ops.destinations import replaceable, require_destination
from ckptctl.ops.expert_adapters import with_experts
from ckptctl.ops.ranks import sharing
from ckptctl.ops.ranks.coordinator import Alone, Coordinator, on_first, require_same, together
from ckptctl.ops.recognition.layout_change import LayoutRequest, change_layout
from ckptctl.ops.recognition.model import Model, Request, require_one_model, root_hint, understand
from ckptctl.ops.recognition.quantized import advised, dequantized, quantized
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.sources import open_source
from ckptctl.ops.verification.items import replicated
from ckptctl.planner.layouts import HF
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.planner.mapping.tensors import Change
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.execution.options import Execution
from ckptctl.storage.kinds import require_torch_for
from ckptctl.storage.out_of_range import require_in_range
from ckptctl.storage.paths import named, path_at
from ckptctl.storage.publish import Staging, staging
from ckptctl.storage.sources import blaming, require_unreplaced
from ckptctl.storage.threads import Advance

__all__ = [
    "ConversionOptions",
    "ConversionPlan",
    "ConversionResult",
    "plan_conversion",
    "run_conversion",
]

Edit = Callable[[Model], Catalog]
"""Takes the model in a checkpoint; returns the checkpoint that is converted."""


def plan_conversion(src: str | Path, dst: str | Path, options: ConversionOptions) -> ConversionPlan:
    """Decide everything about a conversion; writes nothing."""
    with families.using(options.converter):
        return plan_changed(src, dst, options, lambda model: model.catalog)


def plan_changed(
    src: str | Path, dst: str | Path, options: ConversionOptions, edit: Edit
) -> ConversionPlan:
    """Decide everything about the conversion of what *edit* makes of a checkpoint."""
    target = formats.target(options.to)
    require_sense(options, target)
    source = existing_source(src, dst)
    may_go = Replaceable(replaceable, file=target.single_file)
    destination = require_destination(source, named(dst), options.overwrite, may_go)
    if not destination.upload:
        require_fitting_name(destination.path, target)

    opened = _read_catalog(source, options)
    catalog, assets = _with_assets(opened, options, target)
    asked = Request(options.model_type, options.from_layout, options.root, options.sizes)
    recognition = understand(catalog, assets.documents, asked)
    if options.experts == "stacked":
        recognition = recognition.by_names_alone(formats.get(catalog.format).layout)
    of_source = Notes()
    with blaming(lambda: require_unreplaced(opened.opened)), advised(recognition):
        filled = fill(catalog, assets, recognition, options, named(dst), of_source)
        catalog, assets, recognition = filled.catalog, filled.assets, filled.recognition
        catalog = edit(recognition)
        recognition = replace(recognition, catalog=catalog, described=assets.described)
        gone = find_missing(opened) if options.allow_missing else Missing()
        like = reference(options.like, options.to)
        task = Task(catalog, assets, recognition, options, target)
        part = choose(task, gone)
        change = _map(task, part)
        part = part.without(change.left_out, task)
        plain = contents(task, part, change)
        held = with_quantized(task, plain, change)
        ranks = len(like.files) if like and target.parallel else options.mp
        output, strings = _lay_out(task, held, change, destination.path.name, like, ranks)
        taken = filled.of(plain.mapped)
        adapter = is_adapter(held.catalog.tensors)
        files = adapter_files(task, change) if adapter else config_files(task, held, change, ranks)
        assets = assets.besides(files.contents)
        plan = executable(
            held,
            output,
            files,
            target=destination.path,
            single_file=target.single_file,
            metadata=strings,
            checksum=options.checksum,
            provenance=provenance(task, held.quantized, part.missing, filled.provenance(taken)),
        )
    notes = Notes()
    notes.add(*catalog.notes)
    notes += of_source
    note_files(assets, options.assets, target, notes)
    notes += task.notes
    left_out = notes.reasons("skipped")
    replicas = opened.replicas.keys() - part.missing.keys() - left_out.keys()
    return ConversionPlan(
        source=held.catalog,
        recognition=recognition,
        options=options,
        change=change,
        output=held.tensors,
        plan=plan,
        must_equal=held.must_equal,
        taken=taken,
        base=filled.base if taken else None,
        summary=summary(opened, task, part, plain, left_out, filled.origins, taken).of(held),
        log=notes,
        free_bytes=destination.free_bytes(),
        upload=destination.upload,
        replicated=replicated(opened, replicas) if options.verify_replicas else None,
        quantization=held.quantized,
    )


def _read_catalog(source: Path, options: ConversionOptions) -> Catalog:
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
    """What is converted of the source, and its config files; nothing of it is quantized."""
    if target.adapters:
        catalog = factors_only(catalog)
        require_adapter(catalog, UsageError, f"the `{target.name}` format only stores adapters")
    plain = bool(options.dequantize)
    assets = gather(catalog, options.assets, options.carry, dequantized=plain)
    assets = with_model_config(catalog, assets)
    if options.experts:
        catalog = with_experts(catalog, assets.documents, options.experts)
    if not options.dequantize or (options.fill_from and not quantized(catalog)):
        return catalog, assets
    said = quantization_in(options.assets)
    return dequantized(catalog, options.dequantize, said), assets


def _map(task: Task, part: Part) -> Change:
    """Say what the model's tensors become, and what a user should know of it."""
    catalog, options, target = task.catalog, task.options, task.target
    asked = LayoutRequest(
        task.layout,
        described=target.parallel or target.described,
        untie=written_in_full(task),
        partial=bool(options.include or options.exclude or part.missing),
        vocab=options.vocab_size,
        pads=target.pads,
        whole=part.whole,
        missing={name.removeprefix(task.root) for name in part.missing},
        trust_assets=options.trust_assets,
    )
    if not task.everything:
        require_one_model(task.recognition)
    change = change_layout(task.recognition, part.selection.tensors, asked)
    keep_together(
        catalog,
        {task.root + name for name in part.selection.tensors},
        renamed=not change.identity,
        dtype=options.dtype,
    )
    task.notes.extend(change.notes)
    _warn_of_names(task, change)
    return change


def _warn_of_names(task: Task, change: Change) -> None:
    """Warn of names that become Hugging Face's only in that they are in its files."""
    cut = bool(task.root) and not task.everything
    new = task.target.layout == HF and (cut or formats.get(task.catalog.format).layout != HF)
    known = change.family or task.recognition.candidates
    if not known and new and not is_adapter(task.catalog.tensors):
        hint = root_hint(task.recognition)
        task.notes.add(f"unknown model type; keys are copied unchanged ({hint})", kind="warning")


def _lay_out(
    task: Task, held: Contents, change: Change, name: str, like: Reference | None, ranks: int
) -> tuple[Output, dict[str, str]]:
    """Let the target format say where everything goes, and which strings its files carry."""
    target, options = task.target, task.options
    shares = division(change, target.layout) if ranks > 1 else None
    if shares:
        documents = {**held.catalog.documents, **task.assets.documents}
        described = replace(held.catalog, documents=documents)
        require_whole_blocks(described, held.mapped, held.tensors, shares, ranks)
    metadata = kept_strings(task.catalog, held.tensors, target, task.notes)
    request = OutputRequest(
        name=name,
        tensors=held.tensors,
        blobs=held.blobs,
        max_shard_size=task.shard_bytes(held.tensors),
        mp=ranks,
        rank_boxes=partial(shares, ranks=ranks) if shares else None,
        checksum=options.checksum,
        metadata=metadata,
        config=task.assets.documents.get(CONFIG),
        family=change.family,
        sizes=change.sizes,
        stack_layers=options.stack_layers,
        records=task.catalog.records,
        adapter=in_peft_words(task.catalog, options.lora_alpha, carries(change)),
        layout=options.to_layout,
        notes=task.notes,
    )
    if like is not None:
        require_same_keys(like, [tensor.name for tensor in held.tensors])
        if not target.parallel:
            request = replace(request, like=like.file_of, like_files=like.files)
    output = target.lay_out(request)
    if metadata and not same_data(task.catalog, held.mapped, output):
        metadata = without_hashes(metadata, task.notes)
        output = target.lay_out(replace(request, metadata=metadata))
    skipped = task.notes.reasons("skipped")
    anew = [name for name in skipped if name.partition(".")[0] in output.own]
    why = f"format {target.name} stores its own values"
    task.notes.explain("skipped", dict.fromkeys(anew, why))
    return output, metadata


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
    _require_same(plan, ranks)
    require_torch_for(plan.plan, "this conversion")
    together(ranks, lambda: require_equal(plan, ranks))
    write = _upload if plan.upload else _write
    notes = Notes()
    done = write(plan, progress or (lambda _: None), ranks, notes)
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


def _write(plan: ConversionPlan, progress: Advance, ranks: Coordinator, notes: Notes) -> Execution:
    """Write the output beside its destination and publish it there."""
    options, single_file = plan.options, plan.plan.single_file

    def begin() -> AbstractContextManager[Staging]:
        return staging(
            Path(plan.plan.target),
            overwrite=options.overwrite,
            resume=options.resume,
            restart=options.restart,
            keep_on_error=options.resume,
            keep_on_interrupt=True,
            single_file=single_file,
            is_checkpoint=Replaceable(replaceable, file=single_file),
        )

    with sharing.staged(ranks, begin) as stage:
        on_first(ranks, partial(_require_room, plan, stage))
        done = sharing.execute_together(plan.plan, stage, options.execution(), progress, ranks)
        on_first(ranks, lambda: _require_in_range(plan, done))
        on_first(ranks, lambda: stage and stage.publish())
        if options.verify:
            require_readable(plan.plan, stage, done.crcs, ranks)
    notes.add(*(stage.notes if stage else ()))
    return done


def _upload(plan: ConversionPlan, progress: Advance, ranks: Coordinator, notes: Notes) -> Execution:
    """Write the output in a scratch directory, and upload each file when it is complete."""
    from ckptctl.ops.conversion import upload  # which nothing on this machine needs

    if ranks.world > 1:
        raise UsageError(
            "multiple ranks cannot write to a URL",
            hint="write to a shared file system and copy the result, or use a single process",
        )
    options = plan.options

    def proven(crcs: Sequence[int]) -> None:
        if options.verify:
            require_published(plan.plan, crcs)

    done = upload.upload(
        plan.plan,
        options.execution(),
        progress,
        overwrite=options.overwrite,
        written=partial(_require_in_range, plan),
        proven=proven,
    )
    if not upload.publishes_at_once(plan.plan):
        notes.add(upload.NOT_AT_ONCE)
    return done


def _require_room(plan: ConversionPlan, stage: Staging | None) -> None:
    if stage:
        require_space(stage.data, plan.nbytes, stage.held())


def _require_in_range(plan: ConversionPlan, done: Execution) -> None:
    """Refuse to publish elements that became infinite, NaN or saturated."""
    if not plan.options.allow_overflow:
        require_in_range(done.lost, f"pass {spell_option('--allow-overflow')} to write them anyway")


def _require_same(plan: ConversionPlan, ranks: Coordinator) -> None:
    """Prove that all ranks made the same plan, of the same source."""
    if ranks.world == 1:
        return
    options = plan.options
    buffers = f"{spell_option('--jobs')}, {spell_option('--memory')}"
    asked = {f"option `{one.name}`": getattr(options, one.name) for one in fields(options)}
    require_same(
        ranks,
        {
            **asked,
            "the destination": plan.plan.target,
            f"buffer sizes ({buffers})": options.execution().limits(),
            "the source files": sharing.source_summary(plan.plan),
            "the plan": plan.plan.digest,
        },
    )
    if options.resume:
        together(ranks, lambda: sharing.require_alone(ranks))
