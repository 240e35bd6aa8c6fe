"""Public functions that read, compare and describe checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ckptctl.keywords import accept_keywords
from ckptctl.option_checks import AnyPath, check_location
from ckptctl.options import Option
from ckptctl.shared_options import MapOptions, ModelsOptions
from ckptctl.storage.threads import StartProgress, ignore_progress
from ckptctl.verbs.comparison.diff import compare_checkpoints as compare_checkpoints
from ckptctl.verbs.comparison.diff_options import DiffOptions
from ckptctl.verbs.comparison.diff_result import Difference
from ckptctl.verbs.doctor import Diagnosis, diagnose_directory
from ckptctl.verbs.extraction.extract import Extraction
from ckptctl.verbs.extraction.extract import extract_tensors as extract_tensors
from ckptctl.verbs.extraction.extract_options import ExtractOptions, OpenOptions
from ckptctl.verbs.extraction.lazy import LazyStateDict
from ckptctl.verbs.inspection.inspect import inspect_checkpoint as inspect_checkpoint
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from ckptctl.verbs.inspection.inspect_result import Inspection
from ckptctl.verbs.key_map import KeyMap, map_key
from ckptctl.verbs.models import Models
from ckptctl.verbs.models import list_models as list_models
from ckptctl.verbs.report.data import Report
from ckptctl.verbs.report.gather import write_report as write_report
from ckptctl.verbs.report.report_options import ReportOptions
from ckptctl.verbs.verification.verify import verify_checkpoint as verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verbs.verification.verify_result import Verification


@dataclass(frozen=True, kw_only=True)
class _Report(ReportOptions):
    progress: Annotated[
        StartProgress | None,
        Option(
            "Function called with the total number of bytes to read. It returns a context "
            "manager that yields a callback. The callback is called with the number of "
            "bytes read since its last call."
        ),
    ] = None


@accept_keywords(DiffOptions)
def diff(a: AnyPath, b: AnyPath, options: DiffOptions) -> Difference:
    """Compare the checkpoints *a* and *b*, across formats and layouts.

    Elements are equal if their bits are equal, including NaN. With a tolerance, elements with
    ``|a - b| <= atol + rtol * |b|`` are also equal. torch is imported only to compare numbers.

    Args:
        a: The first checkpoint. The result uses its names.
        b: The second checkpoint.
        options: All other arguments.

    Raises:
        CkptError: One of them is missing, not recognized or damaged, or a given layout does not
            fit.
    """
    return compare_checkpoints(a, b, options)


@accept_keywords(ExtractOptions)
def extract(path: AnyPath, tensor: str, options: ExtractOptions) -> Extraction:
    """Extract tensors or slices from the checkpoint at *path*, and read nothing else.

    Args:
        path: The checkpoint. It is never changed.
        tensor: A name or a glob, optionally followed by a slice such as ``[0:128]``.
        options: All other arguments.

    Raises:
        CkptError: The extraction failed. Nothing was written.
    """
    return extract_tensors(path, tensor, options)


@accept_keywords(OpenOptions)
def open(path: AnyPath, options: OpenOptions) -> LazyStateDict:
    """Open a checkpoint of any format as a lazy state dict that maps names to handles.

    Only the index is read until a handle is sliced.

    Args:
        path: A directory, a file or a URL. It is never changed.
        options: All other arguments.

    Raises:
        CkptError: The checkpoint is missing or not recognized, or its index is damaged.
    """
    return LazyStateDict(path, options)


@accept_keywords(InspectOptions)
def inspect(path: AnyPath, options: InspectOptions) -> Inspection:
    """Summarize the checkpoint at *path*, including whether it is complete.

    Args:
        path: A directory or a file. For a folder of checkpoints, its members are listed.
        options: All other arguments.

    Raises:
        CkptError: The checkpoint is missing or not recognized, or its index is damaged.
    """
    return inspect_checkpoint(path, options)


@accept_keywords(_Report)
def report(path: AnyPath, options: _Report) -> Report:
    """Write one HTML page about the checkpoint at *path*, and return its contents.

    The page is also written for a damaged checkpoint: see
    :attr:`~ckptctl.verbs.report.data.Report.readable`.

    Args:
        path: A directory or a file. It is never changed.
        options: All other arguments.

    Raises:
        CkptError: A checkpoint is missing or not recognized, or the page already exists. No page
            was written.
    """
    return write_report(path, options, options.progress or ignore_progress)


@accept_keywords(VerifyOptions)
def verify(path: AnyPath, options: VerifyOptions) -> Verification:
    """Check whether the checkpoint at *path* is complete, and list all findings.

    Args:
        path: A directory or a file. It is never changed.
        options: All other arguments.

    Raises:
        CkptError: The checkpoint does not exist or is not recognized. Damage is a finding, not an
            error.
    """
    return verify_checkpoint(path, options)


@accept_keywords(MapOptions)
def map(key: str, options: MapOptions) -> KeyMap:
    """Map a key to another layout, and list the other sources of its target.

    Only the tables of a family are read, not a checkpoint. Without sizes, slices are formulas of
    axis names.

    Args:
        key: Key of a tensor, or a template with ``{i}``.
        options: All other arguments.

    Raises:
        CkptError: The key, model type or layout is unknown.
    """
    return map_key(key, options)


@accept_keywords(ModelsOptions)
def models(options: ModelsOptions) -> Models:
    """List the model types with their layouts, or the tables of one model type.

    Args:
        options: All arguments.

    Raises:
        CkptError: The model type or layout is unknown.
    """
    return list_models(options)


def doctor(directory: AnyPath = ".") -> Diagnosis:
    """Check the installation and a folder of checkpoints for problems.

    Args:
        directory: Folder of checkpoints. Test files are written to a hidden folder there, which
            is removed afterwards.

    Raises:
        CkptError: The directory does not exist. A failed check is a finding, not an error.
    """
    return diagnose_directory(Path(check_location(directory)))
