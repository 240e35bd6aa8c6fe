"""Public functions that plan and write checkpoints, such as convert, merge and consolidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from ckptctl.adapters import merging
from ckptctl.adapters.merging import MergePlan
from ckptctl.conversion import convert as conversion
from ckptctl.conversion.conversion_options import (
    NON_AVERAGE_OPTIONS,
    NON_CONSOLIDATION_OPTIONS,
    AverageOptions,
    ConsolidationOptions,
    ConversionOptions,
    MergeOptions,
)
from ckptctl.conversion.plan import ConversionPlan, ConversionResult
from ckptctl.keywords import accept_keywords
from ckptctl.option_checks import AnyPath, check_locations, check_new_location
from ckptctl.options import Option
from ckptctl.storage.publish import clean_up_if_refused
from ckptctl.verbs import averaging, consolidate_metadata
from ckptctl.verbs.averaging import AveragePlan
from ckptctl.verbs.consolidate_metadata import MetadataPlan, MetadataResult
from ckptctl.verbs.lora_extraction import extract_lora as lora
from ckptctl.verbs.lora_extraction.lora_options import LoraExtractionOptions
from ckptctl.verbs.lora_extraction.lora_result import LoraExtraction

Progress = Annotated[
    Callable[[int], None] | None,
    Option(
        "Function called from this thread with the number of bytes processed since its last call."
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Conversion(ConversionOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Merge(MergeOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Average(AverageOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _LoraExtraction(LoraExtractionOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Consolidation(ConsolidationOptions):
    progress: Progress = None


@accept_keywords(ConversionOptions)
def plan_conversion(src: AnyPath, dst: AnyPath, options: ConversionOptions) -> ConversionPlan:
    """Plan a conversion without writing anything.

    Args:
        src: The checkpoint.
        dst: Destination of the result.
        options: All other arguments.

    Raises:
        CkptError: The conversion would fail or would not be safe.
    """
    return conversion.plan_conversion(src, dst, options)


@accept_keywords(_Conversion)
def convert(src: AnyPath, dst: AnyPath, options: _Conversion) -> ConversionResult:
    """Convert *src* and publish the result atomically as *dst*.

    Args:
        src: The checkpoint. It is never changed.
        dst: Destination. It must not exist, unless it is a checkpoint and ``overwrite=True``.
        options: All other arguments.

    Raises:
        CkptError: The conversion failed. Nothing was published, unless ``verify`` failed.
    """
    with clean_up_if_refused(dst):
        plan = conversion.plan_conversion(src, dst, options)
    return conversion.run_conversion(plan, options.progress)


@accept_keywords(MergeOptions)
def plan_merge(base: AnyPath, adapter: AnyPath, dst: AnyPath, options: MergeOptions) -> MergePlan:
    """Plan the merge of an adapter into its model without writing anything.

    Args:
        base: The checkpoint of the model.
        adapter: The adapter, for example a PEFT directory or a file of torchtune or Mistral.
        dst: Destination of the merged model.
        options: All other arguments.

    Raises:
        CkptError: The merge would fail or would not be safe.
    """
    return merging.plan_merge(base, adapter, dst, options)


@accept_keywords(_Merge)
def merge(base: AnyPath, adapter: AnyPath, dst: AnyPath, options: _Merge) -> ConversionResult:
    """Merge a LoRA or DoRA adapter into its model and publish the result as *dst*.

    Args:
        base: The checkpoint of the model. It is never changed.
        adapter: The adapter, for example a PEFT directory or a file of torchtune or Mistral.
        dst: Destination. It must not exist, unless it is a checkpoint and ``overwrite=True``.
        options: All other arguments.

    Raises:
        CkptError: The merge failed. Nothing was published, unless ``verify`` failed.
    """
    with clean_up_if_refused(dst):
        plan = merging.plan_merge(base, adapter, dst, options)
    return conversion.run_conversion(plan.conversion, options.progress)


@accept_keywords(AverageOptions, excluded=NON_AVERAGE_OPTIONS)
def plan_average(
    sources: AnyPath | Sequence[AnyPath], dst: AnyPath, options: AverageOptions
) -> AveragePlan:
    """Plan an average of checkpoints without writing anything.

    Args:
        sources: Checkpoints of one model, oldest first, or the folder of a run.
        dst: Destination of the average.
        options: All other arguments.

    Raises:
        CkptError: The average would fail or would not be safe.
    """
    return averaging.plan_average(check_locations(sources), check_new_location(dst), options)


@accept_keywords(_Average, excluded=NON_AVERAGE_OPTIONS)
def average(
    sources: AnyPath | Sequence[AnyPath], dst: AnyPath, options: _Average
) -> ConversionResult:
    """Average checkpoints of one model and publish the result as *dst*.

    Args:
        sources: Checkpoints of one model, oldest first, or the folder of a run. They are never
            changed.
        dst: Destination. It must not exist, unless it is a checkpoint and ``overwrite=True``.
        options: All other arguments.

    Raises:
        CkptError: The average failed. Nothing was published, unless ``verify`` failed.
    """
    paths, target = check_locations(sources), check_new_location(dst)
    with clean_up_if_refused(target):
        plan = averaging.plan_average(paths, target, options)
        plan.require_redundant_data()
    return conversion.run_conversion(plan.conversion, options.progress)


@accept_keywords(_LoraExtraction)
def extract_lora(
    base: AnyPath, tuned: AnyPath, out: AnyPath, options: _LoraExtraction
) -> LoraExtraction:
    """Extract a low-rank PEFT adapter from the difference between *tuned* and *base*.

    Args:
        base: The checkpoint of a model. It is never changed.
        tuned: Another checkpoint of the same model. It is never changed.
        out: Destination of the adapter, published atomically.
        options: All other arguments.

    Raises:
        CkptError: The extraction failed. Nothing was published.
    """
    return lora.extract_lora(base, tuned, out, options, options.progress)


@accept_keywords(ConsolidationOptions, excluded=NON_CONSOLIDATION_OPTIONS)
def plan_consolidation(
    src: AnyPath, options: ConsolidationOptions
) -> ConversionPlan | MetadataPlan:
    """Plan the merge of per-rank shards into one checkpoint without writing anything.

    Args:
        src: The sharded checkpoint.
        options: All other arguments.

    Raises:
        CkptError: The checkpoint is incomplete, or the consolidation would not be safe.
    """
    if options.metadata_only:
        return consolidate_metadata.plan_metadata(src)
    return conversion.plan_conversion(src, options.dst or "", options.to_conversion_options())


@accept_keywords(_Consolidation, excluded=NON_CONSOLIDATION_OPTIONS)
def consolidate(src: AnyPath, options: _Consolidation) -> ConversionResult | MetadataResult:
    """Merge per-rank shards into one checkpoint. Keys stay unchanged.

    Args:
        src: The sharded checkpoint. It is never changed, except that *metadata_only* adds a file.
        options: All other arguments.

    Raises:
        CkptError: The consolidation failed. Nothing was published, unless ``verify`` failed.
    """
    if options.metadata_only:
        return consolidate_metadata.run_metadata(consolidate_metadata.plan_metadata(src))
    dst = options.dst or ""
    with clean_up_if_refused(dst):
        plan = conversion.plan_conversion(src, dst, options.to_conversion_options())
    return conversion.run_conversion(plan, options.progress)
