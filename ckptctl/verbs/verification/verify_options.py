"""Options of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ckptctl import shared_options as opt
from ckptctl.options import Option

Level = Literal["fast", "headers", "full"]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(opt.ModelOptions, opt.SourceOptions, opt.FormatOptions):
    """Options of ``verify``, as in ``ckptctl verify --help``."""

    level: Annotated[
        Level,
        Option(
            "Depth of the check: fast, headers or full. Each level adds to the previous "
            "one: the index, the header of each item, and all checksums.",
            metavar="LEVEL",
        ),
    ] = "headers"
    nan: Annotated[
        bool, Option("Report tensors with NaN or Inf. Reads all floating-point values.")
    ] = False
    manifest: Annotated[
        bool,
        Option(
            "Record the checksums of all files in SHA256SUMS. Requires --level full and "
            "a complete checkpoint.",
            python="Record the checksums of all files in SHA256SUMS. Requires `level` full and a "
            "complete checkpoint.",
            requires="level=full",
        ),
    ] = False
    require_verified: Annotated[
        bool,
        Option(
            "Fail unless checksums cover all tensors. Requires --level full.",
            python="Fail unless checksums cover all tensors. Requires `level` full.",
            requires="level=full",
        ),
    ] = False
    reference: opt.Reference = None
    jobs: opt.Jobs = None
    model: bool = True
