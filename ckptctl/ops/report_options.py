"""What a report is asked to hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_TENSORS = 20_000


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What goes into a report; see ``ckptctl report --help``.

    Attributes:
        stats: Whether to read all values.
        structure: Whether to compare names, shapes and dtypes alone with another checkpoint.
        include: Globs of names; none: all tensors.
        max_tensors: How many tensors are listed at most.
        format: Format of the checkpoint; None: detect.
        format_other: Format of the other one; None: detect.
        model_type: Family of both; None: detect.
        rules: See :class:`~ckptctl.formats.base.ReadOptions`.
        overwrite: Whether to replace an earlier report.
    """

    stats: bool = False
    structure: bool = False
    include: tuple[str, ...] = ()
    max_tensors: int = MAX_TENSORS
    format: str | None = None
    format_other: str | None = None
    model_type: str | None = None
    rules: Path | None = None
    overwrite: bool = False
