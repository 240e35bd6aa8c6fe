"""Options of ``ckptctl average``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.conversion.conversion_options import WriteOptions
from ckptctl.errors import UsageError
from ckptctl.options import Option, OptionConflict, parse_number
from ckptctl.verbs.averages.average_weights import Schedule

WEIGHTS_CONFLICT = "both set the weights"


def parse_weights(texts: Sequence[str]) -> tuple[float, ...]:
    """Parse comma-separated weights."""
    return tuple(parse_number(float, part) for text in texts for part in text.split(","))


def check_weights(value: Sequence[float]) -> tuple[float, ...]:
    """Return weights as a tuple, or raise unless they are non-negative numbers with a sum above 0.

    A weight of 0 would read a checkpoint for nothing, so it is an error, too.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{value!r} is not a list of numbers")
    for weight in value:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UsageError(f"{weight!r} is not a number")
        if not (0 < weight < math.inf):
            raise UsageError(
                f"{weight:g} is not a positive number",
                why="an average is between its inputs, so all weights are positive",
            )
    return tuple(map(float, value))


@dataclass(frozen=True, kw_only=True)
class AverageOptions(WriteOptions):
    """Options of an average (``ckptctl average --help``)."""

    to: Annotated[
        str | None,
        opt.target_format_option(
            f"Format to write: {opt.FORMATS}.  [default: format of the last SRC]"
        ),
    ] = None
    # Replaces the option that selects master or module weights, whose default applies.
    weights: Annotated[
        Sequence[float] | None,
        Option(
            "Weights of the checkpoints, in order, e.g. 1,1,2. They are divided by their sum.  "
            "[default: equal weights]",
            metavar="W,W,...",
            parse=parse_weights,
            check=check_weights,
            python="Weights of the checkpoints, in order. They are divided by their sum.  "
            "[default: equal weights]",
            excludes=(
                OptionConflict("ema", WEIGHTS_CONFLICT),
                OptionConflict("schedule", WEIGHTS_CONFLICT),
            ),
        ),
    ] = None  # type: ignore[assignment]
    ema: Annotated[
        float | None,
        Option(
            "Exponential moving average, e.g. 0.9.",
            metavar="DECAY",
            check=checks.check_fraction,
            excludes=(OptionConflict("schedule", WEIGHTS_CONFLICT),),
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Option(
            "Emulated decay (WSM): linear, cosine or 1-sqrt.",
            metavar="SHAPE",
        ),
    ] = None
    last: Annotated[
        int | None,
        Option(
            "Average the newest N complete checkpoints of a run. SRC is the run's folder.",
            metavar="N",
            check=checks.build_minimum_check(2),
        ),
    ] = None
    every: Annotated[
        int | None,
        Option(
            "Select checkpoints of a run with a step divisible by K. SRC is the run's folder.",
            metavar="K",
            check=checks.check_positive,
        ),
    ] = None


UNSUPPORTED_OPTIONS = (
    *("tag", "fill_from", "allow_missing", "verify_replicas", "lora_alpha"),
    "ranks",
)
"""Conversion options that ``average`` lacks, because they apply to a single source."""
