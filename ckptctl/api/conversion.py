"""Public functions that write checkpoints: convert, merge, extract_lora, consolidate; plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ckptctl.keywords import keywords
from ckptctl.ops.conversion.options import (
    NOT_CONSOLIDATED,
    ConsolidationOptions,
    ConversionOptions,
    MergeOptions,
)
from ckptctl.ops.lora_extraction.options import LoraExtractionOptions
from ckptctl.ops.option_checks import AnyPath
from ckptctl.options import Option

if TYPE_CHECKING:
    from ckptctl.ops.consolidate_metadata import MetadataPlan, MetadataResult
    from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult
    from ckptctl.ops.lora_extraction.result import LoraExtraction
    from ckptctl.ops.merging import MergePlan


Progress = Annotated[
    Callable[[int], None] | None,
    Option("Function called from this thread with the number of bytes done since the last call."),
]


@dataclass(frozen=True, kw_only=True)
class _Conversion(ConversionOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Merge(MergeOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _LoraExtraction(LoraExtractionOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Consolidation(ConsolidationOptions):
    progress: Progress = None


@keywords(ConversionOptions)
def plan_conversion(src: AnyPath, dst: AnyPath, options: ConversionOptions) -> ConversionPlan:
    """Decide everything about a conversion without writing a byte.

    Args:
        src: The checkpoint.
        dst: Where the result would appear.
        options: All others.

    Raises:
        CkptError: The conversion would fail or would not be safe.
    """
    from ckptctl.ops.conversion.convert import plan_conversion

    return plan_conversion(src, dst, options)


@keywords(_Conversion)
def convert(src: AnyPath, dst: AnyPath, options: _Conversion) -> ConversionResult:
    """Convert *src* and publish the result as *dst*, whole or not at all.

    Args:
        src: The checkpoint; it is never changed.
        dst: Must not exist, unless ``overwrite=True`` and it is a checkpoint.
        options: All others.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed; the source is unchanged.
    """
    from ckptctl.ops.conversion.convert import plan_conversion, run_conversion
    from ckptctl.storage.publish import sweeping

    with sweeping(dst):
        plan = plan_conversion(src, dst, options)
    return run_conversion(plan, options.progress)


@keywords(MergeOptions)
def plan_merge(base: AnyPath, adapter: AnyPath, dst: AnyPath, options: MergeOptions) -> MergePlan:
    """Decide everything about merging an adapter into its model, without writing a byte.

    Args:
        base: The model's checkpoint.
        adapter: The adapter: PEFT's directory, torchtune's or Mistral's file, ...
        dst: Where the merged model would appear.
        options: All others.

    Raises:
        CkptError: The merge would fail or would not be safe.
    """
    from ckptctl.ops.merging import plan_merge

    return plan_merge(base, adapter, dst, options)


@keywords(_Merge)
def merge(base: AnyPath, adapter: AnyPath, dst: AnyPath, options: _Merge) -> ConversionResult:
    """Merge a LoRA or DoRA adapter into its model and publish the result as *dst*.

    Args:
        base: The model's checkpoint; it is never changed.
        adapter: The adapter: PEFT's directory, torchtune's or Mistral's file, ...
        dst: Must not exist, unless ``overwrite=True`` and it is a checkpoint.
        options: All others.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed.
    """
    from ckptctl.ops.merging import plan_merge, run_merge
    from ckptctl.storage.publish import sweeping

    with sweeping(dst):
        plan = plan_merge(base, adapter, dst, options)
    return run_merge(plan, options.progress)


@keywords(_LoraExtraction)
def extract_lora(
    base: AnyPath, tuned: AnyPath, out: AnyPath, options: _LoraExtraction
) -> LoraExtraction:
    """Make a PEFT adapter of two models: what *tuned* changes in *base*, with a low rank.

    Args:
        base: A model's checkpoint; it is never changed.
        tuned: Another checkpoint of the same model; likewise.
        out: Where the adapter appears, whole or not at all.
        options: All others.

    Raises:
        CkptError: Nothing was published.
    """
    from ckptctl.ops.lora_extraction.extract_lora import extract_lora

    return extract_lora(base, tuned, out, options, options.progress)


@keywords(ConsolidationOptions, without=NOT_CONSOLIDATED)
def plan_consolidation(
    src: AnyPath, options: ConsolidationOptions
) -> ConversionPlan | MetadataPlan:
    """Decide how one whole checkpoint is made of what ranks left in pieces; write nothing.

    Args:
        src: What the ranks left.
        options: All others.

    Raises:
        CkptError: It is not whole, or it would not be safe.
    """
    if options.metadata_only:
        from ckptctl.ops.consolidate_metadata import plan_metadata

        return plan_metadata(src)
    from ckptctl.ops.conversion.convert import plan_conversion

    return plan_conversion(src, options.dst or "", options.conversion())


@keywords(_Consolidation, without=NOT_CONSOLIDATED)
def consolidate(src: AnyPath, options: _Consolidation) -> ConversionResult | MetadataResult:
    """Make one whole checkpoint of what ranks left in pieces; names stay as they are.

    Args:
        src: What the ranks left; nothing in it is changed, but that *metadata_only* adds a file.
        options: All others.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed.
    """
    if options.metadata_only:
        from ckptctl.ops.consolidate_metadata import plan_metadata, run_metadata

        return run_metadata(plan_metadata(src))
    from ckptctl.ops.conversion.convert import plan_conversion, run_conversion
    from ckptctl.storage.publish import sweeping

    dst = options.dst or ""
    with sweeping(dst):
        plan = plan_conversion(src, dst, options.conversion())
    return run_conversion(plan, options.progress)
