"""Options of ``prune`` and of the retention policy of `CheckpointManager`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from ckptctl import option_checks as checks
from ckptctl.errors import UsageError, format_option
from ckptctl.options import Option, Options, option_group
from ckptctl.units import parse_seconds

if TYPE_CHECKING:
    from ckptctl.planner.retention import Policy


DEFAULT_MIN_AGE = "1h"


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
    from ckptctl.planner.retention import BestRule

    texts = checks.check_globs(value)
    for text in texts:
        BestRule.parse(text)
    return texts


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
