"""What a verification is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ckptctl.ops import options as opt
from ckptctl.options import Option

Level = Literal["fast", "headers", "full"]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(opt.ModelOptions, opt.SourceOptions, opt.FormatOptions):
    """What to verify, and how much of it; see ``ckptctl verify --help``."""

    level: Annotated[
        Level,
        Option(
            "Level of the check: fast (index), headers (also the headers of all items) "
            "or full (also all checksums).",
            metavar="LEVEL",
        ),
    ] = "headers"
    nan: Annotated[
        bool, Option("Read all floating-point values and report tensors with NaN or Inf.")
    ] = False
    manifest: Annotated[
        bool,
        Option(
            "Record the checksums of all files in SHA256SUMS, if the checkpoint is "
            "complete. Requires --level full."
        ),
    ] = False
    require_verified: Annotated[
        bool, Option("Fail unless checksums cover all tensors. Requires --level full.")
    ] = False
    jobs: opt.Jobs = None
    model: bool = True
