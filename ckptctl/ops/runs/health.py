"""Whether a checkpoint of a run is whole, by the same readers as ``verify --level fast``.

There are three answers. Only what is torn, with evidence, may be removed or passed over.
"""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ckptctl import formats
from ckptctl.errors import CkptError, MappingError, StorageError
from ckptctl.formats.dcp import METADATA, lacks_metadata
from ckptctl.formats.shared.findings import severity_of
from ckptctl.formats.sidecar_files import SIDECAR
from ckptctl.ops.runs.entries import RunEntry
from ckptctl.ops.runs.notes import RunRecord, noted, run_record, trainer_state
from ckptctl.ops.verification.options import VerifyOptions
from ckptctl.ops.verification.result import Verdict, Verification
from ckptctl.ops.verification.verify import verify
from ckptctl.planner.retention import NOT_UNDERSTOOD, Retainable
from ckptctl.results import JsonField, Result, or_none
from ckptctl.storage import lock
from ckptctl.storage.destinations import staging_directory
from ckptctl.storage.paths import real_path, require_answers
from ckptctl.storage.remote.writing import NAME as LOCK
from ckptctl.storage.remote.writing import OBJECTS, UnfinishedError, unfinished

NOTES = frozenset({SIDECAR, LOCK, OBJECTS})
"""What is written beside a checkpoint, and may be left where it was removed."""
BUILT_IN_RULES = Path("megatron-core")
AT_WORK = 600.0
"""Seconds since the last change for which an incomplete checkpoint counts as being written."""
LATEST = 253_402_300_799.0
CHECKPOINT = "path step time bytes format state problem lacks protected_by metrics link"
"""The order of what is printed of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a checkpoint is whole.

    Attributes:
        parts: Itself, or checkpoints inside of it; nothing where it is not understood.
        verdict: ``not understood`` is also what cannot be read here: a disk that fails,
            permissions, a link that leads out of it, a feature that ckptctl does not read.
        begun: Whether nothing in it is known to be a checkpoint's: a trainer may have just begun.
    """

    format: str | None
    parts: tuple[Path, ...]
    verdict: Verdict = "whole"
    problem: str = ""
    begun: bool = False


def rfc3339(seconds: float) -> str:
    """Return a time as RFC 3339 has it, in UTC; its years end with 9999."""
    return clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(min(seconds, LATEST)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Retainable, Result, order=CHECKPOINT):
    """One checkpoint of a run.

    Attributes:
        record: Its ``ckptctl.run.json``.
        parts: What it consists of: itself, or checkpoints inside of it.
    """

    entry: Annotated[
        RunEntry,
        JsonField("where it is", of="path"),
        JsonField(
            "when the newest file of its weights or its trainer's state was written, RFC 3339, UTC",
            of="time",
            to=rfc3339,
        ),
        JsonField("size of all its files", of="nbytes", name="bytes"),
        JsonField("where it leads, if it is a symbolic link", of="link", to=or_none),
    ]
    record: RunRecord = field(default_factory=RunRecord)
    format: Annotated[str | None, JsonField("[format](formats.md); null: none is known")] = None
    parts: tuple[Path, ...] = ()

    @classmethod
    def of(cls, entry: RunEntry) -> Checkpoint:
        """Return the checkpoint at *entry*, of which nothing but its record was read."""
        record, named = run_record(entry.path), entry.named
        return cls(
            name=entry.path.name,
            series=named.series,
            order=named.order,
            time=entry.time,
            lineage=record.lineage,
            entry=entry,
            record=record,
        )

    @property
    def path(self) -> Path:
        """Return the path of the checkpoint."""
        return self.entry.path


def metrics(folder: Path, record: RunRecord | None = None) -> dict[str, float]:
    """Return the metrics that a checkpoint states of itself; *record*: if it was read before."""
    record = record or run_record(folder)
    rated = {**noted(folder).scores, **trainer_state(folder).scores, **record.metrics}
    rated.pop("step", None)
    return {
        key: float(value)
        for key, value in rated.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def health(path: Path) -> Health:
    """Judge the checkpoint at *path*: whole if every part of it is."""
    try:
        judged = _health(path)
    except OSError as error:
        what = StorageError.from_os_error(error, "read", str(path)).what
        return Health(None, (), "not understood", what)
    require_answers(path)
    return judged


def examine(entry: RunEntry, now: float) -> Checkpoint:
    """Examine one checkpoint by itself; *now* in seconds since the epoch."""
    unfinished = Health(None, (), "torn", "it is not finished")
    seen = unfinished if entry.staging else health(entry.path)
    checkpoint = Checkpoint.of(entry)
    rated = {**entry.named.metrics, **metrics(entry.path, checkpoint.record)}
    checkpoint = replace(checkpoint, metrics=rated, format=seen.format, parts=seen.parts)
    if seen.verdict == "whole":
        return checkpoint
    # Its age counts from the last change of anything in it.
    checkpoint = replace(checkpoint, time=entry.touched, problem=seen.problem)
    staging = entry.path if entry.staging else staging_directory(entry.path)
    writer = lock.holder(staging) if staging.is_dir() and not staging.is_symlink() else None
    if writer:
        return replace(checkpoint, state="writing", problem=f"process {writer} is writing it")
    torn, age = seen.verdict == "torn", now - entry.touched
    if (torn or seen.begun) and age < AT_WORK:
        problem = f"{seen.problem}; written {max(0, int(age / 60))} min ago"
        return replace(checkpoint, state="writing", problem=problem)
    return replace(checkpoint, state="incomplete" if torn else NOT_UNDERSTOOD)


def _health(path: Path) -> Health:
    for folder in (path, *(item for item in _inside(path) if item.is_dir())):
        # what ranks save in DCP's format, without what is saved last
        if lacks_metadata(folder) and not formats.sniff(folder):
            missing = (folder / METADATA).relative_to(path)
            return Health("dcp", (path,), "torn", f"`{missing}` is missing")
    problem = unfinished(path)
    if problem is not None:
        kind = next(iter(formats.sniff(path)), None)
        why = f" ({problem.why})" if problem.why else ""
        torn = isinstance(problem, UnfinishedError)
        said = f"{problem.what}{why}"
        return Health(kind, (path,) if torn else (), "torn" if torn else "not understood", said)
    parts = [path] if formats.sniff(path) else formats.list_run(path) or formats.below(path)
    real = real_path(path)
    outside = next((part for part in parts if not real_path(part).is_relative_to(real)), None)
    if outside is not None:
        what = f"`{outside.relative_to(path)}` leads outside the checkpoint"
        return Health(None, (), "not understood", what)
    sniffed = tuple((part, name) for part in parts for name in formats.sniff(part))
    if sniffed:
        return _of_parts(path, sniffed)
    if _holds_nothing(path):
        return Health(None, (), "torn", "there is nothing in it")
    what = "nothing in it is recognised as a checkpoint"
    return Health(None, (), "not understood", what, begun=True)


def _of_parts(path: Path, sniffed: tuple[tuple[Path, str], ...]) -> Health:
    """Judge a checkpoint by its parts: torn if one is, understood if all are."""
    parts = tuple(dict.fromkeys(part for part, _ in sniffed))
    several = len(parts) != len(sniffed)
    judged = [_unrecognised(path, part) for part in _other_parts(path, parts)]
    for part, name in sniffed:
        verdict, problem = _judged(part, name if several else None)
        inside = "" if part == path else f"`{part.relative_to(path)}`: "
        judged.append(Health(name, parts, verdict, inside + problem))
    for one in judged:
        if one.verdict == "torn":
            return one
    for one in judged:
        if one.verdict != "whole":
            return replace(one, parts=())
    model = [name for part, name in sniffed if not formats.NO_MODEL.fullmatch(part.name)]
    return Health((model or [sniffed[0][1]])[0], parts)


def _other_parts(path: Path, parts: Sequence[Path]) -> list[Path]:
    """List the folders beside *parts* that are named as parts and that nothing recognises."""
    folders = dict.fromkeys(part.parent for part in parts if part != path)
    beside = (item for folder in folders for item in _inside(folder) if item not in parts)
    named = (item for item in beside if formats.PART.fullmatch(item.name))
    return [item for item in named if item.is_dir() or (item.is_symlink() and not item.is_file())]


def _unrecognised(path: Path, part: Path) -> Health:
    """Judge a folder that is named as a part; it may have been emptied on purpose."""
    if part.is_symlink():
        seen = Health(None, (), "not understood", "a link to what is not recognised")
    elif _holds_nothing(part):
        seen = Health(None, (), "not understood", "there is nothing in it")
    else:
        seen = _health(part)
    return replace(seen, problem=f"`{part.relative_to(path)}`: {seen.problem}")


def _holds_nothing(path: Path) -> bool:
    """Return whether a file is empty, or a folder has no files but notes on what lay there."""
    if not path.is_dir():
        return path.stat().st_size == 0
    waiting = [path]
    while waiting:
        for item in waiting.pop().iterdir():
            if item.is_symlink() or not (item.is_dir() or item.name in NOTES):
                return False
            if item.is_dir():
                waiting.append(item)
    return True


def _inside(folder: Path) -> list[Path]:
    """Return the entries of a folder, in order; none of a file, or where they cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except (NotADirectoryError, PermissionError):
        return []


def _judged(path: Path, name: str | None) -> tuple[Verdict, str]:
    """Return whether *path* is whole, and why not."""
    asked = VerifyOptions(format=name, level="fast", model=False)
    try:
        verified = verify(path, asked)
    except MappingError as error:
        # The files do not say how ranks divide tensors; whether all are there can be told.
        try:
            verified = verify(path, replace(asked, rules=BUILT_IN_RULES))
        except CkptError:
            return "not understood", error.what
    except CkptError as error:
        return "torn" if severity_of(error) == "error" else "not understood", error.what
    return verified.verdict, _first_problem(verified, path)


def _first_problem(verified: Verification, path: Path) -> str:
    """Return the first thing that is wrong, and where inside of *path*."""
    wrong = (*verified.errors, *verified.unknown)
    if not wrong:
        return ""
    first, more = wrong[0], len(wrong) - 1
    told = first.where in ("", str(path.absolute())) or first.where in first.what
    where = "" if told else f" ({first.where})"
    return f"{first.what}{where}" + (f"; and {more:,} more" if more else "")
