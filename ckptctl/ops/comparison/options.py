"""What a comparison is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptctl.ops import option_checks as checks
from ckptctl.ops import options as opt
from ckptctl.options import Option, group

_WEIGHTS = "master (fp32 copies of the optimizer) or module, where {} has both."
_ROOT = "What stands before the model's names in {}, if not detected."


def _tolerance(text: str) -> Option:
    return Option(text, metavar="X", check=checks.tolerated)


@group
class ComparisonOptions(opt.ModelOptions):
    """What says how two checkpoints are compared."""

    structure: Annotated[bool, Option("Compare only names, shapes and dtypes.")] = False
    quick: Annotated[
        bool, Option("Do not read tensors whose recorded checksums match in both.")
    ] = False
    atol: Annotated[float | None, _tolerance("Absolute difference that counts as equal.")] = None
    rtol: Annotated[float | None, _tolerance("Relative difference that counts as equal.")] = None
    ignore_dtype: Annotated[bool, Option("Other dtypes with equal numbers are the same.")] = False
    dequantize: opt.Dequantize = None
    include: opt.Include = ()
    only: Annotated[
        opt.Part,
        Option("Compare all, or model alone.", metavar="PART", panel="Select"),
    ] = "all"
    rules: opt.Rules = None


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ComparisonOptions):
    """What is compared, and how; see ``ckptctl diff --help``."""

    exclude: opt.Exclude = ()
    format_a: Annotated[str | None, opt.source_format("Format of A, if not detected.")] = None
    format_b: Annotated[str | None, opt.source_format("Format of B, if not detected.")] = None
    layout_a: Annotated[str | None, opt.layout("How A names its tensors, if not detected.")] = None
    layout_b: Annotated[str | None, opt.layout("How B names its tensors, if not detected.")] = None
    weights_a: Annotated[
        opt.WeightsOf | None, Option(_WEIGHTS.format("A"), metavar="KIND", panel="Select")
    ] = None
    weights_b: Annotated[
        opt.WeightsOf | None, Option(_WEIGHTS.format("B"), metavar="KIND", panel="Select")
    ] = None
    tag_a: Annotated[
        str | None, Option("Which save, where A holds several.", metavar="NAME", panel="Select")
    ] = None
    tag_b: Annotated[
        str | None, Option("Which save, where B holds several.", metavar="NAME", panel="Select")
    ] = None
    root_a: Annotated[
        str | None, Option(_ROOT.format("A"), metavar="PREFIX", panel="Format and model")
    ] = None
    root_b: Annotated[
        str | None, Option(_ROOT.format("B"), metavar="PREFIX", panel="Format and model")
    ] = None
    sizes: opt.Sizes = None
    jobs: opt.Jobs = None
