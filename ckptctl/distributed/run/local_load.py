"""Choice of the save from which a run with local disks resumes.

The ranks exchange the parts that they see of each save, and make the same decision. A save can be
loaded if every rank has its own part, if the run folder has a copy for ranks without their part, or
if every rank can read the parts of all. Other saves that are newer than the newest checkpoint in
the run folder are skipped with a message.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ckptctl.distributed.loading.load import load
from ckptctl.distributed.loading.owners import Owners
from ckptctl.distributed.loading.request import own_part
from ckptctl.distributed.run.fallback import attempt_load
from ckptctl.distributed.run.keeper import Keeper, Start
from ckptctl.distributed.run.local_folder import LocalFolder, LocalSave, number_of, read_identity
from ckptctl.distributed.state import State, state_of
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
from ckptctl.formats.dcp_rank_local import FORMAT, read_rank
from ckptctl.ranks.coordinator import Coordinator, format_ranks, on_first, telling
from ckptctl.runs.notes import read_run_record
from ckptctl.save_load.loading.load_options import LoadOptions, LoadReport
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

COPY_OF = "local"
"""Key of ``ckptctl.run.json``: name of the run's start whose local save was copied."""
UNREADABLE = tuple(
    kind.code
    for kind in (
        *(CoverageError, DamagedError, FormatError, MappingError, SourceNotFoundError),
        *(ChangedError, StorageError, UnsafePickleError, UnsupportedError),
    )
)
"""Codes of errors in a local part after which a copy or another save is loaded.

If the state itself does not match, the other one raises the same error.
"""
_METADATA = re.compile(r"__(\d+)\.metadata", re.ASCII)
_log = logging.getLogger("ckptctl")


class Look(NamedTuple):
    """Parts of a save that one rank can read."""

    lacks: str = ""  # why it cannot resume from its own part, empty if it can
    here: frozenset[int] = frozenset()  # ranks whose parts it sees
    world: int = 0  # number of ranks that saved, 0 if it sees no part
    union: bool = False  # whether it can resume from the parts of all ranks


class RootState(NamedTuple):
    """Checkpoint in the run folder to resume from, as seen by rank 0."""

    run: str
    start: Start | None
    copy_of: LocalSave | None  # the local save that *start* is a copy of


class LocalLoadResult(NamedTuple):
    """Result of a local load, with the loaded save, if any, and the skipped ones."""

    skipped: Mapping[str, str]
    save: LocalSave | None = None
    path: TreePath | None = None
    report: LoadReport | None = None


class Wants(NamedTuple):
    """State that a rank loads, and its options."""

    state: State
    options: LoadOptions


class Loadable(NamedTuple):
    """Local save that may be loaded."""

    save: LocalSave
    way: Way | None  # source for this rank, or None on all ranks if it cannot be loaded
    problem: str
    all_parts: bool  # whether each part can be read by some rank


class Way(NamedTuple):
    """Path that one rank loads, and whether it does so without the others."""

    path: TreePath
    alone: bool


def look_at_root(keeper: Keeper, step: int | None) -> RootState:
    """Find the checkpoint of *step*, or the newest one, in the run folder, on rank 0."""
    run = read_identity(keeper.root)
    try:
        start = keeper.newest(tell=False) if step is None else keeper.of_step(step)
    except SourceNotFoundError:  # no checkpoint is complete
        start = None
    name = read_run_record(start.entry).members.get(COPY_OF) if start else None
    number = number_of(name, run)
    copy_of = LocalSave(number, start.step, str(name)) if start and number else None
    return RootState(run, start, copy_of)


def load_local(
    ranks: Coordinator,
    folder: LocalFolder,
    keeper: Keeper,
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
        step: Step to load, or None for the newest.
        damaged_ok: Whether to skip a save that proves damaged during the load on any rank. The
            next one must then fill all of *state*, so this only applies with *strict*.

    Raises:
        SourceNotFoundError: The only saves are on local disks, and none can be loaded.
        CkptError: The load failed. It is raised on every rank.
    """
    how = {"checksum": True, **options}
    root = ranks.broadcast(on_first(ranks, partial(look_at_root, keeper, step)))
    fills_all = how.get("strict", True) in (True, "state")
    skippable = UNREADABLE if damaged_ok and fills_all else ()
    skipped: dict[str, str] = {}
    elsewhere: list[str] = []
    for one in _choices(ranks, folder, root, state, how, step):
        save, problem = one.save, one.problem
        if one.way:
            alone = {**how, "collectives": not one.way.alone}
            attempt = attempt_load(ranks, partial(load, state, one.way.path, **alone), skippable)
            if attempt.report:
                return LocalLoadResult(skipped, save, one.way.path, attempt.report)
            lines = (f"rank {rank}: {failure.line}" for rank, failure in attempt.failures.items())
            problem = "; ".join(lines)
        elif one.all_parts:
            elsewhere.append(save.name)
        if save != root.copy_of:
            skipped[save.name] = problem
        if ranks.rank == 0:
            _log.warning("skipped %s on local disks: %s", save.name, problem)
    if elsewhere and root.start is None:
        raise SourceNotFoundError(
            "the only saves are on local disks, and the ranks cannot resume from them",
            where=str(folder.path),
            why="; ".join(f"{name}: {skipped[name]}" for name in elsewhere),
            hint="start the same number of ranks, in the same order on the same machines; or "
            "remove these saves to start over",
        )
    return LocalLoadResult(skipped)


def newest_local(ranks: Coordinator, folder: LocalFolder, keeper: Keeper) -> LocalSave | None:
    """Find the save that :func:`load_local` would load into the saved state, or None."""
    root = ranks.broadcast(on_first(ranks, partial(look_at_root, keeper, None)))
    saves = _choices(ranks, folder, root)
    return next((one.save for one in saves if one.way), None)


def _choices(
    ranks: Coordinator,
    folder: LocalFolder,
    root: RootState,
    state: MutableMapping[str, Any] | None = None,
    how: Mapping[str, Any] = {},
    step: int | None = None,
) -> list[Loadable]:
    """List the saves at least as new as the run folder's, newest first, equal on all ranks."""
    if not root.run:
        return []

    def look() -> dict[LocalSave, Look]:
        saves = [one for one in folder.saves(root.run) if step in (None, one.step)]
        strange = folder.of_others(root.run)
        if strange:
            _log.warning(
                "%s: ignoring %s, which belongs to another run", folder.path, quote_names(strange)
            )
        wants = None
        if state is not None and saves:
            names = how.keys() & LoadOptions.__dataclass_fields__.keys()
            load_options = LoadOptions(**{name: how[name] for name in names})
            wants = Wants(state_of(Owners.of(state).plain(), on_meta=True), load_options)
        paths = {save: folder.path_of(save) for save in saves}
        return {save: _look(paths[save], ranks.rank, ranks.world, wants) for save in saves}

    looks = telling(ranks, lambda: (None, look()))[1]
    found: list[Loadable] = []
    for save in sorted({save for one in looks for save in one}, reverse=True):
        older = (
            save < root.copy_of
            if root.copy_of
            else root.start is not None and save.step <= root.start.step
        )
        if older:
            continue
        seen = [one.get(save, Look("it has no data of this save")) for one in looks]
        copy = root.start if save == root.copy_of else None
        way = _way(folder.path_of(save), seen, ranks.rank, copy)
        world = max(one.world for one in seen)
        reachable = frozenset().union(*(one.here for one in seen))
        all_parts = bool(world) and frozenset(range(world)) <= reachable
        found.append(Loadable(save, way, _lacking(seen), all_parts))
    return found


def _look(path: TreePath, rank: int, world: int, wants: Wants | None) -> Look:
    """Inspect this rank's part of a save, and those of other ranks in the same folder."""
    numbers = (_METADATA.fullmatch(item.name) for item in path.glob("__*.metadata"))
    here = frozenset(int(one[1]) for one in numbers if one)
    if not here:
        return Look("no rank has finished saving here")
    lacks, saved_by = "", 0
    try:
        first = read_rank(path, min(here))
        saved_by = first.world if first else 0
        if rank not in here:
            lacks = "it has no data of this save"
        elif saved_by != world:
            lacks = f"it was saved by {pluralize(saved_by, 'rank')}"
        elif wants and own_part(path, rank, *wants) is None:
            lacks = "the state is sharded differently, or has other names"
        if not lacks:
            return Look("", here, saved_by)
        union = here == frozenset(range(saved_by))
        if union:
            FORMAT.read(path)
    except CkptError as error:
        if error.code not in UNREADABLE:
            raise
        return Look(lacks or error.line, here, saved_by)
    return Look(lacks, here, saved_by, union)


def _way(path: TreePath, seen: Sequence[Look], rank: int, copy: Start | None) -> Way | None:
    """Choose the source from which this rank loads the save at *path*, or None."""
    whole = [not one.lacks for one in seen]
    if all(whole):
        return Way(path, alone=True)
    if copy:
        return Way(path if whole[rank] else copy.path, alone=True) if any(whole) else None
    return Way(path, alone=False) if all(one.union for one in seen) else None


def _lacking(seen: Sequence[Look]) -> str:
    """Describe which ranks cannot resume from their own part, and why."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(seen):
        if one.lacks:
            ranks.setdefault(one.lacks, []).append(rank)
    return "; ".join(f"{format_ranks(numbers)}: {why}" for why, numbers in ranks.items())
