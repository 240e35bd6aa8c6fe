"""The public Python functions: the same operations as the commands, with typed results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ckptctl.keywords import keywords
from ckptctl.ops.comparison.options import DiffOptions
from ckptctl.ops.conversion.options import (
    NOT_CONSOLIDATED,
    ConsolidationOptions,
    ConversionOptions,
    MergeOptions,
)
from ckptctl.ops.extraction.options import ExtractOptions, OpenOptions
from ckptctl.ops.inspection.options import InspectOptions
from ckptctl.ops.option_checks import AnyPath, place
from ckptctl.ops.options import MapOptions, ModelsOptions
from ckptctl.ops.report.options import ReportOptions
from ckptctl.ops.runs.options import PruneOptions
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.options import Option
from ckptctl.storage.threads import Watch, unwatched

if TYPE_CHECKING:
    from ckptctl.ops.comparison.result import Difference
    from ckptctl.ops.consolidate_metadata import MetadataPlan, MetadataResult
    from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult
    from ckptctl.ops.doctor import Diagnosis
    from ckptctl.ops.extraction.extract import Extraction
    from ckptctl.ops.extraction.lazy import LazyStateDict
    from ckptctl.ops.inspection.result import Inspection
    from ckptctl.ops.key_map import KeyMap
    from ckptctl.ops.merging import MergePlan
    from ckptctl.ops.models import Models
    from ckptctl.ops.report.data import Report
    from ckptctl.ops.runs.listing import RunFolder
    from ckptctl.ops.runs.newest import Newest
    from ckptctl.ops.runs.removal import PrunePlan, PruneResult
    from ckptctl.ops.verification.result import Verification

Progress = Annotated[
    Callable[[int], None] | None,
    Option("Called with the bytes done since the last call, from this thread."),
]


@dataclass(frozen=True, kw_only=True)
class _Conversion(ConversionOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Merge(MergeOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Consolidation(ConsolidationOptions):
    progress: Progress = None


@dataclass(frozen=True, kw_only=True)
class _Report(ReportOptions):
    progress: Annotated[
        Watch | None,
        Option(
            "Called with the bytes that are going to be read; its context yields what is called "
            "with bytes done."
        ),
    ] = None


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


@keywords(DiffOptions)
def diff(a: AnyPath, b: AnyPath, options: DiffOptions) -> Difference:
    """Say how the checkpoints *a* and *b* differ, across formats and layouts.

    Elements are equal when their bits are, NaN included; with a tolerance also when
    ``|a - b| <= atol + rtol * |b|``. torch is imported only where numbers have to be compared.

    Args:
        a: The first checkpoint; the result has its names.
        b: The second one.
        options: All others.

    Raises:
        CkptError: One is missing, not recognised or damaged, or named layouts do not fit.
    """
    from ckptctl.ops.comparison.diff import diff

    return diff(a, b, options)


@keywords(ExtractOptions)
def extract(path: AnyPath, tensor: str, options: ExtractOptions) -> Extraction:
    """Take tensors, or slices of them, out of the checkpoint at *path*; read nothing else.

    Args:
        path: The checkpoint; it is never changed.
        tensor: A name, or a glob; a slice such as ``[0:128]`` may follow.
        options: All others.

    Raises:
        CkptError: Nothing was written.
    """
    from ckptctl.ops.extraction.extract import extract

    return extract(path, tensor, options)


@keywords(OpenOptions)
def open(path: AnyPath, options: OpenOptions) -> LazyStateDict:
    """Open a checkpoint of any format as a lazy state dict: names of tensors to handles.

    The index is read, and nothing else until a handle is sliced.

    Args:
        path: A directory, a file or a URL; it is never changed.
        options: All others.

    Raises:
        CkptError: It is missing, not recognised, or its index is damaged.
    """
    from ckptctl.ops.extraction.lazy import LazyStateDict

    return LazyStateDict(path, options)


@keywords(InspectOptions)
def inspect(path: AnyPath, options: InspectOptions) -> Inspection:
    """Say what the checkpoint at *path* holds and whether it is whole.

    Args:
        path: A directory or a file; a folder of checkpoints lists its members.
        options: All others.

    Raises:
        CkptError: It is missing, not recognised, or its index is damaged.
    """
    from ckptctl.ops.inspection.inspect import inspect

    return inspect(path, options)


@keywords(_Report)
def report(path: AnyPath, options: _Report) -> Report:
    """Write one HTML page about the checkpoint at *path*, and return what is in it.

    A checkpoint that is not whole has a page, too: see
    :attr:`~ckptctl.ops.report.data.Report.readable`.

    Args:
        path: A directory or a file; it is never changed.
        options: All others.

    Raises:
        CkptError: One of them is missing or not recognised, or the page exists; none was written.
    """
    from ckptctl.ops.report.gather import report

    return report(path, options, options.progress or unwatched)


@keywords(VerifyOptions)
def verify(path: AnyPath, options: VerifyOptions) -> Verification:
    """Say whether the checkpoint at *path* is whole, and list everything that is wrong with it.

    Args:
        path: A directory or a file; it is never changed.
        options: All others.

    Raises:
        CkptError: It does not exist or is not recognised. What is damaged is a finding.
    """
    from ckptctl.ops.verification.verify import verify

    return verify(path, options)


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


def ls(root: AnyPath = ".") -> RunFolder:
    """List the checkpoints of a run, which are complete, and what protects each.

    Args:
        root: The folder with the checkpoints.

    Raises:
        CkptError: It is missing, or cannot be read.
    """
    from ckptctl.ops.runs.listing import read_run

    return read_run(_looked_at_anew(root))


def latest(root: AnyPath = ".") -> Newest:
    """Say which checkpoint of a run is the newest complete one: ``path``; and why not another.

    Args:
        root: The folder with the checkpoints.

    Raises:
        SourceNotFoundError: No checkpoint there is complete.
        UnsupportedError: The newest is not understood: it may be whole.
    """
    from ckptctl.ops.runs.newest import newest

    return newest(_looked_at_anew(root))


def _looked_at_anew(root: AnyPath) -> Path:
    """Return the folder of a run; what an earlier call saw behind a URL is forgotten."""
    from ckptctl.storage.run_store import run_store

    path = place(root)
    run_store(path).refresh()
    return path


@keywords(PruneOptions)
def plan_prune(root: AnyPath, options: PruneOptions) -> PrunePlan:
    """Decide which checkpoints of a run go, and change nothing.

    Args:
        root: The folder with the checkpoints.
        options: All others. What *keep* or one of its kind keeps stays.

    Raises:
        CkptError: No option says what is kept, or it would not be safe.
    """
    from ckptctl.ops.runs.removal import plan_prune

    policy, thin = options.policy(), options.thin is not None
    return plan_prune(place(root), policy, force=options.force, thin=thin)


@keywords(PruneOptions)
def prune(root: AnyPath, options: PruneOptions) -> PruneResult:
    """Remove the checkpoints of a run that no option keeps; nobody is asked.

    The newest complete one always stays, as does what a pointer such as ``latest`` names.

    Args:
        root: The folder with the checkpoints.
        options: All others.

    Raises:
        PartialError: Some of them could not be removed.
        CkptError: Nothing was removed.
    """
    from ckptctl.ops.runs.removal import plan_prune, run_prune

    policy, thin = options.policy(), options.thin is not None
    result = run_prune(plan_prune(place(root), policy, force=options.force, thin=thin))
    result.require_all()
    return result


@keywords(MapOptions)
def map(key: str, options: MapOptions) -> KeyMap:
    """Say where a key goes in another layout, and what else makes up its target.

    It reads a family's tables and no checkpoint; without sizes, places are formulas in axis names.

    Args:
        key: Name of a tensor, or a template with ``{i}``.
        options: All others.

    Raises:
        CkptError: Key, model type or layout is not known.
    """
    from ckptctl.ops.key_map import map_key

    return map_key(key, options)


@keywords(ModelsOptions)
def models(options: ModelsOptions) -> Models:
    """List the model types with their layouts; of one, how each layout stores every tensor.

    Args:
        options: All of them.

    Raises:
        CkptError: Model type or layout is not known.
    """
    from ckptctl.ops.models import models

    return models(options)


def doctor(directory: AnyPath = ".") -> Diagnosis:
    """Say what is wrong with the installation or a directory.

    Args:
        directory: Where checkpoints are: files are tried out in a hidden folder there, which is
            removed again.

    Raises:
        CkptError: There is no such directory. What is broken is a finding.
    """
    from ckptctl.ops.doctor import doctor

    return doctor(place(directory))
