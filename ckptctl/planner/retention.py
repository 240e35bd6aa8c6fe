"""Retention rules that select the checkpoints of a run to keep, without access to files.

A checkpoint is kept if any rule keeps it. Rules only apply to complete checkpoints, and the newest
complete checkpoint of a series is always kept. The rules are those of
``restic forget`` (``--keep-last``, ``--keep-within``) and of Orbax's preservation policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Generic, Literal, TypeVar

from ckptctl.errors import RefusedError, UsageError, find_nearest, format_option, quote_names
from ckptctl.planner.lineage import UNKNOWN_LINEAGE, Lineage, find_abandoned_saves
from ckptctl.results import JsonField, empty_to_none
from ckptctl.verdict import Verdict

Action = Literal["keep", "remove", "skip"]

BEING_WRITTEN, NOT_INTERRUPTED = "being written", "no incomplete write"
"""Reasons to skip an incomplete checkpoint, which tables omit because the state implies them."""
HOUR_SECONDS = 3600.0
DURATION_UNITS = (("d", 86_400.0), ("h", HOUR_SECONDS), ("min", 60.0), ("s", 1.0))
CLOCK_TOLERANCE_SECONDS = 2.0
"""Tolerance in seconds for comparing times, which is the resolution of timestamps on FAT."""


def replace_nonfinite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity in metrics by None for JSON, sorted by name."""
    return {n: value if math.isfinite(value) else None for n, value in sorted(metrics.items())}


@dataclass(frozen=True, slots=True)
class Retainable:
    """One checkpoint of a run.

    Attributes:
        series: Common part of checkpoint names. Rules are applied to each series separately.
        order: Sort key within the series, such as step, epoch and version.
        time: Time of the write, in seconds since the epoch.
        pinned: References to the checkpoint, such as pointer files, which keep it.
        torn: Whether the files show an interrupted write. Only then is a damaged checkpoint
            removed.
        exempt: Reason to skip the checkpoint regardless of the policy, or empty if it is not
            exempt. If the state is the reason, this equals the state.
        lineage: Save number and previous resumes, if the checkpoint records them.
    """

    name: str
    series: str
    order: tuple[int, ...]
    time: float
    verdict: Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")] = Verdict.COMPLETE
    writing: Annotated[
        bool,
        JsonField("whether it is incomplete, and locked or changed less than ten minutes ago"),
    ] = False
    torn: bool = False
    problem: Annotated[str, JsonField("reason it is not complete, or null", to=empty_to_none)] = ""
    lacks: Annotated[
        str,
        JsonField(
            "file that is missing here, that most other checkpoints have, and that trainers "
            "write last; training may not resume from this checkpoint, so no other one is "
            "removed in its favor",
            to=empty_to_none,
        ),
    ] = ""
    pinned: tuple[str, ...] = ()
    metrics: Annotated[
        Mapping[str, float],
        JsonField("metrics of the checkpoint; null for NaN or infinity", to=replace_nonfinite),
    ] = field(default_factory=dict)
    exempt: str = ""
    lineage: Lineage = UNKNOWN_LINEAGE

    @property
    def is_counted(self) -> bool:
        """Whether the checkpoint is complete and rules apply to it."""
        return self.complete and not self.exempt

    @property
    def complete(self) -> bool:
        """Whether its verdict is complete."""
        return self.verdict is Verdict.COMPLETE

    @property
    def state(self) -> str:
        """The verdict and whether it is being written, for tables."""
        return f"{self.verdict}, being written" if self.writing else str(self.verdict)

    @property
    def skip_reason(self) -> str:
        """The reason to skip it, unless its state already shows the reason."""
        return "" if self.exempt in (BEING_WRITTEN, NOT_INTERRUPTED) else self.exempt

    @property
    def protection(
        self,
    ) -> Annotated[
        tuple[str, ...],
        JsonField(
            "reasons why it is protected: a pointer, a link, a trainer state, or a property of the "
            "checkpoint itself",
            name="protected_by",
        ),
    ]:
        """Reasons to keep it other than its state and the rules."""
        return (*self.pinned, *([self.skip_reason] if self.skip_reason else ()))

    @property
    def step(
        self,
    ) -> Annotated[
        int,
        JsonField(
            "step in its name, or the epoch if there is no step; for `last.ckpt`, the step that "
            "the file states"
        ),
    ]:
        """Its step, or its epoch if there is no step."""
        return self.order[0]


C = TypeVar("C", bound=Retainable)


LOWEST_BY_SUFFIX = {"min": True, "max": False}
LOWER_IS_BETTER, HIGHER_IS_BETTER = ("loss",), ("accuracy",)


@dataclass(frozen=True, slots=True)
class BestRule:
    """A rule that keeps the best *count* checkpoints by a metric."""

    metric: str
    lowest: bool
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> BestRule:
        """Parse ``METRIC[:min|max][:N]``.

        Raises:
            UsageError: The count is 0, or it is unclear whether lower or higher is better.
        """
        name, colon, number = text.rpartition(":")
        has_count = bool(colon) and number.isascii() and number.isdecimal() and len(number) < 10
        name, count = (name, int(number)) if has_count else (text, 1)
        if not count:
            raise UsageError(f"`{text}` keeps no checkpoint", hint="use at least 1")
        metric, colon, end = name.rpartition(":")
        if colon and end in LOWEST_BY_SUFFIX and metric:
            return cls(metric, LOWEST_BY_SUFFIX[end], count)
        if name.endswith((*LOWER_IS_BETTER, *HIGHER_IS_BETTER)):
            return cls(name, name.endswith(LOWER_IS_BETTER), count)
        count_suffix = f":{count}" if has_count else ""
        raise UsageError(
            f"`{text}` does not specify whether lower or higher is better",
            hint=f"use `{name}:min{count_suffix}` or `{name}:max{count_suffix}`",
        )

    @property
    def description(self) -> str:
        """Description of the rule for messages."""
        end = "lowest" if self.lowest else "highest"
        return f"{end} {self.metric}" if self.count == 1 else f"{self.count} {end} {self.metric}"

    def resolve_metric(self, known_metrics: Sequence[str]) -> BestRule:
        """Return the rule with its metric resolved to a full name among *known_metrics*.

        Raises:
            UsageError: No checkpoint has the metric.
        """
        for name in (self.metric, f"eval_{self.metric}"):
            if name in known_metrics:
                return replace(self, metric=name)
        closest_metric = find_nearest(self.metric, known_metrics)
        raise UsageError(
            f"no complete checkpoint has a metric `{self.metric}`",
            why=f"known metrics: {quote_names(known_metrics)}"
            if known_metrics
            else "they have no metrics",
            hint=f"did you mean `{closest_metric}`?" if closest_metric else None,
        )

    def find_score(self, checkpoint: Retainable) -> float | None:
        """Return the metric of *checkpoint*, negated if lower is better, or None if it has none."""
        metric_value = checkpoint.metrics.get(self.metric)
        if metric_value is None or math.isnan(metric_value):
            return None
        return -metric_value if self.lowest else metric_value


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules that select the checkpoints to keep.

    Attributes:
        last: Keep this number of the newest checkpoints.
        every: Keep checkpoints whose step is a multiple of this.
        closest: Keep the checkpoint whose step is closest to each multiple of this. Of two equally
            close checkpoints, the later one is kept.
        within: Keep checkpoints that are at most this many seconds older than the newest one.
        interval: Keep the oldest checkpoint, and each checkpoint that was written at least this
            many seconds after the last one kept.
        best: Keep the best checkpoints by metrics.
        patterns: Keep checkpoints whose names match a glob.
        keep_if: Predicate for complete checkpoints to keep.
        incomplete: Whether to remove damaged checkpoints too.
        min_age: Age in seconds from which damaged checkpoints may be removed.
    """

    last: int | None = None
    every: int | None = None
    closest: int | None = None
    within: float | None = None
    interval: float | None = None
    best: tuple[BestRule, ...] = ()
    patterns: tuple[str, ...] = ()
    keep_if: Callable[[Retainable], object] | None = None
    incomplete: bool = False
    min_age: float = HOUR_SECONDS

    @property
    def has_general_rules(self) -> bool:
        """Whether the policy has a rule other than patterns and metrics."""
        rules = (self.last, self.every, self.closest, self.within, self.interval, self.keep_if)
        return any(rule is not None for rule in rules)

    @property
    def is_empty(self) -> bool:
        """Whether the policy has no rule that keeps complete checkpoints."""
        return not self.has_general_rules and not self.best and not self.patterns

    def require_rules(self) -> None:
        """Require at least one rule, and that each rule can keep a checkpoint.

        Raises:
            RefusedError: There is no rule, or a rule has a count of zero.
        """
        if self.is_empty:
            raise RefusedError(
                "no keep rule given",
                why="without one, all checkpoints except the newest would be removed",
                hint=f"pass one, for example {format_option('--keep-last 3')}",
            )
        counts = (("last", self.last), ("every", self.every), ("closest", self.closest))
        for name, count in counts:
            if count is not None and count < 1:
                raise RefusedError(
                    f"{format_option(f'--keep-{name} {count}')} keeps nothing",
                    hint=f"{format_option(f'--keep-{name}')} must be at least 1",
                )
        if self.within is not None and self.within <= 0:
            raise RefusedError(f"{format_option('--keep-within 0')} keeps nothing")
        if self.interval is not None and self.interval <= 0:
            raise RefusedError(f"{format_option('--keep-interval 0')} keeps every checkpoint")

    def resolve_metrics_and_patterns(self, checkpoints: Sequence[Retainable]) -> Policy:
        """Return the policy with metrics and patterns resolved to full names from *checkpoints*.

        A pattern may be a path from shell completion, such as ``runs/a/step-2/``.
        """
        known_metrics = sorted(
            {
                name
                for checkpoint in checkpoints
                if checkpoint.is_counted
                for name in checkpoint.metrics
            }
        )

        def resolve_pattern(pattern: str) -> str:
            if any(fnmatchcase(checkpoint.name, pattern) for checkpoint in checkpoints):
                return pattern
            return pattern.rstrip("/").rpartition("/")[2] or pattern

        return replace(
            self,
            best=tuple(best.resolve_metric(known_metrics) for best in self.best),
            patterns=tuple(map(resolve_pattern, self.patterns)),
        )

    def require_match(self, checkpoints: Sequence[Retainable], *, growing: bool = False) -> None:
        """Require that every pattern matches a checkpoint.

        If there are no rules except patterns and metrics, and more than one complete checkpoint,
        also require that these rules keep a checkpoint.

        Args:
            checkpoints: The checkpoints of the run.
            growing: Whether the run continues, so that patterns may match future names.

        Raises:
            RefusedError: A pattern matches no checkpoint, or nothing would be kept.
        """
        names = [checkpoint.name for checkpoint in checkpoints]
        complete = [checkpoint for checkpoint in checkpoints if checkpoint.is_counted]
        matches = any(
            fnmatchcase(checkpoint.name, glob) for checkpoint in complete for glob in self.patterns
        )
        has_metric = any(
            best.find_score(checkpoint) is not None for checkpoint in complete for best in self.best
        )
        if not self.has_general_rules and len(complete) > 1 and not matches and not has_metric:
            requested = [*self.patterns, *(best.metric for best in self.best)]
            raise RefusedError(
                f"{quote_names(requested)} keeps nothing",
                why="no complete checkpoint matches by name or has a number for the metric",
                hint="choose among "
                f"{quote_names([checkpoint.name for checkpoint in complete], 3)}, "
                f"or pass {format_option('--keep-last 1')} to keep the newest checkpoint",
            )
        for pattern in () if growing else self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                closest_name = find_nearest(pattern, names)
                raise RefusedError(
                    f"{format_option(f'--keep {pattern}')} matches no checkpoint",
                    why=f"the checkpoints are {quote_names(names, 3)}",
                    hint=f"did you mean `{closest_name}`?"
                    if closest_name
                    else "correct or omit the pattern",
                )


@dataclass(frozen=True, slots=True)
class Decision(Generic[C]):
    """Decision to keep, remove or skip one checkpoint.

    Attributes:
        action: ``keep``, ``remove``, or ``skip`` for a checkpoint to which rules do not apply.
    """

    checkpoint: C
    action: Action
    reasons: Annotated[tuple[str, ...], JsonField("why")]


def decide_retention(
    checkpoints: Iterable[C],
    policy: Policy,
    now: float,
    *,
    replaced: bool = False,
    pending_saves: int = 0,
) -> tuple[Decision[C], ...]:
    """Decide to keep, remove or skip each checkpoint, in the order of :func:`sort_checkpoints`.

    Args:
        checkpoints: The checkpoints of a run.
        policy: The rules.
        now: Current time, in seconds since the epoch.
        replaced: Whether complete copies of the checkpoints exist elsewhere, so that the newest is
            not kept unconditionally.
        pending_saves: Number of saves in progress, which count toward ``policy.last``.
    """
    sorted_checkpoints = sort_checkpoints(checkpoints)
    decisions: list[Decision[C]] = []
    for name in dict.fromkeys(checkpoint.series for checkpoint in sorted_checkpoints):
        series = [checkpoint for checkpoint in sorted_checkpoints if checkpoint.series == name]
        counted = [checkpoint for checkpoint in series if checkpoint.is_counted]
        resumable = [checkpoint for checkpoint in counted if not checkpoint.lacks]
        reasons_by_name: dict[str, Sequence[str]] = {}
        for candidates in (resumable, counted):
            reasons_by_name |= _find_reasons(candidates, policy, now, replaced, pending_saves)
        decisions += [
            Decision(
                checkpoint,
                "keep" if checkpoint.name in reasons_by_name else "remove",
                tuple(reasons_by_name.get(checkpoint.name, ())),
            )
            if checkpoint.is_counted
            else _decide_uncounted(checkpoint, policy, now, bool(counted))
            for checkpoint in series
        ]
    return tuple(decisions)


def find_abandoned_checkpoints(checkpoints: Iterable[Retainable]) -> dict[str, int]:
    """Map each abandoned checkpoint to the step from which its run resumed instead."""
    series: dict[str, dict[str, Lineage]] = {}
    for checkpoint in checkpoints:
        series.setdefault(checkpoint.series, {})[checkpoint.name] = checkpoint.lineage
    return {
        name: step
        for lineages in series.values()
        for name, step in find_abandoned_saves(lineages).items()
    }


def sort_checkpoints(checkpoints: Iterable[C]) -> list[C]:
    """Sort *checkpoints* by series, step and time."""
    return sorted(
        checkpoints,
        key=lambda checkpoint: (
            checkpoint.series,
            checkpoint.order,
            checkpoint.time,
            checkpoint.name,
        ),
    )


def find_out_of_order_pair(checkpoints: Iterable[C]) -> tuple[C, C] | None:
    """Find two complete checkpoints of a series whose steps and save times are out of order.

    This happens if two runs save into one folder. Then the highest step is not the newest
    checkpoint.

    Returns:
        The later save and the earlier one with a higher step, or None if all are in order.
    """
    newest: C | None = None
    for checkpoint in sort_checkpoints(checkpoints):
        if not checkpoint.is_counted:
            continue
        if newest is None or newest.series != checkpoint.series:
            newest = checkpoint
        elif is_saved_before(checkpoint, newest):
            return newest, checkpoint
        elif newest.time <= checkpoint.time or (newest.lineage.save and checkpoint.lineage.save):
            newest = checkpoint
    return None


def is_saved_before(checkpoint: Retainable, other: Retainable) -> bool:
    """Return whether *checkpoint* was saved before *other*, by save numbers or else by time."""
    if checkpoint.lineage.save and other.lineage.save:
        return checkpoint.lineage.save < other.lineage.save
    return checkpoint.time < other.time - CLOCK_TOLERANCE_SECONDS


def _find_reasons(
    counted: Sequence[Retainable], policy: Policy, now: float, replaced: bool, pending_saves: int
) -> Mapping[str, Sequence[str]]:
    """Map each complete checkpoint that is kept to the reasons why it is kept."""
    reasons_by_name: dict[str, list[str]] = {checkpoint.name: [] for checkpoint in counted}
    for checkpoint, reason in _iterate_reasons(counted, policy, now, pending_saves):
        reasons_by_name[checkpoint.name].append(reason)
    if counted and not replaced and not reasons_by_name[counted[-1].name]:
        reasons_by_name[counted[-1].name].append("newest complete checkpoint")
    return {name: reasons for name, reasons in reasons_by_name.items() if reasons}


def _iterate_reasons(
    counted: Sequence[Retainable], policy: Policy, now: float, pending_saves: int
) -> Iterator[tuple[Retainable, str]]:
    last = max(0, (policy.last or 0) - pending_saves)
    for number, checkpoint in enumerate(reversed(counted[-last:] if last else []), 1):
        yield checkpoint, f"last {last} ({number}/{last})"
    # A wrong clock at the time of the newest save must not make the others old.
    newest = max((checkpoint.time for checkpoint in counted if checkpoint.time <= now), default=now)
    limit = newest - (policy.within or 0.0)
    for checkpoint in counted:
        if policy.every and checkpoint.step % policy.every == 0:
            yield checkpoint, f"every {policy.every:,}"
        if policy.within is not None and checkpoint.time >= limit:
            yield checkpoint, "within the time span to keep"
        if policy.keep_if and policy.keep_if(checkpoint):
            yield checkpoint, "selected by `keep_if`"
        yield from (
            (checkpoint, f"matches `{p}`")
            for p in policy.patterns
            if fnmatchcase(checkpoint.name, p)
        )
        yield from ((checkpoint, f"named by {pin}") for pin in checkpoint.pinned)
    if policy.closest:
        yield from _iterate_closest(counted, policy.closest)
    if policy.interval is not None:
        for checkpoint in _iterate_spaced(counted, policy.interval):
            yield checkpoint, f"one per {format_exact_duration(policy.interval)}"
    for best in policy.best:
        yield from _iterate_best(counted, best)


def _iterate_closest(counted: Sequence[Retainable], every: int) -> Iterator[tuple[Retainable, str]]:
    nearest: dict[int, Retainable] = {}
    for checkpoint in counted:
        multiple = (2 * checkpoint.step + every) // (2 * every) * every
        nearest_so_far = nearest.get(multiple)
        if nearest_so_far is None or abs(checkpoint.step - multiple) <= abs(
            nearest_so_far.step - multiple
        ):
            nearest[multiple] = checkpoint
    for multiple, checkpoint in nearest.items():
        if multiple or not checkpoint.step:  # the first ones of a run are only close to 0
            yield checkpoint, f"closest to {multiple:,}"


def _iterate_spaced(counted: Sequence[Retainable], interval: float) -> Iterator[Retainable]:
    """Yield checkpoints at least *interval* seconds apart, and start over after a clock reset."""
    last: float | None = None
    for checkpoint in counted:
        if last is None or abs(checkpoint.time - last) >= interval:
            last = checkpoint.time
            yield checkpoint


def _iterate_best(
    counted: Sequence[Retainable], best: BestRule
) -> Iterator[tuple[Retainable, str]]:
    """Yield the best checkpoints by a metric, with the reason to keep each of them.

    Of checkpoints with equal scores, the newest is preferred.
    """
    scores = [
        (value, n)
        for n, checkpoint in enumerate(counted)
        if (value := best.find_score(checkpoint)) is not None
    ]
    for _, n in sorted(scores, reverse=True)[: best.count]:
        yield counted[n], f"{best.description} ({counted[n].metrics[best.metric]:g})"


def _decide_uncounted(checkpoint: C, policy: Policy, now: float, has_complete: bool) -> Decision[C]:
    """Decide to remove or skip an incomplete or exempt checkpoint.

    Args:
        checkpoint: The checkpoint.
        policy: The rules.
        now: Current time, in seconds since the epoch.
        has_complete: Whether its series has complete checkpoints.
    """
    problem = (f"{checkpoint.state}: {checkpoint.problem}",) if checkpoint.problem else ()
    pin_reasons = (f"named by {pin}" for pin in checkpoint.pinned)
    skip_reasons = (*([checkpoint.skip_reason] if checkpoint.skip_reason else ()), *pin_reasons)
    if checkpoint.exempt or checkpoint.writing or not checkpoint.torn or not policy.incomplete:
        return Decision(checkpoint, "skip", (*problem, *skip_reasons))
    reasons = [
        *skip_reasons,
        *(f"matches `{p}`" for p in policy.patterns if fnmatchcase(checkpoint.name, p)),
    ]
    if not has_complete:
        reasons.append("no other checkpoint of its series is complete")
    if checkpoint.time > now - policy.min_age:
        age = now - checkpoint.time
        unit, seconds = next(((u, n) for u, n in DURATION_UNITS if age >= n), DURATION_UNITS[-1])
        option = format_option(f"--min-age {format_exact_duration(policy.min_age)}")
        reasons.append(f"changed {max(0, int(age / seconds))} {unit} ago, which is within {option}")
    return Decision(checkpoint, "skip" if reasons else "remove", (*problem, *reasons))


def format_exact_duration(seconds: float) -> str:
    """Format a duration as an option value, in the largest unit that divides it evenly."""
    unit, length = next(
        ((u, n) for u, n in DURATION_UNITS if seconds and seconds % n == 0), DURATION_UNITS[-1]
    )
    return f"{seconds / length:g}{unit[0]}"
