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
            "fast: the index; headers: also those of all items; full: also all checksums.",
            metavar="LEVEL",
        ),
    ] = "headers"
    nan: Annotated[bool, Option("Read all floating values; name tensors with NaN or Inf.")] = False
    manifest: Annotated[
        bool, Option("With --level full: record the present bytes in SHA256SUMS, if complete.")
    ] = False
    require_verified: Annotated[
        bool, Option("With --level full: fail unless checksums cover all tensors.")
    ] = False
    jobs: opt.Jobs = None
    model: bool = True
