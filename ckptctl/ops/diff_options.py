"""What a comparison is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptctl.storage.errors_between import Tolerance


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """What is compared, and how; see ``ckptctl diff --help``.

    Attributes:
        structure: Compare names, shapes and dtypes alone.
        tolerance: What counts as equal; None: equal bits.
        ignore_dtype: Whether equal numbers of another dtype are the same.
        include: Globs of names in A; none: all.
        exclude: Globs of names that are not compared.
        only: ``model``, or ``all`` that the checkpoints hold.
        checksums: Whether equal recorded checksums spare the reading.
        format_a: Format of A; None: detect.
        format_b: Format of B; None: detect.
        layout_a: Layout of A; None: detect.
        layout_b: Layout of B; None: detect.
        model_type: Family of both; None: detect.
        sizes: Axis sizes that no configuration states.
        jobs: Threads; 0: its part of the cores, at most four.
    """

    structure: bool = False
    tolerance: Tolerance | None = None
    ignore_dtype: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Literal["model", "all"] = "all"
    checksums: bool = True
    format_a: str | None = None
    format_b: str | None = None
    layout_a: str | None = None
    layout_b: str | None = None
    model_type: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    jobs: int = 0
