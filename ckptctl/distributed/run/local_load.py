"""Choice of the save from which a run that saves to local disks resumes.

The part of a rank consists of the files that this rank saved. The ranks exchange which parts of
each save they can read, and all make the same decision. A save can be loaded if every rank can read
its own part, if the run folder has a copy for ranks that cannot, or if every rank can read the
parts of all ranks. Other saves that are newer than the newest checkpoint in the run folder are
skipped with a message.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ckptctl.distributed.loading.load import load
from ckptctl.distributed.loading.owners import StateOwners
from ckptctl.distributed.loading.request import open_rank_local_part
from ckptctl.distributed.run.fallback import attempt_load
from ckptctl.distributed.run.keeper import ResumePoint, RunCheckpoints
from ckptctl.distributed.run.local_folder import (
    LocalFolder,
    LocalSave,
    parse_launch_number,
    read_run_id,
)
from ckptctl.distributed.state import FlatState, flatten_state
from ckptctl.errors import (
    ChangedError,
    CkptError,
    CoverageError,
    DamagedError,
    FormatError,
    MappingError,
    SourceNotFoundError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
    quote_names,
)
from ckptctl.formats.dcp_rank_local import FORMAT, read_rank_catalog
from ckptctl.ranks.coordinator import (
    RankCollectives,
    format_ranks,
    run_and_all_gather,
    run_on_rank_zero,
)
from ckptctl.runs.notes import read_run_record
from ckptctl.save_load.loading.load_options import LoadOptions, LoadReport
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

COPY_OF_KEY = "local"
"""Key in ``ckptctl.run.json`` of a checkpoint that was copied from a local save.

Its value is the folder name of the launch that wrote the local save.
"""
UNREADABLE_CODES = tuple(
    kind.code
    for kind in (
        *(CoverageError, DamagedError, FormatError, MappingError, SourceNotFoundError),
        *(ChangedError, StorageError, UnsafePickleError, UnsupportedError),
    )
)
"""Codes of errors in a rank's local files, after which a copy or another save is loaded.

If the state does not match, loading the copy or the other save raises the same error.
"""
_METADATA = re.compile(r"__(\d+)\.metadata", re.ASCII)
_log = logging.getLogger("ckptctl")


class RankAvailability(NamedTuple):
    """Information on which ranks' files of a save one rank can read."""

    problem: str = ""  # why this rank cannot resume from its own part, or empty
    visible_ranks: frozenset[int] = frozenset()  # ranks whose parts this rank sees
    world: int = 0  # number of ranks that saved, 0 if this rank sees no part
    is_mergeable: bool = False  # whether this rank can resume from the parts of all ranks


class RootCheckpoint(NamedTuple):
    """Run ID, and the checkpoint in the run folder from which rank 0 would resume."""

    run: str
    resume_point: ResumePoint | None
    copy_of: LocalSave | None  # the local save that *start* is a copy of


class LocalLoadResult(NamedTuple):
    """Result of a load from local disks.

    It contains the names of skipped saves with reasons, and the loaded save or None.
    """

    skipped: Mapping[str, str]
    save: LocalSave | None = None
    path: TreePath | None = None
    report: LoadReport | None = None


class RequestedState(NamedTuple):
    """State that a rank loads, and the options of the load."""

    state: FlatState
    options: LoadOptions


class LocalCandidate(NamedTuple):
    """Local save that is new enough to be loaded, and whether it can be loaded."""

    save: LocalSave
    source: LoadSource | None  # source for this rank, or None on all ranks if it cannot be loaded
    problem: str
    has_all_parts: bool  # whether each part can be read by some rank


class LoadSource(NamedTuple):
    """Path that one rank loads, and whether the rank loads it without collectives."""

    path: TreePath
    is_rank_local: bool


def inspect_root(keeper: RunCheckpoints, step: int | None) -> RootCheckpoint:
    """Find the checkpoint of *step* in the run folder, or the newest one if *step* is None.

    Only rank 0 calls this function.
    """
    run = read_run_id(keeper.root)
    try:
        start = keeper.find_newest(log_warnings=False) if step is None else keeper.find_step(step)
    except SourceNotFoundError:  # no checkpoint is complete
        start = None
    name = read_run_record(start.entry).members.get(COPY_OF_KEY) if start else None
    number = parse_launch_number(name, run)
    copy_of = LocalSave(number, start.step, str(name)) if start and number else None
    return RootCheckpoint(run, start, copy_of)


def load_from_local_disks(
    ranks: RankCollectives,
    folder: LocalFolder,
    keeper: RunCheckpoints,
    state: MutableMapping[str, Any],
    options: Mapping[str, Any],
    step: int | None = None,
    *,
    damaged_ok: bool = True,
) -> LocalLoadResult:
    """Load *state* from local disks if they have a save at least as new as the run folder.

    All ranks call it, and make the same decision.

    Args:
        ranks: All ranks of the run.
        folder: Local folder of this rank.
        keeper: Checkpoints in the run folder.
        state: State to fill in place.
        options: Options of :func:`ckptctl.load`.
        step: Step to load, or None for the newest step.
        damaged_ok: Whether to skip a save that proves damaged during the load on any rank. The
            next one must then fill all of *state*, so this only applies with *strict*.

    Raises:
        SourceNotFoundError: The only saves are on local disks, and none can be loaded.
        CkptError: The load failed. It is raised on every rank.
    """
    merged_options = {"checksum": True, **options}
    root = ranks.broadcast(run_on_rank_zero(ranks, partial(inspect_root, keeper, step)))
    fills_all = merged_options.get("strict", True) in (True, "state")
    skippable = UNREADABLE_CODES if damaged_ok and fills_all else ()
    skipped: dict[str, str] = {}
    newer_local_saves: list[str] = []
    for candidate in _list_candidates(ranks, folder, root, state, merged_options, step):
        save, problem = candidate.save, candidate.problem
        if candidate.source:
            call_options = {**merged_options, "collectives": not candidate.source.is_rank_local}
            attempt = attempt_load(
                ranks, partial(load, state, candidate.source.path, **call_options), skippable
            )
            if attempt.report:
                return LocalLoadResult(skipped, save, candidate.source.path, attempt.report)
            lines = (f"rank {rank}: {failure.line}" for rank, failure in attempt.failures.items())
            problem = "; ".join(lines)
        elif candidate.has_all_parts:
            newer_local_saves.append(save.name)
        if save != root.copy_of:
            skipped[save.name] = problem
        if ranks.rank == 0:
            _log.warning("skipped %s on local disks: %s", save.name, problem)
    if newer_local_saves and root.resume_point is None:
        raise SourceNotFoundError(
            "the only saves are on local disks, and the ranks cannot resume from them",
            where=str(folder.path),
            why="; ".join(f"{name}: {skipped[name]}" for name in newer_local_saves),
            hint="start the same number of ranks, in the same order on the same machines; or "
            "remove these saves to start over",
        )
    return LocalLoadResult(skipped)


def find_newest_local(
    ranks: RankCollectives, folder: LocalFolder, keeper: RunCheckpoints
) -> LocalSave | None:
    """Find the local save that :func:`load_from_local_disks` would load, or return None."""
    root = ranks.broadcast(run_on_rank_zero(ranks, partial(inspect_root, keeper, None)))
    saves = _list_candidates(ranks, folder, root)
    return next((candidate.save for candidate in saves if candidate.source), None)


def _list_candidates(
    ranks: RankCollectives,
    folder: LocalFolder,
    root: RootCheckpoint,
    state: MutableMapping[str, Any] | None = None,
    options: Mapping[str, Any] = {},
    step: int | None = None,
) -> list[LocalCandidate]:
    """List local saves that are at least as new as the run folder's checkpoint, newest first."""
    if not root.run:
        return []

    def inspect_saves() -> dict[LocalSave, RankAvailability]:
        saves = [entry for entry in folder.list_saves(root.run) if step in (None, entry.step)]
        other_runs = folder.list_launches_of_other_runs(root.run)
        if other_runs:
            _log.warning(
                "%s: ignoring %s, which belongs to another run",
                folder.path,
                quote_names(other_runs),
            )
        requested_state = None
        if state is not None and saves:
            names = options.keys() & LoadOptions.__dataclass_fields__.keys()
            load_options = LoadOptions(**{name: options[name] for name in names})
            requested_state = RequestedState(
                flatten_state(StateOwners.from_target(state).build_state_dict(), on_meta=True),
                load_options,
            )
        paths = {save: folder.build_path(save) for save in saves}
        return {
            save: _inspect_rank_parts(paths[save], ranks.rank, ranks.world, requested_state)
            for save in saves
        }

    availabilities_by_rank = run_and_all_gather(ranks, lambda: (None, inspect_saves()))[1]
    candidates: list[LocalCandidate] = []
    for save in sorted({save for entry in availabilities_by_rank for save in entry}, reverse=True):
        is_older = (
            save < root.copy_of
            if root.copy_of
            else root.resume_point is not None and save.step <= root.resume_point.step
        )
        if is_older:
            continue
        availabilities = [
            entry.get(save, RankAvailability("it has no data of this save"))
            for entry in availabilities_by_rank
        ]
        copy = root.resume_point if save == root.copy_of else None
        source = _choose_source(folder.build_path(save), availabilities, ranks.rank, copy)
        world = max(entry.world for entry in availabilities)
        reachable_ranks = frozenset().union(*(entry.visible_ranks for entry in availabilities))
        all_parts = bool(world) and frozenset(range(world)) <= reachable_ranks
        candidates.append(
            LocalCandidate(save, source, _describe_missing_parts(availabilities), all_parts)
        )
    return candidates


def _inspect_rank_parts(
    path: TreePath, rank: int, world: int, wanted: RequestedState | None
) -> RankAvailability:
    """Find out which ranks' files of the save at *path* this rank can read and resume from."""
    numbers = (_METADATA.fullmatch(item.name) for item in path.glob("__*.metadata"))
    visible_ranks = frozenset(int(match[1]) for match in numbers if match)
    if not visible_ranks:
        return RankAvailability("no rank has finished saving here")
    problem, saved_world = "", 0
    try:
        first = read_rank_catalog(path, min(visible_ranks))
        saved_world = first.world if first else 0
        if rank not in visible_ranks:
            problem = "it has no data of this save"
        elif saved_world != world:
            problem = f"it was saved by {pluralize(saved_world, 'rank')}"
        elif wanted and open_rank_local_part(path, rank, *wanted) is None:
            problem = "the state is sharded differently, or has other names"
        if not problem:
            return RankAvailability("", visible_ranks, saved_world)
        is_mergeable = visible_ranks == frozenset(range(saved_world))
        if is_mergeable:
            FORMAT.read(path)
    except CkptError as error:
        if error.code not in UNREADABLE_CODES:
            raise
        return RankAvailability(problem or error.line, visible_ranks, saved_world)
    return RankAvailability(problem, visible_ranks, saved_world, is_mergeable)


def _choose_source(
    path: TreePath, availabilities: Sequence[RankAvailability], rank: int, copy: ResumePoint | None
) -> LoadSource | None:
    """Choose the path from which this rank loads a save.

    Return None on all ranks if the save cannot be loaded. *copy* is a copy of the save in the run
    folder, or None.
    """
    has_own_part = [not availability.problem for availability in availabilities]
    if all(has_own_part):
        return LoadSource(path, is_rank_local=True)
    if copy:
        return (
            LoadSource(path if has_own_part[rank] else copy.path, is_rank_local=True)
            if any(has_own_part)
            else None
        )
    return (
        LoadSource(path, is_rank_local=False)
        if all(availability.is_mergeable for availability in availabilities)
        else None
    )


def _describe_missing_parts(availabilities: Sequence[RankAvailability]) -> str:
    """Describe which ranks cannot resume from the files that they saved, and why."""
    ranks: dict[str, list[int]] = {}
    for rank, availability in enumerate(availabilities):
        if availability.problem:
            ranks.setdefault(availability.problem, []).append(rank)
    return "; ".join(f"{format_ranks(numbers)}: {why}" for why, numbers in ranks.items())
