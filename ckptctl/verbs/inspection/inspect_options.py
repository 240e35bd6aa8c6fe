"""Options of ``inspect``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from ckptctl import shared_options as opt
from ckptctl.errors import UsageError
from ckptctl.option_checks import check_positive
from ckptctl.options import Option, OptionConflict, Options
from ckptctl.units import escape_unprintable, format_bytes, parse_bytes


def build_output_exclusion(other: str) -> OptionConflict:
    """Build the conflict of an option with *other*, whose output it does not affect."""
    return OptionConflict(
        other, why="{this} does not affect the output of {other}", hint="omit {this} or {other}"
    )


CacheDType = Literal["auto", "bf16", "fp16", "fp32", "fp8"]
TOKENS = re.compile(r"([0-9]{1,12})([kKmM]?)", re.ASCII)
MAX_TOKENS = 10**12 - 1
TOKEN_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
GPUS = re.compile(r"\s*([0-9]{1,6})\s*[xX]\s*(\S.*)", re.ASCII | re.DOTALL)
SMALLEST_GPU_BYTES = 10**6
"""Smallest memory of a GPU. A smaller number probably lacks its unit."""


class Gpus(NamedTuple):
    """GPUs with the same memory in bytes."""

    number: int
    memory: int


def parse_gpus(text: str) -> Gpus:
    """Parse ``80GB`` or ``4x80GB``.

    Raises:
        UsageError: The text is not a size, or a number before it is zero.
    """
    match = GPUS.fullmatch(text)
    count, size = (int(match[1]), match[2]) if match else (1, text)
    try:
        memory = parse_bytes(size)
    except UsageError as error:
        shown = escape_unprintable(text)
        raise UsageError(f"`{shown}` is not a size; write it like `80GB` or `4x80GB`") from error
    if not count:
        raise UsageError("the number of GPUs must be at least 1")
    if memory < SMALLEST_GPU_BYTES:
        raise UsageError(
            f"a GPU with {format_bytes(memory)} is too small",
            hint=f"did you mean `{size.strip()}GB`?" if size.strip().isdecimal() else None,
        )
    return Gpus(count, memory)


def check_gpus(value: str) -> str:
    """Return *value*, or raise if it does not describe GPUs."""
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not a memory size; write it like `80GB` or `4x80GB`")
    parse_gpus(value)
    return value


def check_tokens(value: str | int) -> int:
    """Parse a number of tokens, such as ``8192``, ``32k`` (times 1024) or ``1M`` (times 1024^2).

    Raises:
        UsageError: The value is not a number of tokens, or is zero or too large.
    """
    match = TOKENS.fullmatch(str(value).strip())
    count = int(match[1]) * TOKEN_UNITS[match[2].lower()] if match else 0
    if isinstance(value, bool) or not 0 < count <= MAX_TOKENS:
        text = escape_unprintable(str(value))
        raise UsageError(f"`{text}` is not a number of tokens; write it like `8192` or `32k`")
    return count


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """Options that determine the memory for inference."""

    fit: Annotated[
        str | None,
        Option(
            "Show memory for inference on such GPUs, as in 4x80GB.",
            metavar="[Nx]SIZE",
            check=check_gpus,
            excludes=tuple(map(build_output_exclusion, ("markdown", "tensors", "depth", "stats"))),
        ),
    ] = None
    context: Annotated[
        int | str | None,
        Option(
            "Tokens per request, such as 8192 or 32k.  [default: max_position_embeddings]",
            metavar="N",
            check=check_tokens,
            panel="Advanced",
            requires="fit",
        ),
    ] = None
    kv_dtype: Annotated[
        CacheDType,
        Option(
            "Dtype of the KV cache: auto (as in config.json), bf16, fp16, fp32 or fp8.",
            metavar="DTYPE",
            panel="Advanced",
            requires="fit",
        ),
    ] = "auto"
    tp: Annotated[
        int | None,
        Option(
            "Tensor-parallel size.  [default: all GPUs of a pipeline stage]",
            metavar="N",
            check=check_positive,
            panel="Advanced",
            requires="fit",
        ),
    ] = None
    pp: Annotated[
        int | None,
        Option(
            "Number of pipeline stages.  [default: 1]",
            metavar="N",
            check=check_positive,
            panel="Advanced",
            requires="fit",
        ),
    ] = None
    ep: Annotated[
        int | None,
        Option(
            "Number of GPUs among which experts are distributed.  [default: 1, which splits each "
            "expert like other weights]",
            metavar="N",
            check=check_positive,
            panel="Advanced",
            requires="fit",
        ),
    ] = None


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
