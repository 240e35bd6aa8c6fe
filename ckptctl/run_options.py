"""Options that select checkpoints of a run, for ``prune``, ``--each`` and `CheckpointManager`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from ckptctl import option_checks as checks
from ckptctl.errors import UsageError, format_option
from ckptctl.options import Option, OptionConflict, Options, list_options, option_group
from ckptctl.units import parse_seconds

if TYPE_CHECKING:
    from ckptctl.planner.retention import Policy


DEFAULT_MIN_AGE = "1h"
MAX_RANGE_CHARS = 100
"""Maximum length of a range of steps. Python converts at most 4,300 digits to an integer."""


def parse_duration(value: float | str) -> float:
    """Parse a duration into seconds, where `0` needs no unit."""
    if isinstance(value, str):
        return 0.0 if value.strip() == "0" else parse_seconds(value)
    try:
        return checks.check_tolerance(value)
    except UsageError:
        raise UsageError(f"{value!r} is not a non-negative number of seconds") from None


def check_metric_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Check metric names. A name needs a direction unless it ends in ``loss`` or ``accuracy``."""
    texts = checks.check_globs(value)
    if texts:
        from ckptctl.planner.retention import BestRule  # only needed for this option

        for text in texts:
            BestRule.parse(text)
    return texts


def check_steps_texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """Check the steps, ranges and globs of ``--steps``, and split them at commas."""
    texts = tuple(part for text in checks.check_globs(value) for part in text.split(","))
    for text in texts:
        parse_step_range(text)
    return texts


def parse_step_range(text: str) -> range | None:
    """Parse a step, or a range of steps that includes its last step, or return None for a glob.

    Raises:
        UsageError: The text is empty, or the range contains no step.
    """
    if not text:
        raise UsageError("a step is empty", hint="separate steps by single commas")
    if not re.fullmatch(r"\d*(:\d*){0,2}", text, re.ASCII):
        return None
    if len(text) > MAX_RANGE_CHARS:
        raise UsageError(f"`{text[:MAX_RANGE_CHARS]}...` is too long for a range of steps")
    first, *others = text.split(":")
    last, every = (*others, "", "")[:2] if others else (first, "")
    if every and not int(every):
        raise UsageError(f"`{text}` selects every 0th step", hint="use at least 1")
    steps = range(int(first or 0), int(last) + 1 if last else sys.maxsize, int(every or 1))
    if not steps:
        raise UsageError(f"`{text}` contains no step", why="its first step is after its last")
    return steps


def check_task(value: str) -> str:
    """Return the text ``I/N`` or ``/N`` of ``--task``, or raise if it is malformed."""
    parsed = isinstance(value, str) and re.fullmatch(r"(\d{0,9})/(\d{1,9})", value, re.ASCII)
    if not parsed:
        raise UsageError(
            f"{value!r} does not have the form I/N, e.g. 2/8", hint="I counts from 1 to N"
        )
    number, count = parsed.groups()
    if int(count) < 1:
        raise UsageError(f"`{value}` has no task", why="N is the number of tasks, at least 1")
    if number and not 1 <= int(number) <= int(count):
        raise UsageError(
            f"task {int(number)} is not one of 1 to {int(count)}", hint="I counts from 1 to N"
        )
    return value


@option_group
class KeepOptions(Options):
    """Options that keep checkpoints, shared by ``prune`` and `CheckpointManager`."""

    keep_last: Annotated[
        int | None,
        Option("Keep the newest N checkpoints.", metavar="N", check=checks.build_minimum_check(0)),
    ] = None
    keep_every: Annotated[
        int | None,
        Option(
            "Keep checkpoints with a step divisible by K.",
            metavar="K",
            check=checks.build_minimum_check(0),
        ),
    ] = None
    keep_closest: Annotated[
        int | None,
        Option(
            "Keep the step closest to each multiple of K.",
            metavar="K",
            check=checks.build_minimum_check(0),
        ),
    ] = None
    keep_within: Annotated[
        float | str | None,
        Option(
            "Keep checkpoints of the last TIME, e.g. 7d. The time is counted back from "
            "the newest checkpoint.",
            metavar="TIME",
            check=parse_duration,
            python="Keep checkpoints that are at most this much older than the newest one, e.g. "
            "``7d`` or ``12h``.",
        ),
    ] = None
    keep_interval: Annotated[
        float | str | None,
        Option(
            "Keep one checkpoint per TIME, e.g. 6h.",
            python="Keep one checkpoint per interval, e.g. ``6h`` or ``1d``.",
            metavar="TIME",
            check=parse_duration,
        ),
    ] = None
    keep_best: Annotated[
        str | Sequence[str],
        Option(
            "Keep the best by a metric, e.g. eval_loss. Use eval_loss:3 to keep the best "
            "3, or reward:max to prefer high values. Repeatable.",
            python='Keep the best checkpoint by a metric, e.g. ``"eval_loss"`` or '
            '``"reward:max"``, or the best 3 with ``"eval_loss:3"``. Several metrics are '
            "a list.",
            metavar="METRIC[:min|max][:N]",
            check=check_metric_names,
        ),
    ] = ()
    keep: Annotated[
        str | Sequence[str],
        Option(
            "Keep checkpoints with matching names. Repeatable.",
            metavar="GLOB",
            check=checks.check_globs,
        ),
    ] = ()

    def build_policy(self) -> Policy:
        """Build the retention policy."""
        from ckptctl.planner.retention import BestRule, Policy

        return Policy(
            last=self.keep_last,
            every=self.keep_every,
            closest=self.keep_closest,
            within=_parse_optional_seconds(self.keep_within),
            interval=_parse_optional_seconds(self.keep_interval),
            best=tuple(map(BestRule.parse, self.keep_best)),
            patterns=tuple(self.keep),
        )


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(KeepOptions):
    """Options that select checkpoints of a run, and the part that one task processes."""

    steps: Annotated[
        str | Sequence[str],
        Option(
            "Process only these checkpoints: a step, a range FIRST:LAST[:EVERY] of steps that "
            "includes LAST, or a glob of names. Repeatable.",
            metavar="STEPS",
            check=check_steps_texts,
        ),
    ] = ()
    task: Annotated[
        str | None,
        Option(
            "Process the I-th of N parts with similar sizes. /N takes I from the environment of a "
            "Slurm array or a Kubernetes indexed job.  [default: I and N of a Slurm array, else "
            "1/1]",
            metavar="I/N",
            check=check_task,
            python="Process the I-th of N parts with similar sizes, e.g. ``2/8``. ``/8`` takes the "
            "number from the environment of a Slurm array or a Kubernetes indexed job.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunBatchOptions(SelectionOptions):
    """Options of commands that process one checkpoint, or with ``--each`` those of a run."""

    each: Annotated[
        bool,
        Option(
            "Process each checkpoint of a run's folder. DST/NAME becomes the output, or DST with "
            "{name} or {step} replaced.",
            brief=True,
            excludes=(
                OptionConflict("metadata_only", "it writes no checkpoint"),
                OptionConflict(
                    "checksum", "outputs without checksums cannot be verified when a run is resumed"
                ),
            ),
        ),
    ] = False

    def __post_init__(self) -> None:
        """Check all values, and raise if another option is given without ``--each``."""
        super().__post_init__()
        for option in list_options(type(self)) if not self.each else ():
            if getattr(self, option.name) != option.default:
                raise UsageError(
                    f"{format_option(option.display_name)} requires {format_option('--each')}",
                    why="it selects checkpoints of a run",
                    hint=f"add {format_option('--each')} to process a run",
                )


def _parse_optional_seconds(value: float | str | None) -> float | None:
    return None if value is None else parse_duration(value)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(KeepOptions):
    """Options of ``prune``."""

    thin: Annotated[
        Literal["optimizer"] | None,
        Option("Remove only the given part: optimizer. The weights are kept.", metavar="PART"),
    ] = None
    include_incomplete: Annotated[
        bool, Option("Remove damaged checkpoints as well.", panel="Select", brief=True)
    ] = False
    min_age: Annotated[
        float | str,
        Option(
            "Remove a damaged checkpoint only if it has not changed for this long.",
            metavar="TIME",
            check=parse_duration,
            panel="Select",
        ),
    ] = DEFAULT_MIN_AGE
    force: Annotated[
        bool, Option("Prune even if step order and modification times disagree.", panel="Safety")
    ] = False

    def __post_init__(self) -> None:
        """Check all values, and raise if `min_age` is set without `include_incomplete`."""
        super().__post_init__()
        if not self.include_incomplete and self.min_age != parse_duration(DEFAULT_MIN_AGE):
            raise UsageError(
                f"{format_option('--min-age')} only applies to incomplete checkpoints; it requires "
                f"{format_option('--include-incomplete')}"
            )

    def build_policy(self) -> Policy:
        """Build the retention policy."""
        min_age = parse_duration(self.min_age)
        return replace(super().build_policy(), incomplete=self.include_incomplete, min_age=min_age)
