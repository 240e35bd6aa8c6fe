"""What pruning a run is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from ckptctl.errors import UsageError
from ckptctl.ops import option_checks as checks
from ckptctl.options import Option, Options
from ckptctl.units import parse_seconds

if TYPE_CHECKING:
    from ckptctl.planner.retention import Policy


AN_HOUR = "1h"


def age(value: float | str) -> float:
    """Return the seconds that a duration means; `0` needs no unit."""
    if isinstance(value, str):
        return 0.0 if value.strip() == "0" else parse_seconds(value)
    return checks.tolerated(value)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(Options):
    """Which checkpoints of a run are kept, and what becomes of the others."""

    keep_last: Annotated[
        int | None, Option("Keep the newest N.", metavar="N", check=checks.at_least(0))
    ] = None
    keep_every: Annotated[
        int | None,
        Option("Keep those whose step K divides.", metavar="K", check=checks.at_least(0)),
    ] = None
    keep_within: Annotated[
        float | str | None,
        Option(
            "Keep those that are at most 7d, 12h, ... older than the newest.",
            metavar="TIME",
            check=age,
        ),
    ] = None
    keep_best: Annotated[
        Sequence[str],
        Option(
            "Keep the best: eval_loss, reward:max, ...; repeatable.",
            python='Keep the best by a metric: ``"eval_loss"``, ``"reward:max"``; or by several.',
            metavar="METRIC[:min|max]",
            check=checks.globs,
        ),
    ] = ()
    keep: Annotated[
        Sequence[str],
        Option("Keep names that match; repeatable.", metavar="PATTERN", check=checks.globs),
    ] = ()
    thin: Annotated[
        Literal["optimizer"] | None,
        Option("optimizer: take its state away, and keep the weights.", metavar="PART"),
    ] = None
    include_incomplete: Annotated[bool, Option("Remove incomplete ones, too.", panel="Select")] = (
        False
    )
    min_age: Annotated[
        float | str,
        Option(
            "Incomplete ones have to be untouched for so long.",
            metavar="TIME",
            check=age,
            panel="Select",
        ),
    ] = AN_HOUR
    force: Annotated[
        bool, Option("Go by steps though times disagree; see the docs.", panel="Safety")
    ] = False

    def __post_init__(self) -> None:
        """Check all values; an age says something of incomplete ones alone."""
        super().__post_init__()
        if not self.include_incomplete and self.min_age != age(AN_HOUR):
            raise UsageError(
                "`--min-age` is about incomplete checkpoints, which stay without "
                "`--include-incomplete`"
            )

    def policy(self) -> Policy:
        """Return what is kept."""
        from ckptctl.ops.runs.refusals import parse_best
        from ckptctl.planner.retention import Policy

        return Policy(
            last=self.keep_last,
            every=self.keep_every,
            within=None if self.keep_within is None else age(self.keep_within),
            best=tuple(map(parse_best, self.keep_best)),
            patterns=tuple(self.keep),
            incomplete=self.include_incomplete,
            min_age=age(self.min_age),
        )
