"""Options of ``report``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.options import Argument, Option, OptionConflict
from ckptctl.verbs.comparison.diff_options import ComparisonOptions
from ckptctl.verbs.inspection.inspect_options import FitOptions

MAX_TENSORS = 20_000
STDOUT = "-"


def _check_page(value: checks.AnyPath) -> checks.AnyPath:
    return value if value == STDOUT else checks.check_output_file(value)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(FitOptions, ComparisonOptions, opt.SourceOptions, opt.FormatOptions):
    """Options of ``report``, as in ``ckptctl report --help``."""

    output: Annotated[
        checks.AnyPath | None,
        Option(
            "HTML file to write, or - for standard output.  [default: PATH-report.html "
            "in the current directory]",
            python="HTML file to write. None writes no file.",
            flags="-o --output",
            metavar="FILE",
            check=_check_page,
        ),
    ] = field(default=None, kw_only=False)
    other: Annotated[
        checks.AnyPath | None,
        Argument("Checkpoint to compare with.", metavar="OTHER", check=checks.check_location),
    ] = None
    stats: Annotated[bool, Option("Read the data and show statistics and histograms.")] = False
    movement: Annotated[
        bool,
        Option(
            "Show how far each layer moved from PATH to OTHER.",
            requires="other",
            excludes=(
                OptionConflict("structure", "it requires data"),
                OptionConflict("quick", "it requires all data"),
            ),
        ),
    ] = False
    max_tensors: Annotated[
        int,
        Option(
            "Maximum number of listed tensors. Those with findings are listed first, "
            "then the largest.",
            metavar="N",
            check=checks.check_positive,
            panel="Output",
        ),
    ] = MAX_TENSORS
    format_other: Annotated[
        str | None,
        opt.source_format_option("Format of OTHER.  [default: detected]", "--from-other"),
    ] = None
    weights_other: Annotated[
        opt.WeightsKind | None,
        Option(
            "Weights of OTHER to read if it has both: master (the optimizer's fp32 "
            "copies) or module.  [default: master]",
            metavar="KIND",
            panel="Select",
        ),
    ] = None
    tag_other: Annotated[
        str | None,
        Option(
            "Tag of the save to read from OTHER, if it has several.  [default: the one "
            "in `latest`]",
            metavar="NAME",
            panel="Select",
        ),
    ] = None
    overwrite: Annotated[
        bool, Option("Replace the file if it is a ckptctl report.", panel="Safety", brief=True)
    ] = False
