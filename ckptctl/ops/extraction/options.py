"""How tensors are taken out of a checkpoint, and which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ckptctl.ops import option_checks as checks
from ckptctl.ops import options as opt
from ckptctl.options import Option


@dataclass(frozen=True, kw_only=True)
class OpenOptions(opt.ModelOptions, opt.SourceOptions, opt.FormatOptions):
    """How a checkpoint is opened whose tensors are taken one by one."""

    dtype: opt.DType = None
    layout: Annotated[str | None, opt.layout("Name and take tensors in this layout.")] = None
    from_layout: opt.FromLayout = None
    dequantize: opt.Dequantize = None
    sizes: opt.Sizes = None
    root: opt.Prefix = None
    allow_overflow: opt.AllowOverflow = False
    jobs: opt.Jobs = None


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(OpenOptions):
    """What is taken, and how; see ``ckptctl extract --help``."""

    output: Annotated[
        checks.AnyPath | None,
        Option(
            "Write FILE: .safetensors, .pt or, of one tensor, .npy.",
            python="File to write: .safetensors, .pt or, of one tensor, .npy; None: show values.",
            flags="-o --output",
            metavar="FILE",
            check=checks.output_file,
        ),
    ] = field(default=None, kw_only=False)
    slice: Annotated[str | None, Option("What of each tensor, as in [0:128].", metavar="SLICE")] = (
        None
    )
    overwrite: Annotated[
        bool,
        Option("Replace the file if it is one of tensors.", panel="Safety"),
    ] = False
