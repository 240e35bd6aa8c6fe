"""Which checkpoints of a run are kept, and why: decisions alone, no files and no clock.

Rules are joined by *or*: what one of them keeps is kept. Only complete checkpoints count and are
removed; the newest complete one of a series always stays. The rules are those of
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
"""Why what is not complete is left alone: its state says so already."""
HOUR = 3600.0
UNITS = (("d", 86_400.0), ("h", HOUR), ("min", 60.0), ("s", 1.0))
CLOCK = 2.0
"""Seconds by which times may differ for no reason: the coarsest clock of a file system (FAT)."""


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics by name, with None for NaN and infinity, which JSON does not know."""
    return {n: value if math.isfinite(value) else None for n, value in sorted(metrics.items())}


@dataclass(frozen=True, slots=True)
class Retainable:
    """One checkpoint of a run.

    Attributes:
        series: What its name has in common with those that it is counted with.
        order: Sorts it among these: step, epoch, version.
        time: When it was written, in seconds since the epoch.
        pinned: What else names it, and so keeps it.
        torn: Whether its files show that a write did not end; only that lets it be removed for
            being damaged.
        exempt: Why it is left alone whatever is asked, and does not count; empty: it is not. The
            same as *state* where that says so.
        lineage: Which save of its run it is, as far as it says so.
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
        """Return whether it is complete and rules apply to it."""
        return self.complete and not self.exempt

    @property
    def complete(self) -> bool:
        """Return whether nothing is known to be missing."""
        return self.verdict is Verdict.COMPLETE

    @property
    def state(self) -> str:
        """Return the verdict, and whether it is being written, as a table shows them."""
        return f"{self.verdict}, being written" if self.writing else str(self.verdict)

    @property
    def aside(self) -> str:
        """Return the reason to leave it alone, if its state does not say so already."""
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
        """Return the reasons that keep it, beside its state and the rules."""
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
        """Return its step, or its epoch where there is no step."""
        return self.order[0]


C = TypeVar("C", bound=Retainable)


ENDS = {"min": True, "max": False}
LOW, HIGH = ("loss",), ("accuracy",)


@dataclass(frozen=True, slots=True)
class Best:
    """A metric, which end of it is good, and how many of the best are meant."""

    metric: str
    lowest: bool
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Best:
        """Parse ``METRIC[:min|max][:N]``."""
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
        """Return what is kept, in words."""
        end = "lowest" if self.lowest else "highest"
        return f"{end} {self.metric}" if self.count == 1 else f"{self.count} {end} {self.metric}"

    def resolve(self, known: Sequence[str]) -> Best:
        """Return it with the name that *known* metrics of checkpoints have for its metric."""
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
        """Return the metric of *checkpoint*, negated if small is good; None: it has none."""
        found = checkpoint.metrics.get(self.metric)
        if found is None or math.isnan(found):
            return None
        return -found if self.lowest else found


@dataclass(frozen=True, slots=True)
class Policy:
    """What is to be kept.

    Attributes:
        last: The newest so many.
        every: Those whose step is a multiple.
        closest: Of each multiple the one whose step is the closest to it, of two the later.
        within: Those at most so many seconds older than the newest.
        interval: The oldest, and each that was written so many seconds after the last of these.
        wanted: Says of a complete one whether it is kept.
        min_age: How many seconds they have to be untouched for that.
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
        """Return whether it has a rule that goes by no name and no metric."""
        rules = (self.last, self.every, self.closest, self.within, self.interval, self.wanted)
        return any(rule is not None for rule in rules)

    @property
    def empty(self) -> bool:
        """Return whether it says nothing about complete checkpoints."""
        return not self.counts and not self.best and not self.patterns

    def require_rules(self) -> None:
        """Refuse a policy that keeps nothing: it has no rule, or a count of zero."""
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
        """Return it with the names that *checkpoints* have for its metrics and patterns.

        A pattern may be a path as shells complete it: ``runs/a/step-2/``.
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
        """Refuse it if one of its patterns matches nothing, or if no rule keeps anything.

        The latter is so where patterns and metrics alone are asked for and there is more than the
        newest one. In a run that is *growing* there may be no name yet that a pattern means.
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
                hint=f"choose among {listed([one.name for one in complete], 3)}, or pass "
                f"{spell_option('--keep-last 1')} to keep the newest checkpoint",
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
    """What becomes of one checkpoint.

    Attributes:
        action: ``keep``, ``remove``, or ``skip``: it is left alone and does not count.
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
    """Decide on each checkpoint, series by series, in their order.

    Where something complete elsewhere *replaced* all of them, the newest is not kept for its own
    sake. So many of the last are *coming*: they are about to be saved.
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
    """Return the names of what runs left behind, and the steps from which they went on instead."""
    series: dict[str, dict[str, Lineage]] = {}
    for one in checkpoints:
        series.setdefault(one.series, {})[one.name] = one.lineage
    return {name: step for some in series.values() for name, step in left_behind(some).items()}


def ordered(checkpoints: Iterable[C]) -> list[C]:
    """Return *checkpoints* by series, then by step, those of one step by time."""
    return sorted(checkpoints, key=lambda one: (one.series, one.order, one.time, one.name))


def disorder(checkpoints: Iterable[C]) -> tuple[C, C] | None:
    """Return two complete checkpoints of a series: the one that was saved later has a lower step.

    Two runs that were saved into one folder look like that: then the highest step is not the
    newest checkpoint. None: there are none.
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
    """Return whether *one* was saved before *other*: by their numbers, or else by the clock."""
    if one.lineage.save and other.lineage.save:
        return one.lineage.save < other.lineage.save
    return one.time < other.time - CLOCK


def _reasons(
    whole: Sequence[Retainable], policy: Policy, now: float, replaced: bool, coming: int
) -> Mapping[str, Sequence[str]]:
    """Return the reasons to keep each complete checkpoint of a series that is kept."""
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
    # A clock that was wrong when the newest was written must not make the others old.
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
        if multiple or not one.step:  # the first of a run are close to no multiple but 0
            yield one, f"closest to {multiple:,}"


def _apart(whole: Sequence[Retainable], interval: float) -> Iterator[Retainable]:
    """Yield checkpoints so many seconds apart; a clock that was set back begins anew."""
    last: float | None = None
    for one in whole:
        if last is None or abs(one.time - last) >= interval:
            last = one.time
            yield one


def _best(whole: Sequence[Retainable], best: Best) -> Iterator[tuple[Retainable, str]]:
    """Yield the best ones; of equals the newest."""
    rated = [(value, n) for n, one in enumerate(whole) if (value := best.value(one)) is not None]
    for _, n in sorted(rated, reverse=True)[: best.count]:
        yield whole[n], f"{best.said} ({whole[n].metrics[best.metric]:g})"


def _not_counted(one: C, policy: Policy, now: float, others: bool) -> Decision[C]:
    """Decide on what is not complete, or exempt; *others*: its series has complete ones."""
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
    """Return a duration in the largest unit that divides it, as options have it."""
    unit, length = next(((u, n) for u, n in UNITS if seconds and seconds % n == 0), UNITS[-1])
    return f"{seconds / length:g}{unit[0]}"
