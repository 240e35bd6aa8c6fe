"""What a report is asked to hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.storage.errors_between import Tolerance

MAX_TENSORS = 20_000


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What goes into a report; see ``ckptctl report --help``.

    Attributes:
        stats: Whether to read all values.
        structure: Whether to compare names, shapes and dtypes alone with another checkpoint.
        tolerance: Which values of the two count as equal; None: equal bits.
        ignore_dtype: Whether equal numbers of another dtype are the same.
        include: Globs of names; none: all tensors.
        only: ``model``, or ``all`` that the two hold: what is compared.
        max_tensors: How many tensors are listed at most.
        format: Format of the checkpoint; None: detect.
        format_other: Format of the other one; None: detect.
        weights: See :class:`~ckptctl.formats.base.ReadOptions`.
        weights_other: Likewise, of the other one.
        tag: See :class:`~ckptctl.formats.base.ReadOptions`.
        tag_other: Likewise, of the other one.
        model_type: Family of both; None: detect.
        rules: See :class:`~ckptctl.formats.base.ReadOptions`; for whichever of the two needs it.
        overwrite: Whether to replace an earlier report.
    """

    stats: bool = False
    structure: bool = False
    tolerance: Tolerance | None = None
    ignore_dtype: bool = False
    include: tuple[str, ...] = ()
    only: Literal["model", "all"] = "all"
    max_tensors: int = MAX_TENSORS
    format: str | None = None
    format_other: str | None = None
    weights: Weights | None = None
    weights_other: Weights | None = None
    tag: str | None = None
    tag_other: str | None = None
    model_type: str | None = None
    rules: Path | None = None
    overwrite: bool = False
