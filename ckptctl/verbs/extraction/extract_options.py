"""Options of ``extract`` and ``open``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.options import Option


@dataclass(frozen=True, kw_only=True)
class OpenOptions(opt.ModelOptions, opt.SourceOptions, opt.FormatOptions):
    """Options for opening a checkpoint lazily."""

    dtype: opt.DType = None
    layout: Annotated[
        str | None,
        opt.layout_option(
            "Layout in which tensors are named and extracted.  [default: layout of the checkpoint]"
        ),
    ] = None
    from_layout: opt.FromLayout = None
    dequantize: opt.Dequantize = None
    sizes: opt.Sizes = None
    root: opt.Prefix = None
    allow_overflow: opt.AllowOverflow = False
    jobs: opt.Jobs = None


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(OpenOptions):
    """Options of ``extract``, as in ``ckptctl extract --help``."""

    output: Annotated[
        checks.AnyPath | None,
        Option(
            "Output file: .safetensors, .pt or .npy (one tensor).",
            python="Output file: .safetensors, .pt or .npy (one tensor). None writes no "
            "file and returns a preview of the values.",
            flags="-o --output",
            metavar="FILE",
            check=checks.check_output_file,
        ),
    ] = field(default=None, kw_only=False)
    slice: Annotated[str | None, Option("Slice of each tensor, e.g. [0:128].", metavar="SLICE")] = (
        None
    )
    device: opt.Device = None
    overwrite: Annotated[
        bool,
        Option("Replace the output file if it contains tensors.", panel="Safety"),
    ] = False
