"""How the checkpoint of a report differs from another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.errors import CkptError, FormatError, SourceNotFoundError, UsageError
from ckptctl.ops.option_names import renaming
from ckptctl.ops.report.data import Report
from ckptctl.ops.report.options import ReportOptions
from ckptctl.ops.watch import Watch

if TYPE_CHECKING:
    from ckptctl.ops.comparison.result import Difference

_OPTIONS = {
    "--format-a": "--from",
    "--weights-a": "--weights",
    "--tag-a": "--tag",
    "--format-b": "--from-other",
    "--weights-b": "--weights-other",
    "--tag-b": "--tag-other",
}
"""What `report` calls the options of `diff`."""


def compared(found: Report, other: str, options: ReportOptions, progress: Watch) -> Report:
    """Return *found* with how it differs from *other*, or why that cannot be said.

    Raises:
        SourceNotFoundError: There is no such path.
        FormatError: It is not a checkpoint that ckptctl reads.
    """
    from ckptctl.ops.comparison.diff import DiffOptions, diff

    asked = DiffOptions(
        structure=options.structure,
        tolerance=options.tolerance,
        ignore_dtype=options.ignore_dtype,
        include=options.include,
        only=options.only,
        format_a=options.format,
        format_b=options.format_other,
        weights_a=options.weights,
        weights_b=options.weights_other,
        tag_a=options.tag,
        tag_b=options.tag_other,
        rules=options.rules,
        model_type=options.model_type,
    )
    try:
        with renaming(_OPTIONS):
            difference = diff(found.path, other, asked, progress)
    except (UsageError, SourceNotFoundError, FormatError):
        raise
    except CkptError as error:
        return replace(found, other=other, error=error)
    limit = options.max_tensors
    left = replace(found.left_out, differences=_beyond(difference, limit))
    return replace(found, other=other, difference=difference, differences=limit, left_out=left)


def _beyond(found: Difference, limit: int) -> int:
    """Return how many entries of a difference are not listed."""
    lists = [found.tensors, found.leaves]
    for side in (found.a, found.b):
        lists += [side.only, side.only_leaves, tuple(side.left_out)]
    return sum(max(0, len(one) - limit) for one in lists)
