"""Listing of a run's checkpoints, and choice of the newest complete one.

A run is a folder of checkpoints that have steps in their names. They are verified in the same way
as by ``verify --level fast``. Nothing is written, and torch is not imported.
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
from ckptctl.runs.entries import RunEntry, list_entries
from ckptctl.runs.health import Checkpoint, examine_entry
from ckptctl.runs.names import is_lightning_last
from ckptctl.runs.notes import read_recorded_step
from ckptctl.runs.protections import CheckpointProtection, Pointers, RunView, find_protections
from ckptctl.storage.paths import resolve_source_path
from ckptctl.tree import TreePath
from ckptctl.units import format_rfc3339
from ckptctl.verbs.verification.verify import IndexChecks
from ckptctl.verdict import Verdict

LIGHTNING_SUFFIX = ".ckpt"
COMPANION_FILES = (
    "trainer_state.json",
    "meta.pt",
    "recipe_state.pt",
    "recipe_state/recipe_state.pt",
    "common.pt",
    "random_states_0.pkl",
)
"""Files that transformers, Lightning, torchtune, Megatron and accelerate write after the weights,
in the same folder."""


class RunExaminer:
    """Verifier of a run's checkpoints, which compares each checkpoint with others of its series.

    Trainers write some files last. If a checkpoint does not have such a file, but most other
    checkpoints do, it may be unfinished. This is no evidence of damage, since the checkpoint may
    have been saved with other settings.
    """

    def __init__(self, members: Sequence[RunEntry], now: float | None, *, model: bool) -> None:
        self.now, self.model = clock.time() if now is None else now, model
        self._index_checks = IndexChecks()
        series_by_path = {
            member.path: member.parsed_name.series
            for member in members
            if member.is_counted and not member.is_staging
        }
        self._have = {path: _list_companion_files(path) for path in series_by_path}
        self._count = Counter(series_by_path.values())
        self._having = Counter(
            (series_by_path[p], name) for p, names in self._have.items() for name in names
        )

    def examine_checkpoint(self, entry: RunEntry) -> Checkpoint:
        """Verify a checkpoint, and record the absence of a file that most others contain."""
        checkpoint = examine_entry(
            entry, self.now, model=self.model, index_checks=self._index_checks
        )
        if not checkpoint.complete:
            return checkpoint
        path, series, is_member = entry.path, checkpoint.series, entry.path in self._have
        have = self._have[path] if is_member else _list_companion_files(path)
        others = self._count[series] - is_member
        missing_files = (
            name
            for name in COMPANION_FILES
            if name not in have and self._having[series, name] * 2 > others
        )
        return replace(checkpoint, lacks=next(missing_files, ""))


def _list_companion_files(folder: TreePath) -> list[str]:
    return [name for name in COMPANION_FILES if _has_file(folder, name)]


def _has_file(folder: TreePath, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError:
        return False


# --- all checkpoints ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """Checkpoint of a run, with a flag for the newest complete checkpoint of its series."""

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
        tuple[ListedCheckpoint, ...],
        JsonField("checkpoints by series and step", name="checkpoints"),
    ]:
        """Checkpoints, with a flag for the newest of each series."""
        newest = self.newest
        return tuple(
            ListedCheckpoint(checkpoint, checkpoint.name in newest)
            for checkpoint in self.checkpoints
        )

    @property
    def series(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Common part of the names in each series of checkpoints."""
        return tuple(dict.fromkeys(checkpoint.series for checkpoint in self.checkpoints))

    @property
    def newest(self) -> frozenset[str]:
        """Names of the newest complete checkpoint of each series, which are always kept."""
        return frozenset(
            {
                checkpoint.series: checkpoint.name
                for checkpoint in self.checkpoints
                if checkpoint.is_counted
            }.values()
        )


def read_run(
    root: TreePath,
    now: float | None = None,
    series: str | None = None,
    *,
    in_use: Collection[str] = (),
    protect_abandoned: bool = True,
    model: bool = True,
) -> RunFolder:
    """Read and verify the checkpoints in *root*.

    Args:
        root: Run folder.
        now: Current time in seconds since the epoch, or None to use the clock.
        series: Common part of the names to select, or None to select all.
        in_use: Names of checkpoints that a running job uses.
        protect_abandoned: Whether abandoned checkpoints are protected.
        model: Whether to compare tensors with their model type.
    """
    root = resolve_source_path(root)
    run_entries = [
        entry for entry in list_entries(root) if series in (None, entry.parsed_name.series)
    ]
    examined = list(map(RunExaminer(run_entries, now, model=model).examine_checkpoint, run_entries))
    pointers = Pointers.read(root)
    protected = find_protections(RunView(root, examined, pointers, in_use, protect_abandoned))
    checkpoints = (
        replace(checkpoint, **protected.get(checkpoint.name, CheckpointProtection())._asdict())
        for checkpoint in examined
    )
    names = {item.name for item in root.iterdir()} - {entry.path.name for entry in run_entries}
    others = sorted(name for name in names if not name.startswith("."))
    return RunFolder(root, tuple(sort_checkpoints(checkpoints)), pointers, tuple(others))


# --- the newest ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Newest(Result):
    """Newest complete checkpoint of a run, and the other candidates.

    Attributes:
        others: Other candidates, such as the newest complete checkpoints of other series.
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


def find_newest_checkpoint(
    root: TreePath,
    now: float | None = None,
    series: str | None = None,
    damaged_names: Mapping[str, str] | None = None,
    *,
    model: bool = True,
) -> Newest:
    """Find the newest complete checkpoint of a run.

    Abandoned checkpoints are only chosen if the run has no others. If the run has several series,
    the series that was written last is used. Lightning's ``last.ckpt`` is only chosen if its step
    is higher than the steps of all numbered checkpoints. Older checkpoints are not read, except
    those that were saved after a checkpoint with a higher step. *damaged_names* maps names of
    damaged checkpoints without missing files to reasons. For *model*, see :func:`read_run`.
    """
    root = resolve_source_path(root)
    checkpoints = [
        Checkpoint.from_entry(candidate)
        for candidate in list_entries(root)
        if series in (None, candidate.parsed_name.series)
    ]
    examiner = RunExaminer([candidate.entry for candidate in checkpoints], now, model=model)
    ordered_checkpoints = sorted(
        checkpoints, key=lambda candidate: (candidate.order, candidate.time), reverse=True
    )
    abandoned = find_abandoned_checkpoints(
        candidate for candidate in ordered_checkpoints if not candidate.entry.link
    )
    by_preference = sorted(ordered_checkpoints, key=lambda candidate: candidate.name in abandoned)
    complete, skipped = _find_complete_checkpoints(
        root, by_preference, examiner, damaged_names or {}
    )
    furthest = _select_furthest(complete)
    chosen = max(furthest, key=lambda candidate: candidate.entry.time)

    def is_later(candidate: Checkpoint) -> bool:
        return candidate.entry.time > chosen.entry.time

    skipped = [
        candidate
        for candidate in skipped
        if candidate.series == chosen.series or is_later(candidate)
    ]
    _require_skippable(skipped, chosen)
    others = (
        candidate
        for candidate in complete
        if candidate is not chosen and (candidate in furthest or is_later(candidate))
    )
    return Newest(
        chosen,
        tuple(skipped),
        # last.ckpt may be a second name of the chosen checkpoint.
        tuple(
            other
            for other in others
            if not is_lightning_last(other.name)
            or _read_saved_step(other) != _read_saved_step(chosen)
        ),
        tuple(_iterate_doubts(chosen, ordered_checkpoints, abandoned, examiner)),
    )


def _find_complete_checkpoints(
    root: TreePath,
    checkpoints: Sequence[Checkpoint],
    examiner: RunExaminer,
    damaged_names: Mapping[str, str],
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Find the first complete checkpoint of each series, or raise if there is none.

    Returns:
        The complete checkpoints, and those that were skipped before them.
    """
    complete: list[Checkpoint] = []
    skipped: list[Checkpoint] = []
    for candidate in checkpoints:
        name = candidate.name
        if any(candidate.series == other.series for other in complete):
            continue
        checkpoint = examiner.examine_checkpoint(candidate.entry)
        if name in damaged_names:
            checkpoint = replace(
                checkpoint, verdict=Verdict.DAMAGED, torn=True, problem=damaged_names[name]
            )
        (complete if checkpoint.complete else skipped).append(checkpoint)
    if complete:
        return complete, skipped
    _require_skippable(skipped)
    last = max(skipped, key=lambda skipped_checkpoint: skipped_checkpoint.entry.time)
    more = f" (and {len(skipped) - 1:,} more)" if len(skipped) > 1 else ""
    raise SourceNotFoundError(
        "no complete checkpoint found",
        where=str(root),
        why=f"{last.name}: {last.problem}{more}",
        hint=f"run {format_command('verify', last.path)} for details",
    )


def _iterate_doubts(
    chosen: Checkpoint,
    candidates: Sequence[Checkpoint],
    abandoned: Mapping[str, int],
    examiner: RunExaminer,
) -> Iterator[str]:
    """Yield reasons why *chosen* may not be the checkpoint that was saved last."""
    series_members = [
        member
        for member in candidates
        if member.series == chosen.series and member.entry.is_counted
    ]
    name = chosen.name
    for member in series_members:
        if member.record.error:
            yield (
                f"`{RUN_FILE}` of `{member.name}` cannot be read ({member.record.error.what}), "
                "so it is unknown which metrics it has and whether the run resumed from it"
            )
    higher = [
        member.name
        for member in series_members
        if member.name in abandoned and member.order > chosen.order
    ]
    if higher and name not in abandoned:
        yield (
            f"skipped {quote_names(higher)}, which has a higher step than `{name}`: the run "
            "resumed "
            f"from step {abandoned[higher[0]]} and saved `{name}` later"
        )
    resumed_unsaved = list_unsaved_resumes(
        {member.name: member.lineage for member in series_members}
    )
    if resumed_unsaved and name not in resumed_unsaved:
        yield (
            f"a run resumed from {quote_names(resumed_unsaved)} and has not saved since; "
            f"`{name}` is older, although its step is higher"
        )
    lower = (
        member
        for member in series_members
        if member.order < chosen.order and member.name not in abandoned
    )
    later = [
        member
        for member in lower
        if is_saved_before(chosen, member) and examiner.examine_checkpoint(member.entry).complete
    ]
    if later:
        last = max(later, key=lambda member: (member.lineage.save, member.entry.time))
        times = format_rfc3339(chosen.entry.time), format_rfc3339(last.entry.time)
        yield (
            f"`{name}` has the highest step, but `{last.name}` was saved later "
            f"({times[0]} and {times[1]}); the folder may contain two runs"
        )


def _select_furthest(candidates: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    """Drop ``last.ckpt``, or the numbered checkpoints if all of them are behind it."""
    last = next((candidate for candidate in candidates if is_lightning_last(candidate.name)), None)
    numbered = [
        candidate
        for candidate in candidates
        if candidate is not last and candidate.path.suffix == LIGHTNING_SUFFIX
    ]
    if last is None or not numbered:
        return candidates
    behind = [candidate for candidate in numbered if _read_saved_step(candidate) < last.step]
    return [
        candidate
        for candidate in candidates
        if candidate not in (behind if behind == numbered else [last])
    ]


def _read_saved_step(checkpoint: Checkpoint) -> int:
    """Return the step stored in the checkpoint, or the step in its name if none is stored."""
    recorded_step = read_recorded_step(checkpoint.path)
    return checkpoint.step if recorded_step is None else recorded_step


def _require_skippable(newer: Sequence[Checkpoint], chosen: Checkpoint | None = None) -> None:
    """Raise if a checkpoint newer than *chosen* may be complete.

    It may be complete unless its files show an incomplete write.
    """
    unexplained = next(
        (checkpoint for checkpoint in newer if not (checkpoint.torn or checkpoint.writing)), None
    )
    if unexplained:
        message = "cannot determine whether the newest checkpoint is complete"
        error: type[CkptError] = UnsupportedError
        if unexplained.read_failed:
            message, error = "the newest checkpoint cannot be read", StorageError
        elif unexplained.verdict is Verdict.DAMAGED:
            message, error = (
                "the newest checkpoint is damaged, but no file shows an incomplete write",
                DamagedError,
            )
        name = f", or use `{chosen.path}`, the newest complete one" if chosen else ""
        raise error(
            message,
            where=str(unexplained.path),
            why=unexplained.problem,
            hint=f"move this checkpoint away if it does not belong to the run{name} "
            f"(see {format_command('ls', unexplained.path.parent)})",
        )
