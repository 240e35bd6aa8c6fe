"""What a comparison is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckptctl.formats.base import Weights as Weights
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
        weights_a: ``master`` or ``module``, where A holds both; None: what its format prefers.
        weights_b: Likewise of B.
        tag_a: Which save, where A holds several; None: the one that its pointer names.
        tag_b: Likewise of B.
        root_a: The model's prefix in A; None: find it.
        root_b: The model's prefix in B; None: find it.
        rules: A file that says how ranks divide tensors, for whichever does not say so itself.
        dequantize: torch's name of the dtype that quantised tensors are turned into; None: keep.
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
    weights_a: Weights | None = None
    weights_b: Weights | None = None
    tag_a: str | None = None
    tag_b: str | None = None
    root_a: str | None = None
    root_b: str | None = None
    rules: Path | None = None
    dequantize: str | None = None
    model_type: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    jobs: int = 0
