"""One page about a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ckptctl.api.options import AnyPath
from ckptctl.ops import option_checks as checks
from ckptctl.ops.report.options import MAX_TENSORS

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.ops.report.data import Report
    from ckptctl.ops.watch import Watch


def report(
    path: AnyPath,
    output: AnyPath | None = None,
    *,
    other: AnyPath | None = None,
    stats: bool = False,
    structure: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    ignore_dtype: bool = False,
    include: Sequence[str] = (),
    only: Literal["model", "all"] = "all",
    max_tensors: int = MAX_TENSORS,
    format: str | None = None,
    format_other: str | None = None,
    weights: Weights | None = None,
    weights_other: Weights | None = None,
    tag: str | None = None,
    tag_other: str | None = None,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    rules: AnyPath | None = None,
    overwrite: bool = False,
    progress: Watch | None = None,
) -> Report:
    """Write one HTML page about the checkpoint at *path*, and return what is in it.

    A checkpoint that is not whole has a page, too: see
    :attr:`~ckptctl.ops.report.data.Report.readable`.

    Args:
        path: A directory or a file; it is never changed.
        output: The page; None: write none.
        other: A second checkpoint: the page shows where it differs.
        stats: Read the data too and add statistics of every tensor; imports torch.
        structure: Compare names, shapes and dtypes alone.
        atol: Let elements be this far apart, absolutely.
        rtol: Likewise, relative to *other*'s.
        ignore_dtype: Whether equal numbers of another dtype are the same.
        include: Globs; list only tensors that match one.
        only: Compare ``all``, or the ``model`` alone.
        max_tensors: List so many at most: those with findings, then the largest.
        format: Format of *path*; None: detect it.
        format_other: Format of *other*; None: detect it.
        weights: Which of two copies of *path*'s weights; see :class:`~ckptctl.api.Options`.
        weights_other: Likewise of *other*'s.
        tag: Which save, where *path* holds several; None: the one that its pointer names.
        tag_other: Likewise of *other*.
        model_type: Family of both; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        rules: See :class:`~ckptctl.api.Options`.
        overwrite: Replace *output* if it is such a page.
        progress: Called with the bytes that are going to be read; its context yields what is
            called with bytes done.

    Raises:
        CkptError: One of them is missing or not recognised, or the page exists; none was written.
    """
    from ckptctl import families
    from ckptctl.ops.report.gather import report as run
    from ckptctl.ops.report.options import ReportOptions
    from ckptctl.ops.watch import unwatched

    chosen = ReportOptions(
        stats=stats,
        structure=structure,
        tolerance=checks.tolerance(atol, rtol),
        ignore_dtype=ignore_dtype,
        include=checks.globs(include),
        only=checks.only(only),
        max_tensors=checks.positive("max_tensors", max_tensors) or MAX_TENSORS,
        format=format,
        format_other=format_other,
        weights=checks.weights(weights),
        weights_other=checks.weights(weights_other),
        tag=tag,
        tag_other=tag_other,
        model_type=model_type,
        rules=checks.path(rules),
        overwrite=overwrite,
    )
    with families.using(converter):
        return run(path, checks.output(output), other, chosen, progress or unwatched)
