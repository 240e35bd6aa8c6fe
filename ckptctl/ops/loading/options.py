"""The options of a load, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.ops import options as opt
from ckptctl.ops.recognition.dequantise import dequantised
from ckptctl.ops.sources import open_source
from ckptctl.options import Options
from ckptctl.storage.out_of_range import OutOfRange, require_in_range


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """How a checkpoint is read into a state dict.

    Attributes:
        format: Format of the checkpoint; None: detect.
        model_type: Family; None: detect.
        layout: Layout of the state's names; None: detect.
        from_layout: Layout of the checkpoint's; None: detect.
        root: The model's prefix in the checkpoint; None: find it.
        prefix: The model's prefix in the state; None: find it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which of several saves in it; None: the one that its pointer names.
        rules: A file that says how ranks divide tensors, where theirs do not.
        sizes: Axis sizes that no configuration states, by any of their names.
        assets: Directory with configuration; None: the checkpoint's own.
        trust_assets: Whether *assets* are right where the checkpoint's own files contradict them.
        dequantize: torch's name of the dtype that quantised tensors are turned into; None: keep.
        strict: Whether names that are missing or left over are errors.
        cast: Whether floating elements may change their dtype.
        allow_overflow: Whether elements may become infinite, NaN or saturated.
        trusted: Whether leaves that are no tensors may run code when they are unpickled.
        checksum: Whether to compare recorded checksums of what is read whole.
        jobs: Threads; 0: its part of the cores, at most four.
        partial: Whether another layout may be made of a part of the model.
    """

    format: str | None = None
    model_type: str | None = None
    layout: str | None = None
    from_layout: str | None = None
    root: str | None = None
    prefix: str | None = None
    weights: opt.Weights = None
    tag: str | None = None
    rules: opt.Rules = None
    sizes: opt.Sizes = None
    assets: opt.Assets = None
    trust_assets: bool = False
    dequantize: opt.Dequantize = None
    strict: bool = True
    cast: bool = False
    allow_overflow: bool = False
    trusted: bool = False
    checksum: bool = False
    jobs: int = 0
    partial: bool = False

    def open(self, path: str | Path) -> Catalog:
        """Return the index of the checkpoint at *path*, quantised tensors as they are wanted."""
        catalog = open_source(path, self)
        return dequantised(catalog, self.dequantize) if self.dequantize else catalog

    def require_in_range(self, found: Mapping[str, OutOfRange]) -> None:
        """Refuse elements that became infinite, NaN or saturated, unless they are allowed."""
        if not self.allow_overflow:
            require_in_range(found, "`allow_overflow=True` takes them as they are")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of a load on one rank.

    Attributes:
        loaded: Names of the tensors and other leaves of the state that were filled.
        missing: Names in the state, of any rank, that the checkpoint does not have.
        unexpected: Names in the checkpoint that no rank has, where the state has others beside.
        left_out: Names in other parts of the checkpoint, or dropped by a rule, and why.
        cast: Names whose elements changed their dtype, and from what to what.
        notes: What the user should know.
        format: Format of the checkpoint.
        model_type: The family, where names or axes changed.
        from_layout: Layout of the checkpoint, likewise.
        layout: Layout of the state, likewise.
        bytes_read: Bytes that this rank read of tensors.
        bytes_received: Bytes that other ranks read for it.
        out_of_range: What of that which this rank read became infinite, NaN or saturated, by the
            name of the tensor in the state.
        inherited: What each rank that saved has its own of, and this one got of the lowest: it did
            not take part in the save.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    left_out: Mapping[str, str]
    cast: Mapping[str, tuple[str, str]]
    notes: tuple[str, ...]
    format: str
    model_type: str | None = None
    from_layout: str | None = None
    layout: str | None = None
    bytes_read: int = 0
    bytes_received: int = 0
    inherited: tuple[str, ...] = ()
    out_of_range: Mapping[str, OutOfRange] = field(default_factory=dict)
