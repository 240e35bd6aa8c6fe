"""Schedule of saves by step, by time since the last save, or by a function.

Steps are the same on all ranks, but clocks are not, so rank 0 decides for all ranks. It uses the
monotonic clock. Only the age of the last save of an earlier process is computed from dates, and is
limited to one interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

from ckptctl import option_checks as checks
from ckptctl.errors import UsageError
from ckptctl.options import Option, Options, option_group
from ckptctl.ranks.coordinator import RankCollectives, run_and_all_gather
from ckptctl.run_options import parse_duration


def check_steps(value: Iterable[int]) -> frozenset[int]:
    """Convert *value* to a set of steps, or raise."""
    if not isinstance(value, Iterable):
        raise UsageError(f"{value!r} is not a list of steps")
    return frozenset(map(checks.check_step, value))


@option_group
class SaveRules(Options):
    """Rules of ``should_save``. Any rule can require a save."""

    save_every: Annotated[
        int | None,
        Option(
            "Save steps divisible by K. If the loop skips such a step, the next step passed to "
            ":meth:`should_save` is saved.",
            check=checks.build_minimum_check(1),
        ),
    ] = None
    save_interval: Annotated[
        float | str | None,
        Option(
            "Save when this much time has passed since the last save: ``30m``, ``2h`` or "
            "seconds. With 0, save whenever no save is running. Rank 0's clock decides.",
            check=parse_duration,
        ),
    ] = None
    save_steps: Annotated[Sequence[int], Option("Save these steps.", check=check_steps)] = ()
    save_first: Annotated[
        bool,
        Option(
            "Save the first step passed to :meth:`should_save`, if the run has no checkpoint yet."
        ),
    ] = False
    save_if: Annotated[
        Callable[[int], object] | None,
        Option(
            "Function called with the step on every rank. The step is saved if it "
            "returns true on any rank. Its exceptions are raised on all ranks."
        ),
    ] = None


class _RankVote(NamedTuple):
    """Vote of one rank on whether a step must be saved."""

    step: int
    is_wanted: bool
    has_checkpoint: bool


class Schedule:
    """Schedule of a run's saves, which makes the same decisions on all ranks.

    Args:
        rules: Rules to apply.
        busy: Returns whether a save is running on this rank.
        has_checkpoint: Returns whether the run has a checkpoint. Called on rank 0.
        ranks: Returns the ranks in a group for CPU tensors, used at every step.
    """

    def __init__(
        self,
        rules: SaveRules,
        is_save_running: Callable[[], bool],
        has_checkpoint: Callable[[], bool],
        ranks: Callable[[], RankCollectives],
    ) -> None:
        self._rules = rules
        self._ranks = ranks
        self._busy = is_save_running
        self._has_checkpoint = has_checkpoint
        self._begun = not rules.save_first
        self._last_step: int | None = None
        self._previous_step: int | None = None  # the previous step
        self._since = time.monotonic()
        every = rules.save_interval
        self._interval = None if every is None else parse_duration(every)

    def is_due(self, step: int) -> bool:
        """Return whether *step* must be saved. All ranks get the same result.

        Raises:
            UsageError: The ranks are at different steps.
        """
        by_step = self._is_due_by_step(step)
        if self._interval is None and self._rules.save_if is None and self._begun:
            return by_step
        ranks = self._ranks()
        _, votes = run_and_all_gather(
            ranks, lambda: (None, self._build_vote(step, first=ranks.rank == 0))
        )
        for rank, vote in enumerate(votes):
            if vote.step != step:
                raise UsageError(
                    "the ranks are not at the same step",
                    why=f"rank {ranks.rank} is at step {step}, rank {rank} at step {vote.step}",
                )
        self._begun, new = votes[0].has_checkpoint, not votes[0].has_checkpoint
        return by_step or new or any(vote.is_wanted for vote in votes)

    def record_save(self) -> None:
        """Record that a save has begun, which restarts the save interval."""
        self._begun = True
        self._since = time.monotonic()

    def record_resume(self, step: int, saved_at: float) -> None:
        """Record the checkpoint from which training resumes.

        Args:
            step: Step of the checkpoint.
            saved_at: Time at which the checkpoint was saved, in seconds since the epoch.
        """
        self._begun, self._last_step = True, step
        # A wrong system date makes the next save early, or late by at most one interval.
        age = min(max(0.0, time.time() - saved_at), self._interval or 0.0)
        self._since = time.monotonic() - age

    def _is_due_by_step(self, step: int) -> bool:
        if step != self._last_step:
            self._previous_step, self._last_step = self._last_step, step
        before, every = self._previous_step, self._rules.save_every
        if before is None or before >= step:
            before = step - 1
        crossed = every is not None and step > 0 and step // every > before // every
        return crossed or step in self._rules.save_steps

    def _build_vote(self, step: int, *, first: bool) -> _RankVote:
        is_wanted = bool(self._rules.save_if and self._rules.save_if(step))
        if first and self._interval is not None:
            is_wanted |= time.monotonic() - self._since >= self._interval and not self._busy()
        return _RankVote(step, is_wanted, self._begun or (first and self._has_checkpoint()))
