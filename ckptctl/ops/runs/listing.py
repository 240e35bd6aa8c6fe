"""The checkpoints of a run: which there are, which are complete, what else names them.

A run is a folder whose entries are checkpoints with steps in their names. Whether one is complete
is what ``verify --level fast`` says; nothing is written, and torch is not imported.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptctl.ops.runs.completeness import Company, Health, health
from ckptctl.ops.runs.entries import Entry, entries
from ckptctl.ops.runs.pointers import Members, Pins, metrics, pins
from ckptctl.ops.runs.run_record import lineage_of
from ckptctl.planner.branches import Lineage, left_behind
from ckptctl.planner.retention import NOT_UNDERSTOOD, Candidate, State, ordered
from ckptctl.storage import lock
from ckptctl.storage.destinations import staging_directory
from ckptctl.storage.remote.path import path_of

AT_WORK = 600.0
"""Seconds since the last change for which an incomplete checkpoint counts as being written."""

LATEST = 253_402_300_799.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint of a run.

    Attributes:
        entry: Where it is.
        candidate: What retention knows of it.
        format: Its format; None: none is known.
        parts: What it consists of: itself, or checkpoints inside of it.
    """

    entry: Entry
    candidate: Candidate
    format: str | None
    parts: tuple[Path, ...]

    @property
    def complete(self) -> bool:
        """Return whether nothing is missing."""
        return self.candidate.state == "complete"

    @property
    def counts(self) -> bool:
        """Return whether it is complete and rules apply to it: it is no link, for one."""
        return self.candidate.counts

    @property
    def protection(self) -> tuple[str, ...]:
        """Return what keeps it from being pruned: what names it, and what it is."""
        one = self.candidate
        return (*one.pinned, *([one.exempt] if one.exempt else ()))

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        one = self.candidate
        return {
            "path": str(self.entry.path),
            "step": one.step,
            "time": rfc3339(self.entry.time),
            "bytes": self.entry.nbytes,
            "format": self.format,
            "state": one.state,
            "problem": one.problem or None,
            "lacks": one.lacks or None,
            "protected_by": list(self.protection),
            "metrics": {name: _finite(value) for name, value in sorted(one.metrics.items())},
            "link": self.entry.link or None,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """A folder of checkpoints.

    Attributes:
        root: As it was named.
        checkpoints: By series and step.
        others: Names of what else lies there, hidden things apart.
    """

    root: Path
    checkpoints: tuple[Checkpoint, ...]
    others: tuple[str, ...] = field(default=())

    @property
    def series(self) -> tuple[str, ...]:
        """Return the series that it has."""
        return tuple(dict.fromkeys(one.candidate.series for one in self.checkpoints))

    @property
    def newest(self) -> frozenset[str]:
        """Return the names of the newest complete one of each series, which are always kept."""
        found = {one.candidate.series: one.candidate for one in self.checkpoints if one.counts}
        return frozenset(one.name for one in found.values())


def rfc3339(seconds: float) -> str:
    """Return a time as RFC 3339 has it, in UTC; its years end with 9999."""
    return clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(min(seconds, LATEST)))


def _finite(value: float) -> float | None:
    """Return a number as JSON knows them: None for NaN and infinity."""
    return value if math.isfinite(value) else None


def read_run(root: Path, now: float | None = None, series: str | None = None) -> Run:
    """Return the checkpoints in *root*.

    Args:
        root: A directory.
        now: Seconds since the epoch; None: what the clock says.
        series: Only those whose names have this in common; None: all.

    Raises:
        SourceNotFoundError: There is no such directory.
        FormatError: No entry is named as checkpoints of a run are.
    """
    now, root = clock.time() if now is None else now, path_of(root)
    found = [one for one in entries(root) if series in (None, one.named.series)]
    company = company_of(found)
    examined = [accompanied(examine(one, now), company) for one in found]
    pinned = pins(members(root, examined))
    known = {one.path.name for one in found}
    others = tuple(sorted(i.name for i in root.iterdir() if i.name not in known))
    left = left_in(found)
    checkpoints = _by_order([_protected(one, pinned, left) for one in examined])
    return Run(root, checkpoints, tuple(name for name in others if not name.startswith(".")))


def left_in(found: Sequence[Entry]) -> dict[str, int]:
    """Return for what a run left behind the step from which it went on instead."""
    series: dict[str, dict[str, Lineage]] = {}
    for one in found:
        if not one.link:
            series.setdefault(one.named.series, {})[one.path.name] = lineage_of(one.path)
    return {name: step for some in series.values() for name, step in left_behind(some).items()}


def members(root: Path, found: Iterable[Checkpoint]) -> Members:
    """Return which of *found*, in *root*, may name others as the best, and be named."""
    own = [one for one in found if not one.entry.link]
    names = [one.entry.path.name for one in own if not one.entry.staging]
    whole = {one.entry.path.name for one in own if one.complete}
    unclear = {one.entry.path.name for one in own if one.candidate.state == NOT_UNDERSTOOD}
    return Members(root, names, (whole, whole | unclear))


def _protected(found: Checkpoint, pinned: Pins, left: Mapping[str, int]) -> Checkpoint:
    one = found.candidate
    step, exempt = left.get(one.name), one.exempt
    if step is not None:
        exempt = f"left behind: the run went on from step {step}"
    return replace(found, candidate=replace(one, pinned=pinned.get(one.name, ()), exempt=exempt))


def examine(entry: Entry, now: float) -> Checkpoint:
    """Return what is known of a checkpoint by itself.

    Args:
        entry: The checkpoint.
        now: Seconds since the epoch.
    """
    unfinished = Health(None, (), "torn", "it is not finished")
    seen = unfinished if entry.staging else health(entry.path)
    one = Candidate(
        name=entry.path.name,
        series=entry.named.series,
        order=entry.named.order,
        time=entry.time,
        metrics={**entry.named.metrics, **metrics(entry.path)},
        exempt=entry.exempt,
        lineage=lineage_of(entry.path),
    )
    found = Checkpoint(entry, one, seen.format, seen.parts)
    return found if seen.verdict == "whole" else _not_whole(found, seen, now)


def _not_whole(found: Checkpoint, seen: Health, now: float) -> Checkpoint:
    entry, torn = found.entry, seen.verdict == "torn"
    holder, problem = _holder(entry), seen.problem
    state: State = "incomplete" if torn else NOT_UNDERSTOOD
    if holder:
        state, problem = "writing", f"process {holder} is writing it"
    elif (torn or seen.begun) and now - entry.touched < AT_WORK:
        minutes = max(0, int((now - entry.touched) / 60))
        state, problem = "writing", f"{problem}; written {minutes} min ago"
    # Its age counts from the last change of anything in it.
    one = replace(found.candidate, state=state, problem=problem, time=entry.touched)
    return replace(found, candidate=one)


def _holder(entry: Entry) -> str | None:
    """Return the process that is making this checkpoint, as far as its lock says."""
    folder = entry.path if entry.staging else staging_directory(entry.path)
    return lock.holder(folder) if folder.is_dir() and not folder.is_symlink() else None


def company_of(found: Sequence[Entry]) -> Company:
    """Return what most checkpoints have: links do not count, nor what Lightning saves last."""
    own = (one for one in found if not one.staging and not one.exempt)
    return Company({one.path: one.named.series for one in own})


def accompanied(found: Checkpoint, company: Company) -> Checkpoint:
    """Note of a complete one which file it lacks that the others of its series have."""
    if not found.complete:
        return found
    lacks = company.lacking(found.entry.path, found.candidate.series)
    return replace(found, candidate=replace(found.candidate, lacks=lacks))


def _by_order(found: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    by_name = {one.candidate.name: one for one in found}
    return tuple(by_name[one.name] for one in ordered(one.candidate for one in found))
