"""What may go from a run, written from ``docs/explanation/retention.md`` alone.

It knows how a run was made, and looks at no file. Nothing of ckptctl is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

COMPLETE, TORN, UNCLEAR = "complete", "torn", "no incomplete write"
AT_WORK = 600.0
CLOCK = 2.0
NAMES = (
    re.compile(r"(step-|step_|checkpoint-|global_step_|global_step|iter_)(\d+)"),
    re.compile(r"(epoch=\d+-step=)(\d+)(?:-val_loss=[\d.]+)?\.ckpt"),
)
STAGED = re.compile(r"tmp-(checkpoint-\d+)|\.(.+)\.ckptctl-staging")


@dataclass
class Thing:
    """Something in a run.

    Attributes:
        name: Its name.
        truth: ``complete``, ``torn``, ``not torn`` (damaged in another way, or unknown); empty: no
            checkpoint, and not named as one.
        time: When all of it was written, in seconds since the epoch.
        odd: The kind of an unusual complete one, which may also be called unknown.
        link: Whether it is a symbolic link.
        named_by: What names it from elsewhere: a pointer, a link.
        states: What its ``trainer_state.json`` calls the best; None: it has none.
        metrics: What it is rated with.
    """

    name: str
    truth: str
    time: float = 0.0
    odd: str = ""
    link: bool = False
    named_by: list[str] = field(default_factory=list)
    states: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def parsed(self) -> tuple[str, int] | None:
        """Return what it is counted with, and its step; None: it is not named as a checkpoint."""
        staged = STAGED.fullmatch(self.name)
        name = (staged[1] or staged[2]) if staged else self.name
        match = next((m for known in NAMES if (m := known.fullmatch(name))), None)
        if match is None:
            return None
        series = match[1] + (".ckpt" if name.endswith(".ckpt") else "")
        return series + ("val_loss" if "val_loss" in name else ""), int(match[2])


@dataclass
class Rules:
    """What is asked for.

    Attributes:
        last: ``--keep-last``.
        every: ``--keep-every``.
        closest: ``--keep-closest``.
        within: ``--keep-within``, in seconds.
        interval: ``--keep-interval``, in seconds.
        best: A metric of which the smallest are kept.
        count: How many of these.
        patterns: ``--keep``.
        incomplete: ``--include-incomplete``.
        min_age: ``--min-age``, in seconds.
        force: ``--force``.
    """

    last: int | None = None
    every: int | None = None
    closest: int | None = None
    within: float | None = None
    interval: float | None = None
    best: str | None = None
    count: int = 1
    patterns: Sequence[str] = ()
    incomplete: bool = False
    min_age: float = 3600.0
    force: bool = False


class Refused(Exception):
    """Nothing may go at all."""


def goes(things: Sequence[Thing], rules: Rules, now: float) -> set[str]:
    """Return the names of what goes.

    Raises:
        Refused: Nothing is removed.
    """
    known = [one for one in things if one.truth and one.parsed]
    _require(known, rules)
    best = _bests(known)
    gone: set[str] = set()
    for series in {_series(one) for one in known}:
        members = sorted((one for one in known if _series(one) == series), key=_place)
        complete = [one for one in members if one.truth == COMPLETE and not one.link]
        sure = [one for one in complete if not _lacks(one, members)]
        kept = _kept(complete, rules) | _kept(sure, rules)
        kept |= {one.name for one in members if one.named_by or one.name in best}
        gone |= {one.name for one in complete} - kept
        if rules.incomplete and complete:
            gone |= {one.name for one in members if _may_go_torn(one, rules, now)} - kept
    return gone


def _series(one: Thing) -> str:
    assert one.parsed
    return one.parsed[0]


def _step(one: Thing) -> int:
    assert one.parsed
    return one.parsed[1]


def _place(one: Thing) -> tuple[int, float]:
    return _step(one), one.time


def _kept(complete: Sequence[Thing], rules: Rules) -> set[str]:
    """What one rule keeps is kept; the newest stays."""
    if not complete:
        return set()
    newest = max(one.time for one in complete)
    tests: list[Callable[[Thing], bool]] = [
        lambda one: one is complete[-1],
        lambda one: one in complete[-(rules.last or 0) :] if rules.last else False,
        lambda one: rules.every is not None and _step(one) % rules.every == 0,
        lambda one: rules.within is not None and one.time >= newest - rules.within,
        lambda one: any(fnmatchcase(one.name, pattern) for pattern in rules.patterns),
    ]
    kept = {one.name for one in complete if any(test(one) for test in tests)}
    rated = [one for one in complete if rules.best in one.metrics]
    for _ in range(rules.count if rated else 0):
        lowest = min((one.metrics[str(rules.best)] for one in rated), default=0.0)
        equal = [one for one in rated if one.metrics[str(rules.best)] == lowest]
        kept |= {one.name for one in equal[-1:]}
        rated = [one for one in rated if one not in equal[-1:]]
    return kept | _closest(complete, rules) | _apart(complete, rules)


def _closest(complete: Sequence[Thing], rules: Rules) -> set[str]:
    """Of each multiple the closest, the later of two; a step belongs to the multiple near it."""
    kept = set()
    width = rules.closest or 0
    for multiple in {0, *(width * n for n in range(1, 1000))} if width else ():
        near = [o for o in complete if -width <= 2 * (_step(o) - multiple) < width]
        near = near if multiple else [one for one in near if _step(one) == 0]
        best = min((abs(_step(one) - multiple) for one in near), default=0)
        kept |= {one.name for one in [o for o in near if abs(_step(o) - multiple) == best][-1:]}
    return kept


def _apart(complete: Sequence[Thing], rules: Rules) -> set[str]:
    kept: list[Thing] = []
    for one in complete if rules.interval else ():
        if not kept or abs(one.time - kept[-1].time) >= (rules.interval or 0.0):
            kept.append(one)
    return {one.name for one in kept}


def _may_go_torn(one: Thing, rules: Rules, now: float) -> bool:
    old = one.time <= now - max(rules.min_age, AT_WORK)
    asked = any(fnmatchcase(one.name, pattern) for pattern in rules.patterns)
    return one.truth == TORN and not one.link and old and not asked


def _lacks(one: Thing, members: Sequence[Thing]) -> bool:
    """Whether most others have the file that trainers write last."""
    own = [other for other in members if not other.link and not STAGED.fullmatch(other.name)]
    others = [other for other in own if other is not one]
    having = [other for other in others if other.states is not None]
    return one.states is None and len(having) * 2 > len(others)


def _bests(known: Sequence[Thing]) -> set[str]:
    """Return what the newest checkpoint calls the best, the newest complete one, and the newest
    whose files show no torn write.
    """
    found = set()
    for series in {_series(one) for one in known}:
        stating = [
            one
            for one in sorted(known, key=_place)
            if _series(one) == series and one.states is not None and not one.link
            if not STAGED.fullmatch(one.name)
        ]
        complete = [one for one in stating if one.truth == COMPLETE]
        for some in (stating, complete, [one for one in stating if one.truth != TORN]):
            found |= {str(some[-1].states)} if some else set()
    return found


def _require(known: Iterable[Thing], rules: Rules) -> None:
    counted = sorted((o for o in known if o.truth == COMPLETE and not o.link), key=_place)
    names = [one.name for one in known]
    for pattern in rules.patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise Refused(f"{pattern} matches nothing")
    if rules.best and not any(rules.best in one.metrics for one in counted):
        raise Refused("no checkpoint states the metric")
    if not rules.force:
        for older in counted:
            for newer in counted:
                same = _series(older) == _series(newer) and _step(older) < _step(newer)
                if same and newer.time < older.time - CLOCK:
                    raise Refused("a higher step is older than a lower one")
    counting = (rules.last, rules.every, rules.closest, rules.within, rules.interval)
    if set(counting) == {None} and len(counted) > 1:
        named = any(fnmatchcase(one.name, p) for one in counted for p in rules.patterns)
        if not named and not any(rules.best in one.metrics for one in counted):
            raise Refused("patterns and metrics alone that keep nothing")
