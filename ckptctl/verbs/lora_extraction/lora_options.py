"""Options of ``extract-lora``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.errors import UsageError, format_option
from ckptctl.options import Option, OptionConflict


@dataclass(frozen=True, kw_only=True)
class LoraExtractionOptions(opt.ModelOptions):
    """Options of ``extract-lora``, as in ``ckptctl extract-lora --help``."""

    rank: Annotated[
        int | None,
        Option(
            "Rank of the adapter in every layer.",
            metavar="N",
            check=checks.check_positive,
            excludes=(OptionConflict("energy"),),
        ),
    ] = None
    energy: Annotated[
        float | None,
        Option(
            "Lowest rank that keeps this share of the change. It refers to squared "
            "singular values, e.g. 0.95.",
            metavar="SHARE",
            check=checks.check_fraction,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            "Dtype of the LoRA factors.  [default: fp32]",
            metavar="DTYPE",
            check=checks.check_floating_dtype,
            offers=checks.list_floating_dtypes,
        ),
    ] = None
    others: Annotated[
        Literal["refuse", "leave-out", "save"],
        Option(
            "Handle changes outside of linear layers. HOW is refuse, leave-out, or save, which "
            "stores the full tensors.",
            metavar="HOW",
        ),
    ] = "refuse"
    include: Annotated[
        Sequence[str],
        Option(
            "Include only layers with matching weights. Repeatable.",
            metavar="GLOB",
            check=checks.check_globs,
        ),
    ] = ()
    exclude: Annotated[
        Sequence[str],
        Option(
            "Exclude layers with matching weights. Repeatable.",
            metavar="GLOB",
            check=checks.check_globs,
        ),
    ] = ()
    dequantize: opt.Dequantize = None
    device: opt.Device = None
    overwrite: Annotated[
        bool, Option("Replace the destination if it is a checkpoint.", panel="Safety")
    ] = False

    def require_rank_or_energy(self) -> None:
        """Raise unless the options set a rank or an energy."""
        if self.rank is None and self.energy is None:
            raise UsageError(
                f"{format_option('--rank')} or {format_option('--energy')} is required"
            )
