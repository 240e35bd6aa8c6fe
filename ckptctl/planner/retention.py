"""Decisions about the checkpoints of a run to keep, without access to files or a clock.

Rules are joined by *or*. A checkpoint is kept if any rule keeps it. Only complete checkpoints count
and are removed, and the newest complete one of a series is always kept. The rules are those of
``restic forget`` (``--keep-last``, ``--keep-within``) and of Orbax's preservation policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Generic, Literal, TypeVar

from ckptctl.errors import RefusedError, UsageError, listed, nearest, spell_option
from ckptctl.planner.lineage import UNKNOWN, Lineage, left_behind
from ckptctl.results import JsonField, or_none
from ckptctl.verdict import Verdict

Action = Literal["keep", "remove", "skip"]

WRITING, NOT_TORN = "being written", "no incomplete write"
"""Reasons to skip an incomplete checkpoint that its state already shows."""
HOUR = 3600.0
UNITS = (("d", 86_400.0), ("h", HOUR), ("min", 60.0), ("s", 1.0))
CLOCK = 2.0
"""Tolerance for times in seconds, the resolution of the coarsest file system clock (FAT)."""


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity in metrics by None for JSON, sorted by name."""
    return {n: value if math.isfinite(value) else None for n, value in sorted(metrics.items())}


@dataclass(frozen=True, slots=True)
class Retainable:
    """One checkpoint of a run.

    Attributes:
        series: Common part of the names of checkpoints to which the rules apply together.
        order: Sort key in the series, such as step, epoch and version.
        time: Time of the write, in seconds since the epoch.
        pinned: References to it, such as pointer files, which keep it.
        torn: Whether its files show an interrupted write. Only then may it be removed as damaged.
        exempt: Reason to skip it regardless of the policy, so that it does not count. Empty if it
            is not exempt. Equal to the state if that is the reason.
        lineage: Its save number and the resumes before it, if recorded.
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
    problem: Annotated[str, JsonField("reason it is not complete, or null", to=or_none)] = ""
    lacks: Annotated[
        str,
        JsonField(
            "file that is missing here, that most other checkpoints have, and that trainers "
            "write last; training may not resume from this checkpoint, so no other one is "
            "removed in its favor",
            to=or_none,
        ),
    ] = ""
    pinned: tuple[str, ...] = ()
    metrics: Annotated[
        Mapping[str, float],
        JsonField("metrics of the checkpoint; null for NaN or infinity", to=finite),
    ] = field(default_factory=dict)
    exempt: str = ""
    lineage: Lineage = UNKNOWN

    @property
    def counts(self) -> bool:
        """Whether it is complete and rules apply to it."""
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
    def aside(self) -> str:
        """The reason to skip it, unless its state already shows the reason."""
        return "" if self.exempt in (WRITING, NOT_TORN) else self.exempt

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
        return (*self.pinned, *([self.aside] if self.aside else ()))

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


ENDS = {"min": True, "max": False}
LOW, HIGH = ("loss",), ("accuracy",)


@dataclass(frozen=True, slots=True)
class Best:
    """A rule that keeps the best *count* checkpoints by a metric."""

    metric: str
    lowest: bool
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Best:
        """Parse ``METRIC[:min|max][:N]``.

        Raises:
            UsageError: The count is 0, or it is unclear whether lower or higher is better.
        """
        name, colon, number = text.rpartition(":")
        counted = bool(colon) and number.isascii() and number.isdecimal() and len(number) < 10
        name, count = (name, int(number)) if counted else (text, 1)
        if not count:
            raise UsageError(f"`{text}` keeps no checkpoint", hint="use at least 1")
        metric, colon, end = name.rpartition(":")
        if colon and end in ENDS and metric:
            return cls(metric, ENDS[end], count)
        if name.endswith((*LOW, *HIGH)):
            return cls(name, name.endswith(LOW), count)
        more = f":{count}" if counted else ""
        raise UsageError(
            f"`{text}` does not specify whether lower or higher is better",
            hint=f"use `{name}:min{more}` or `{name}:max{more}`",
        )

    @property
    def said(self) -> str:
        """Description of the rule for messages."""
        end = "lowest" if self.lowest else "highest"
        return f"{end} {self.metric}" if self.count == 1 else f"{self.count} {end} {self.metric}"

    def resolve(self, known: Sequence[str]) -> Best:
        """Return the rule with the full name of its metric among those of checkpoints.

        Raises:
            UsageError: No checkpoint has the metric.
        """
        for name in (self.metric, f"eval_{self.metric}"):
            if name in known:
                return replace(self, metric=name)
        close = nearest(self.metric, known)
        raise UsageError(
            f"no complete checkpoint has a metric `{self.metric}`",
            why=f"known metrics: {listed(known)}" if known else "they have no metrics",
            hint=f"did you mean `{close}`?" if close else None,
        )

    def value(self, checkpoint: Retainable) -> float | None:
        """Return the metric of *checkpoint*, negated if lower is better, or None if it has none."""
        found = checkpoint.metrics.get(self.metric)
        if found is None or math.isnan(found):
            return None
        return -found if self.lowest else found


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules that select the checkpoints to keep.

    Attributes:
        last: Keep this number of the newest checkpoints.
        every: Keep checkpoints whose step is a multiple of this.
        closest: Keep the checkpoint closest to each multiple of this, the later of two.
        within: Keep checkpoints at most this many seconds older than the newest.
        interval: Keep the oldest, and each one written this many seconds after the last one kept.
        best: Keep the best checkpoints by metrics.
        patterns: Keep checkpoints whose names match a glob.
        wanted: Predicate for complete checkpoints to keep.
        incomplete: Whether to remove damaged checkpoints too.
        min_age: Age in seconds from which damaged checkpoints may be removed.
    """

    last: int | None = None
    every: int | None = None
    closest: int | None = None
    within: float | None = None
    interval: float | None = None
    best: tuple[Best, ...] = ()
    patterns: tuple[str, ...] = ()
    wanted: Callable[[Retainable], object] | None = None
    incomplete: bool = False
    min_age: float = HOUR

    @property
    def counts(self) -> bool:
        """Whether it has a rule other than patterns and metrics."""
        rules = (self.last, self.every, self.closest, self.within, self.interval, self.wanted)
        return any(rule is not None for rule in rules)

    @property
    def empty(self) -> bool:
        """Whether it has no rule for complete checkpoints."""
        return not self.counts and not self.best and not self.patterns

    def require_rules(self) -> None:
        """Require that each rule can keep something, and that there is one.

        Raises:
            RefusedError: There is no rule, or a rule has a count of zero.
        """
        if self.empty:
            raise RefusedError(
                "no keep rule given",
                why="without one, all checkpoints except the newest would be removed",
                hint=f"pass one, for example {spell_option('--keep-last 3')}",
            )
        counts = (("last", self.last), ("every", self.every), ("closest", self.closest))
        for name, count in counts:
            if count is not None and count < 1:
                raise RefusedError(
                    f"{spell_option(f'--keep-{name} {count}')} keeps nothing",
                    hint=f"{spell_option(f'--keep-{name}')} must be at least 1",
                )
        if self.within is not None and self.within <= 0:
            raise RefusedError(f"{spell_option('--keep-within 0')} keeps nothing")
        if self.interval is not None and self.interval <= 0:
            raise RefusedError(f"{spell_option('--keep-interval 0')} keeps every checkpoint")

    def resolve(self, checkpoints: Sequence[Retainable]) -> Policy:
        """Return the policy with metrics and patterns resolved to names of *checkpoints*.

        A pattern may be a path from shell completion, such as ``runs/a/step-2/``.
        """
        known = sorted({name for one in checkpoints if one.counts for name in one.metrics})

        def resolve_pattern(pattern: str) -> str:
            if any(fnmatchcase(one.name, pattern) for one in checkpoints):
                return pattern
            return pattern.rstrip("/").rpartition("/")[2] or pattern

        return replace(
            self,
            best=tuple(best.resolve(known) for best in self.best),
            patterns=tuple(map(resolve_pattern, self.patterns)),
        )

    def require_match(self, checkpoints: Sequence[Retainable], *, growing: bool = False) -> None:
        """Require that every pattern matches, and that patterns and metrics keep something.

        The latter applies if there are no other rules and more than one complete checkpoint.

        Args:
            checkpoints: The checkpoints of the run.
            growing: Whether the run continues, so that patterns may match future names.

        Raises:
            RefusedError: A pattern matches no checkpoint, or nothing would be kept.
        """
        names = [one.name for one in checkpoints]
        complete = [one for one in checkpoints if one.counts]
        matches = any(fnmatchcase(one.name, glob) for one in complete for glob in self.patterns)
        rated = any(best.value(one) is not None for one in complete for best in self.best)
        if not self.counts and len(complete) > 1 and not matches and not rated:
            asked = [*self.patterns, *(best.metric for best in self.best)]
            raise RefusedError(
                f"{listed(asked)} keeps nothing",
                why="no complete checkpoint matches by name or has a number for the metric",
                hint=f"choose among {listed([one.name for one in complete], 3)}, "
                f"or pass {spell_option('--keep-last 1')} to keep the newest checkpoint",
            )
        for pattern in () if growing else self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = nearest(pattern, names)
                raise RefusedError(
                    f"{spell_option(f'--keep {pattern}')} matches no checkpoint",
                    why=f"the checkpoints are {listed(names, 3)}",
                    hint=f"did you mean `{close}`?" if close else "correct or omit the pattern",
                )


@dataclass(frozen=True, slots=True)
class Decision(Generic[C]):
    """The decision about one checkpoint.

    Attributes:
        action: ``keep``, ``remove``, or ``skip`` if it is not touched and does not count.
    """

    checkpoint: C
    action: Action
    reasons: Annotated[tuple[str, ...], JsonField("why")]


def decide(
    checkpoints: Iterable[C],
    policy: Policy,
    now: float,
    *,
    replaced: bool = False,
    coming: int = 0,
) -> tuple[Decision[C], ...]:
    """Decide about each checkpoint, series by series, in their order.

    Args:
        checkpoints: The checkpoints of a run.
        policy: The rules.
        now: Current time, in seconds since the epoch.
        replaced: Whether a complete copy elsewhere replaces them, so that the newest is not kept
            unconditionally.
        coming: Number of pending saves, which count toward the last ones.
    """
    there = ordered(checkpoints)
    decisions: list[Decision[C]] = []
    for name in dict.fromkeys(one.series for one in there):
        series = [one for one in there if one.series == name]
        whole = [one for one in series if one.counts]
        sure = [one for one in whole if not one.lacks]
        kept: dict[str, Sequence[str]] = {}
        for some in (sure, whole):
            kept |= _reasons(some, policy, now, replaced, coming)
        decisions += [
            Decision(one, "keep" if one.name in kept else "remove", tuple(kept.get(one.name, ())))
            if one.counts
            else _not_counted(one, policy, now, bool(whole))
            for one in series
        ]
    return tuple(decisions)


def left_in(checkpoints: Iterable[Retainable]) -> dict[str, int]:
    """Map each abandoned checkpoint to the step from which its run resumed instead."""
    series: dict[str, dict[str, Lineage]] = {}
    for one in checkpoints:
        series.setdefault(one.series, {})[one.name] = one.lineage
    return {name: step for some in series.values() for name, step in left_behind(some).items()}


def ordered(checkpoints: Iterable[C]) -> list[C]:
    """Sort *checkpoints* by series, step and time."""
    return sorted(checkpoints, key=lambda one: (one.series, one.order, one.time, one.name))


def disorder(checkpoints: Iterable[C]) -> tuple[C, C] | None:
    """Find two complete checkpoints of a series whose steps and save times are out of order.

    This happens if two runs save into one folder. Then the highest step is not the newest
    checkpoint.

    Returns:
        The later save and the earlier one with a higher step, or None if all are in order.
    """
    newest: C | None = None
    for one in ordered(checkpoints):
        if not one.counts:
            continue
        if newest is None or newest.series != one.series:
            newest = one
        elif earlier(one, newest):
            return newest, one
        elif newest.time <= one.time or (newest.lineage.save and one.lineage.save):
            newest = one
    return None


def earlier(one: Retainable, other: Retainable) -> bool:
    """Return whether *one* was saved before *other*, by save numbers or else by time."""
    if one.lineage.save and other.lineage.save:
        return one.lineage.save < other.lineage.save
    return one.time < other.time - CLOCK


def _reasons(
    whole: Sequence[Retainable], policy: Policy, now: float, replaced: bool, coming: int
) -> Mapping[str, Sequence[str]]:
    """Map each complete checkpoint of a series that is kept to the reasons."""
    kept: dict[str, list[str]] = {one.name: [] for one in whole}
    for one, reason in _kept(whole, policy, now, coming):
        kept[one.name].append(reason)
    if whole and not replaced and not kept[whole[-1].name]:
        kept[whole[-1].name].append("newest complete checkpoint")
    return {name: reasons for name, reasons in kept.items() if reasons}


def _kept(
    whole: Sequence[Retainable], policy: Policy, now: float, coming: int
) -> Iterator[tuple[Retainable, str]]:
    last = max(0, (policy.last or 0) - coming)
    for number, one in enumerate(reversed(whole[-last:] if last else []), 1):
        yield one, f"last {last} ({number}/{last})"
    # A wrong clock at the time of the newest save must not make the others old.
    newest = max((one.time for one in whole if one.time <= now), default=now)
    limit = newest - (policy.within or 0.0)
    for one in whole:
        if policy.every and one.step % policy.every == 0:
            yield one, f"every {policy.every:,}"
        if policy.within is not None and one.time >= limit:
            yield one, "within the time span to keep"
        if policy.wanted and policy.wanted(one):
            yield one, "selected by `keep_if`"
        yield from ((one, f"matches `{p}`") for p in policy.patterns if fnmatchcase(one.name, p))
        yield from ((one, f"named by {pin}") for pin in one.pinned)
    if policy.closest:
        yield from _closest(whole, policy.closest)
    if policy.interval is not None:
        for one in _apart(whole, policy.interval):
            yield one, f"one per {exact_units(policy.interval)}"
    for best in policy.best:
        yield from _best(whole, best)


def _closest(whole: Sequence[Retainable], every: int) -> Iterator[tuple[Retainable, str]]:
    nearest: dict[int, Retainable] = {}
    for one in whole:
        multiple = (2 * one.step + every) // (2 * every) * every
        known = nearest.get(multiple)
        if known is None or abs(one.step - multiple) <= abs(known.step - multiple):
            nearest[multiple] = one
    for multiple, one in nearest.items():
        if multiple or not one.step:  # the first ones of a run are only close to 0
            yield one, f"closest to {multiple:,}"


def _apart(whole: Sequence[Retainable], interval: float) -> Iterator[Retainable]:
    """Yield checkpoints at least *interval* seconds apart, starting over if the clock was reset."""
    last: float | None = None
    for one in whole:
        if last is None or abs(one.time - last) >= interval:
            last = one.time
            yield one


def _best(whole: Sequence[Retainable], best: Best) -> Iterator[tuple[Retainable, str]]:
    """Yield the best checkpoints by a metric. Of equal ones, the newest comes first."""
    rated = [(value, n) for n, one in enumerate(whole) if (value := best.value(one)) is not None]
    for _, n in sorted(rated, reverse=True)[: best.count]:
        yield whole[n], f"{best.said} ({whole[n].metrics[best.metric]:g})"


def _not_counted(one: C, policy: Policy, now: float, others: bool) -> Decision[C]:
    """Decide about an incomplete or exempt checkpoint.

    Args:
        one: The checkpoint.
        policy: The rules.
        now: Current time, in seconds since the epoch.
        others: Whether its series has complete checkpoints.
    """
    problem = (f"{one.state}: {one.problem}",) if one.problem else ()
    named = (f"named by {pin}" for pin in one.pinned)
    stays = (*([one.aside] if one.aside else ()), *named)
    if one.exempt or one.writing or not one.torn or not policy.incomplete:
        return Decision(one, "skip", (*problem, *stays))
    reasons = [*stays, *(f"matches `{p}`" for p in policy.patterns if fnmatchcase(one.name, p))]
    if not others:
        reasons.append("no other checkpoint of its series is complete")
    if one.time > now - policy.min_age:
        age = now - one.time
        unit, seconds = next(((u, n) for u, n in UNITS if age >= n), UNITS[-1])
        option = spell_option(f"--min-age {exact_units(policy.min_age)}")
        reasons.append(f"changed {max(0, int(age / seconds))} {unit} ago, which is within {option}")
    return Decision(one, "skip" if reasons else "remove", (*problem, *reasons))


def exact_units(seconds: float) -> str:
    """Format a duration for options, in the largest unit that divides it."""
    unit, length = next(((u, n) for u, n in UNITS if seconds and seconds % n == 0), UNITS[-1])
    return f"{seconds / length:g}{unit[0]}"
