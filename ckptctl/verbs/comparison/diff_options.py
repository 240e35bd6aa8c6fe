"""Options of ``diff``, and those that it shares with ``report``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.options import Option, OptionConflict, option_group

_WEIGHTS = (
    "Weights of {} to read if it has both: master (the optimizer's fp32 copies) "
    "or module.  [default: master]"
)
_ROOT = "Prefix of the model's keys in {}.  [default: detected]"


_DATA = OptionConflict("structure", why="{other} does not compare data", hint="omit {this}")


def _build_tolerance_option(text: str) -> Option:
    return Option(text, metavar="X", check=checks.check_tolerance, excludes=(_DATA,))


@option_group
class ComparisonOptions(opt.ModelOptions):
    """Options of every comparison of two checkpoints."""

    structure: Annotated[bool, Option("Compare only names, shapes and dtypes.")] = False
    quick: Annotated[
        bool, Option("Skip tensors with recorded checksums that match.", excludes=(_DATA,))
    ] = False
    atol: Annotated[float | None, _build_tolerance_option("Absolute tolerance.")] = None
    rtol: Annotated[float | None, _build_tolerance_option("Relative tolerance.")] = None
    ignore_dtype: Annotated[bool, Option("Treat equal numbers of different dtypes as equal.")] = (
        False
    )
    dequantize: opt.Dequantize = None
    include: opt.Include = ()
    only: Annotated[
        opt.Part,
        Option("Part to compare: model or all.", metavar="PART", panel="Select", brief=True),
    ] = "all"
    rules: opt.Rules = None


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ComparisonOptions):
    """Options of ``diff``, as in ``ckptctl diff --help``."""

    exclude: opt.Exclude = ()
    format_a: Annotated[
        str | None, opt.source_format_option("Format of A.  [default: detected]")
    ] = None
    format_b: Annotated[
        str | None, opt.source_format_option("Format of B.  [default: detected]")
    ] = None
    layout_a: Annotated[str | None, opt.layout_option("Layout of A.  [default: detected]")] = None
    layout_b: Annotated[str | None, opt.layout_option("Layout of B.  [default: detected]")] = None
    weights_a: Annotated[
        opt.WeightsKind | None, Option(_WEIGHTS.format("A"), metavar="KIND", panel="Select")
    ] = None
    weights_b: Annotated[
        opt.WeightsKind | None, Option(_WEIGHTS.format("B"), metavar="KIND", panel="Select")
    ] = None
    tag_a: Annotated[
        str | None,
        Option(
            "Tag of the save to read from A, if it has several.  [default: the one in `latest`]",
            metavar="NAME",
            panel="Select",
        ),
    ] = None
    tag_b: Annotated[
        str | None,
        Option(
            "Tag of the save to read from B, if it has several.  [default: the one in `latest`]",
            metavar="NAME",
            panel="Select",
        ),
    ] = None
    root_a: Annotated[
        str | None, Option(_ROOT.format("A"), metavar="PREFIX", panel="Format and model")
    ] = None
    root_b: Annotated[
        str | None, Option(_ROOT.format("B"), metavar="PREFIX", panel="Format and model")
    ] = None
    sizes: opt.Sizes = None
    jobs: opt.Jobs = None
