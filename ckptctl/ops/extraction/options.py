"""What is to be taken out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckptctl.formats.base import OutputTensor
from ckptctl.ops.extraction.slices import Slice


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """What is taken, and how; see ``ckptctl extract --help``.

    Attributes:
        slice: The part of each tensor; None: what follows the name, or all of it.
        dtype: torch's name of the dtype that floating tensors are cast to; None: keep.
        layout: Layout whose names and axes are meant; None: the checkpoint's own.
        from_layout: Layout of the checkpoint; None: detect.
        format: Format of the checkpoint; None: detect.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which save, where it holds several; None: the one that its pointer names.
        rules: A file that says how ranks divide tensors, where theirs do not.
        dequantize: torch's name of the dtype that quantised tensors are turned into; None: keep.
        model_type: Family; None: detect.
        root: The model's prefix in the checkpoint; None: find it.
        sizes: Axis sizes that no configuration states.
        allow_overflow: Write elements that became infinite, NaN or saturated.
        overwrite: Replace a file of tensors.
        jobs: Threads; 0: its part of the cores, at most four.
    """

    slice: str | None = None
    dtype: str | None = None
    layout: str | None = None
    from_layout: str | None = None
    format: str | None = None
    weights: Literal["master", "module"] | None = None
    tag: str | None = None
    rules: Path | None = None
    dequantize: str | None = None
    model_type: str | None = None
    root: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    allow_overflow: bool = False
    overwrite: bool = False
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """One tensor that is wanted.

    Attributes:
        name: Its name.
        dtype: What it becomes.
        whole: Its shape.
        part: What of it.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    part: Slice

    @property
    def output(self) -> OutputTensor:
        """Return what is laid out."""
        return OutputTensor(self.name, self.dtype, self.part.shape, (self.name,))
