"""What a report is asked to hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ckptctl.ops import option_checks as checks
from ckptctl.ops import options as opt
from ckptctl.ops.comparison.options import ComparisonOptions
from ckptctl.options import Argument, Option

MAX_TENSORS = 20_000
STDOUT = "-"


def _page(value: checks.AnyPath) -> checks.AnyPath:
    return value if value == STDOUT else checks.output_file(value)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ComparisonOptions, opt.SourceOptions, opt.FormatOptions):
    """What goes into a report; see ``ckptctl report --help``."""

    output: Annotated[
        checks.AnyPath | None,
        Option(
            "The page to write; - is standard output.  [default: PATH-report.html, here]",
            python="The page to write; None: none.",
            flags="-o --output",
            metavar="FILE",
            check=_page,
        ),
    ] = field(default=None, kw_only=False)
    other: Annotated[
        checks.AnyPath | None,
        Argument("Show where it differs from this one.", metavar="OTHER", check=checks.place),
    ] = None
    stats: Annotated[bool, Option("Read the data: statistics and histograms.")] = False
    max_tensors: Annotated[
        int,
        Option(
            "List so many at most: those with findings, then the largest.",
            metavar="N",
            check=checks.positive,
            panel="Output",
        ),
    ] = MAX_TENSORS
    format_other: Annotated[
        str | None, opt.source_format("Format of the other, if not detected.", "--from-other")
    ] = None
    weights_other: Annotated[
        opt.WeightsOf | None, Option("Likewise of the other.", metavar="KIND", panel="Select")
    ] = None
    tag_other: Annotated[
        str | None, Option("Likewise of the other.", metavar="NAME", panel="Select")
    ] = None
    overwrite: Annotated[
        bool,
        Option("Replace the file if it is such a page.", panel="Safety"),
    ] = False
