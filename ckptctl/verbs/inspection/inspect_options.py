"""Options of ``inspect``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptctl import shared_options as opt
from ckptctl.fit.fit_options import FitOptions
from ckptctl.options import Option, OptionConflict


def build_output_exclusion(other: str) -> OptionConflict:
    """Build the conflict of an option with *other*, whose output it does not affect."""
    return OptionConflict(
        other, why="{this} does not affect the output of {other}", hint="omit {this} or {other}"
    )


@dataclass(frozen=True, kw_only=True)
class InspectOptions(FitOptions, opt.ModelOptions, opt.SourceOptions, opt.FormatOptions):
    """Options of ``inspect``, as in ``ckptctl inspect --help``."""

    stats: Annotated[
        bool,
        Option(
            "Read the data and show statistics per tensor. They are min, max, mean, std, "
            "NaN, Inf and a histogram.",
            excludes=(build_output_exclusion("markdown"),),
        ),
    ] = False
    include: opt.Include = ()
    reference: Annotated[opt.ReferenceName, opt.reference_option("none")] = "none"
