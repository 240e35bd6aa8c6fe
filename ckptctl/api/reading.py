"""Public functions that read checkpoints, compare and describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ckptctl.keywords import keywords
from ckptctl.ops.comparison.options import DiffOptions
from ckptctl.ops.extraction.options import ExtractOptions, OpenOptions
from ckptctl.ops.inspection.options import InspectOptions
from ckptctl.ops.option_checks import AnyPath, place
from ckptctl.ops.options import MapOptions, ModelsOptions
from ckptctl.ops.report.options import ReportOptions
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.options import Option
from ckptctl.storage.threads import Watch, unwatched

if TYPE_CHECKING:
    from ckptctl.ops.comparison.result import Difference
    from ckptctl.ops.doctor import Diagnosis
    from ckptctl.ops.extraction.extract import Extraction
    from ckptctl.ops.extraction.lazy import LazyStateDict
    from ckptctl.ops.inspection.result import Inspection
    from ckptctl.ops.key_map import KeyMap
    from ckptctl.ops.models import Models
    from ckptctl.ops.report.data import Report
    from ckptctl.ops.verification.result import Verification


@dataclass(frozen=True, kw_only=True)
class _Report(ReportOptions):
    progress: Annotated[
        Watch | None,
        Option(
            "Function called with the number of bytes to read. It returns a context "
            "manager that yields a function, which is called with the bytes done."
        ),
    ] = None


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
        CkptError: One is missing, not recognized or damaged, or named layouts do not fit.
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
        CkptError: It is missing, not recognized, or its index is damaged.
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
        CkptError: It is missing, not recognized, or its index is damaged.
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
        CkptError: One of them is missing or not recognized, or the page exists; none was written.
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
        CkptError: It does not exist or is not recognized. What is damaged is a finding.
    """
    from ckptctl.ops.verification.verify import verify

    return verify(path, options)


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
