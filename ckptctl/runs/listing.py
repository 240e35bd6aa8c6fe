"""Listing of a run's checkpoints, and choice of the newest complete one.

A run is a folder whose entries are checkpoints with steps in their names. They are verified as by
``verify --level fast``. Nothing is written, and torch is not imported.
"""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl.errors import (
    CkptError,
    DamagedError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    format_command,
    quote_names,
)
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.planner.lineage import list_unsaved_resumes
from ckptctl.planner.retention import find_abandoned_checkpoints, is_saved_before, sort_checkpoints
from ckptctl.results import Inline, JsonField, Result
from ckptctl.runs.entries import RunEntry, entries
from ckptctl.runs.health import Checkpoint, examine
from ckptctl.runs.names import is_last
from ckptctl.runs.notes import stated_step
from ckptctl.runs.protections import Pointers, Protected, RunView, protect
from ckptctl.storage.paths import resolve_source_path
from ckptctl.tree import TreePath
from ckptctl.units import format_rfc3339
from ckptctl.verbs.verification.verify import IndexChecks
from ckptctl.verdict import Verdict

LIGHTNING = ".ckpt"
COMPANIONS = (
    "trainer_state.json",
    "meta.pt",
    "recipe_state.pt",
    "recipe_state/recipe_state.pt",
    "common.pt",
    "random_states_0.pkl",
)
"""Files that trainers write next to the weights, and after them: transformers, Lightning,
torchtune, Megatron, accelerate."""


class Company:
    """Checkpoints of a run that are compared with the others of their series.

    A checkpoint without a file that trainers write last, and that most others have, may be
    unfinished, or saved in another way. That is a guess, not evidence.
    """

    def __init__(self, members: Sequence[RunEntry], now: float | None, *, model: bool) -> None:
        self.now, self.model = clock.time() if now is None else now, model
        self._index_checks = IndexChecks()
        own = {one.path: one.named.series for one in members if one.counts and not one.staging}
        self._have = {path: _companions_of(path) for path in own}
        self._count = Counter(own.values())
        self._having = Counter((own[p], name) for p, names in self._have.items() for name in names)

    def examine(self, entry: RunEntry) -> Checkpoint:
        """Verify one checkpoint, and note a file that it misses and most others have."""
        checkpoint = examine(entry, self.now, model=self.model, index_checks=self._index_checks)
        if not checkpoint.complete:
            return checkpoint
        path, series, member = entry.path, checkpoint.series, entry.path in self._have
        have = self._have[path] if member else _companions_of(path)
        others = self._count[series] - member
        lacks = (
            name
            for name in COMPANIONS
            if name not in have and self._having[series, name] * 2 > others
        )
        return replace(checkpoint, lacks=next(lacks, ""))


def _companions_of(folder: TreePath) -> list[str]:
    return [name for name in COMPANIONS if _has(folder, name)]


def _has(folder: TreePath, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError:
        return False


# --- all checkpoints ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """Checkpoint of a run, and whether it is the newest."""

    checkpoint: Annotated[Checkpoint, Inline()]
    newest: Annotated[
        bool,
        JsonField(
            "whether it is the newest complete checkpoint of its series, which is never pruned"
        ),
    ]


@dataclass(frozen=True, slots=True)
class RunFolder(Result, order="root series checkpoints others"):
    """A folder of checkpoints.

    Attributes:
        checkpoints: Checkpoints by series and step.
    """

    root: Annotated[TreePath, JsonField("path as given")]
    checkpoints: tuple[Checkpoint, ...]
    pointers: Pointers
    others: Annotated[tuple[str, ...], JsonField("names of other entries, except hidden ones")] = ()

    @property
    def listed(
        self,
    ) -> Annotated[
        tuple[Listed, ...], JsonField("checkpoints by series and step", name="checkpoints")
    ]:
        """Checkpoints, each with whether it is the newest."""
        newest = self.newest
        return tuple(Listed(one, one.name in newest) for one in self.checkpoints)

    @property
    def series(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Common part of the names in each series of checkpoints."""
        return tuple(dict.fromkeys(one.series for one in self.checkpoints))

    @property
    def newest(self) -> frozenset[str]:
        """Names of the newest complete checkpoint of each series, which are always kept."""
        return frozenset(
            {one.series: one.name for one in self.checkpoints if one.is_counted}.values()
        )


def read_run(
    root: TreePath,
    now: float | None = None,
    series: str | None = None,
    *,
    in_use: Collection[str] = (),
    branches: bool = True,
    model: bool = True,
) -> RunFolder:
    """Read and verify the checkpoints in *root*.

    Args:
        root: A directory.
        now: Seconds since the epoch; None uses the clock.
        series: Common part of the names to select; None selects all.
        in_use: Names of checkpoints that a running job uses.
        branches: Whether abandoned checkpoints are left alone.
        model: Whether to compare tensors with their model type.
    """
    root = resolve_source_path(root)
    own = [entry for entry in entries(root) if series in (None, entry.named.series)]
    examined = list(map(Company(own, now, model=model).examine, own))
    pointers = Pointers.read(root)
    protected = protect(RunView(root, examined, pointers, in_use, branches))
    checkpoints = (
        replace(one, **protected.get(one.name, Protected())._asdict()) for one in examined
    )
    names = {item.name for item in root.iterdir()} - {entry.path.name for entry in own}
    others = sorted(name for name in names if not name.startswith("."))
    return RunFolder(root, tuple(sort_checkpoints(checkpoints)), pointers, tuple(others))


# --- the newest ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Newest(Result):
    """Newest complete checkpoint of a run, and the other candidates.

    Attributes:
        others: Newest complete checkpoints of other series, among which it was chosen.
        doubts: Reasons why the highest step may not be the last save.
    """

    chosen: Annotated[Checkpoint, Inline()]
    skipped: Annotated[
        tuple[Checkpoint, ...], JsonField("newer checkpoints that are not complete")
    ] = ()
    others: tuple[Checkpoint, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def path(self) -> TreePath:
        """Path of the chosen checkpoint."""
        return self.chosen.path


def newest(
    root: TreePath,
    now: float | None = None,
    series: str | None = None,
    torn: Mapping[str, str] | None = None,
    *,
    model: bool = True,
) -> Newest:
    """Find the newest complete checkpoint of a run.

    Abandoned checkpoints only count if there are no others. Among several series, the one that was
    written last counts. Lightning's ``last.ckpt`` is compared with the numbered checkpoints by
    step, and only chosen if it is ahead of all of them. Older checkpoints are not read, except
    those saved later than a higher step. *torn* maps names to reasons why checkpoints are
    damaged, although no file is missing. *model* is that of `read_run`.
    """
    root = resolve_source_path(root)
    there = [Checkpoint.of(one) for one in entries(root) if series in (None, one.named.series)]
    company = Company([one.entry for one in there], now, model=model)
    waiting = sorted(there, key=lambda one: (one.order, one.time), reverse=True)
    left = find_abandoned_checkpoints(one for one in waiting if not one.entry.link)
    by_preference = sorted(waiting, key=lambda one: one.name in left)
    complete, skipped = _examine_newest(root, by_preference, company, torn or {})
    furthest = _furthest(complete)
    chosen = max(furthest, key=lambda one: one.entry.time)

    def is_later(one: Checkpoint) -> bool:
        return one.entry.time > chosen.entry.time

    skipped = [one for one in skipped if one.series == chosen.series or is_later(one)]
    _require_understood(skipped, chosen)
    others = (one for one in complete if one is not chosen and (one in furthest or is_later(one)))
    return Newest(
        chosen,
        tuple(skipped),
        # last.ckpt may be a second name of the chosen checkpoint.
        tuple(o for o in others if not is_last(o.name) or _saved_at(o) != _saved_at(chosen)),
        tuple(_doubts(chosen, waiting, left, company)),
    )


def _examine_newest(
    root: TreePath, checkpoints: Sequence[Checkpoint], company: Company, torn: Mapping[str, str]
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Verify each series in order until a checkpoint is complete, or raise if none is."""
    complete: list[Checkpoint] = []
    skipped: list[Checkpoint] = []
    for listed_checkpoint in checkpoints:
        name = listed_checkpoint.name
        if any(listed_checkpoint.series == other.series for other in complete):
            continue
        checkpoint = company.examine(listed_checkpoint.entry)
        if name in torn:
            checkpoint = replace(checkpoint, verdict=Verdict.DAMAGED, torn=True, problem=torn[name])
        (complete if checkpoint.complete else skipped).append(checkpoint)
    if complete:
        return complete, skipped
    _require_understood(skipped)
    last = max(skipped, key=lambda one: one.entry.time)
    more = f" (and {len(skipped) - 1:,} more)" if len(skipped) > 1 else ""
    raise SourceNotFoundError(
        "no complete checkpoint found",
        where=str(root),
        why=f"{last.name}: {last.problem}{more}",
        hint=f"run {format_command('verify', last.path)} for details",
    )


def _doubts(
    chosen: Checkpoint,
    known: Sequence[Checkpoint],
    left: Mapping[str, int],
    company: Company,
) -> Iterator[str]:
    """Yield reasons to doubt that *chosen* is the newest."""
    own = [one for one in known if one.series == chosen.series and one.entry.counts]
    name = chosen.name
    for one in own:
        if one.record.error:
            yield (
                f"`{RUN_FILE}` of `{one.name}` cannot be read ({one.record.error.what}), "
                "so it is unknown which metrics it has and whether the run resumed from it"
            )
    higher = [one.name for one in own if one.name in left and one.order > chosen.order]
    if higher and name not in left:
        yield (
            f"skipped {quote_names(higher)}, which has a higher step than `{name}`: the run resumed "
            f"from step {left[higher[0]]} and saved `{name}` later"
        )
    back = list_unsaved_resumes({one.name: one.lineage for one in own})
    if back and name not in back:
        yield (
            f"a run resumed from {quote_names(back)} and has not saved since; "
            f"`{name}` is older, although its step is higher"
        )
    lower = (one for one in own if one.order < chosen.order and one.name not in left)
    later = [
        one for one in lower if is_saved_before(chosen, one) and company.examine(one.entry).complete
    ]
    if later:
        last = max(later, key=lambda one: (one.lineage.save, one.entry.time))
        times = format_rfc3339(chosen.entry.time), format_rfc3339(last.entry.time)
        yield (
            f"`{name}` has the highest step, but `{last.name}` was saved later "
            f"({times[0]} and {times[1]}); the folder may contain two runs"
        )


def _furthest(found: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """Drop ``last.ckpt``, or the numbered checkpoints if all of them are behind it."""
    last = next((one for one in found if is_last(one.name)), None)
    numbered = [one for one in found if one is not last and one.path.suffix == LIGHTNING]
    if last is None or not numbered:
        return found
    behind = [one for one in numbered if _saved_at(one) < last.step]
    return [one for one in found if one not in (behind if behind == numbered else [last])]


def _saved_at(one: Checkpoint) -> int:
    """Return the step that the checkpoint records, or the step in its name."""
    stated = stated_step(one.path)
    return one.step if stated is None else stated


def _require_understood(newer: Sequence[Checkpoint], chosen: Checkpoint | None = None) -> None:
    """Raise if a checkpoint newer than *chosen* is not complete but shows no torn write."""
    found = next((one for one in newer if not (one.torn or one.writing)), None)
    if found:
        what = "cannot determine whether the newest checkpoint is complete"
        error: type[CkptError] = UnsupportedError
        if found.read_failed:
            what, error = "the newest checkpoint cannot be read", StorageError
        elif found.verdict is Verdict.DAMAGED:
            what, error = (
                "the newest checkpoint is damaged, but no file shows an incomplete write",
                DamagedError,
            )
        name = f", or use `{chosen.path}`, the newest complete one" if chosen else ""
        raise error(
            what,
            where=str(found.path),
            why=found.problem,
            hint=f"move this checkpoint away if it does not belong to the run{name} "
            f"(see {format_command('ls', found.path.parent)})",
        )
