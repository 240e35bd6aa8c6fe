"""What pruning a run is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from ckptctl.ops import option_checks as checks
from ckptctl.options import Option, Options
from ckptctl.units import parse_seconds

if TYPE_CHECKING:
    from ckptctl.planner.retention import Policy


def age(value: float | str) -> float:
    """Return the seconds that a duration means; `0` needs no unit."""
    if isinstance(value, str):
        return 0.0 if value.strip() == "0" else parse_seconds(value)
    return checks.tolerated(value)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(Options):
    """Which checkpoints of a run are kept, and what becomes of the others."""

    keep_last: Annotated[int | None, Option("Keep the newest N.", metavar="N")] = None
    keep_every: Annotated[int | None, Option("Keep those whose step K divides.", metavar="K")] = (
        None
    )
    keep_within: Annotated[
        float | None,
        Option(
            "Keep those that are at most 7d, 12h, ... older than the newest.",
            metavar="TIME",
            parse=parse_seconds,
        ),
    ] = None
    keep_best: Annotated[
        Sequence[str],
        Option(
            "Keep the best: eval_loss, reward:max, ...; repeatable.", metavar="METRIC[:min|max]"
        ),
    ] = ()
    keep: Annotated[
        Sequence[str], Option("Keep names that match; repeatable.", metavar="PATTERN")
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
    ] = "1h"
    force: Annotated[
        bool, Option("Go by steps though times disagree; see the docs.", panel="Safety")
    ] = False

    def policy(self) -> Policy:
        """Return what is kept."""
        from ckptctl.ops.runs.refusals import parse_best
        from ckptctl.planner.retention import Policy

        return Policy(
            last=self.keep_last,
            every=self.keep_every,
            within=self.keep_within,
            best=tuple(map(parse_best, self.keep_best)),
            patterns=tuple(self.keep),
            incomplete=self.include_incomplete,
            min_age=age(self.min_age),
        )
