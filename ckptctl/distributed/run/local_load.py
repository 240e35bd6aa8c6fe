"""From which save a run resumes that saves to local disks first: by what the ranks can prove.

Each rank says what it has of each save; all of them then decide alike. A save can be resumed from
if every rank has its own part, or the root has a copy, which those read who have lost their part,
or if every rank can reach the parts of all. What was saved later than the newest of the root and
fits none of this is passed over by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
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
    listed,
)
from ckptctl.formats.dcp_rank_local import FORMAT, read_rank
from ckptctl.ranks.coordinator import Coordinator, format_ranks, on_first, telling
from ckptctl.runs.notes import run_record
from ckptctl.save_load.loading.load_options import LoadOptions, LoadReport
from ckptctl.tree import TreePath
from ckptctl.units import counted

COPY_OF = "local"
"""A key of ``ckptctl.run.json``: the start of the run whose save this is the copy of."""
UNREADABLE = tuple(
    kind.code
    for kind in (
        *(CoverageError, DamagedError, FormatError, MappingError, SourceNotFoundError),
        *(ChangedError, StorageError, UnsafePickleError, UnsupportedError),
    )
)
"""Codes of errors of a part on a local disk for which a copy or another save is loaded.

Where the state is what does not fit, that does not fit either, and says so.
"""
_METADATA = re.compile(r"__(\d+)\.metadata", re.ASCII)
_log = logging.getLogger("ckptctl")


class Look(NamedTuple):
    """What one rank has of a save."""

    lacks: str = ""  # why it cannot resume from its own part; empty: it can
    here: frozenset[int] = frozenset()  # the ranks whose parts it sees
    world: int = 0  # how many ranks saved; 0: it sees no part
    union: bool = False  # whether it can resume from the parts of all ranks


class RootState(NamedTuple):
    """What the root has to resume from, as rank 0 sees it."""

    run: str
    start: Start | None
    copy_of: LocalSave | None  # the local save that *start* is a copy of


class LocalLoadResult(NamedTuple):
    """Result of a local load: the save loaded, if any, and those skipped."""

    skipped: Mapping[str, str]
    save: LocalSave | None = None
    path: TreePath | None = None
    report: LoadReport | None = None


class Wants(NamedTuple):
    """What a rank wants, and how."""

    state: State
    options: LoadOptions


class Loadable(NamedTuple):
    """A save that may be resumed from."""

    save: LocalSave
    way: Way | None  # what this rank reads; None, on all ranks: it cannot be resumed from
    problem: str
    all_parts: bool  # whether each part is within reach of some rank


class Way(NamedTuple):
    """What one rank reads, and whether it does so by itself."""

    path: TreePath
    alone: bool


def look_at_root(keeper: Keeper, step: int | None) -> RootState:
    """Look at the root, on rank 0: at the checkpoint of *step*, or at the newest."""
    run = read_identity(keeper.root)
    try:
        start = keeper.newest(tell=False) if step is None else keeper.of_step(step)
    except SourceNotFoundError:  # none there is complete
        start = None
    name = run_record(start.entry).members.get(COPY_OF) if start else None
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
    """Fill *state* from local disks, if something there is newer than what the root has, or as new.

    All ranks call it, and decide alike.

    Args:
        ranks: All of them.
        folder: This rank's.
        keeper: Of the root.
        state: It is filled in place.
        options: Those of :func:`ckptctl.load`.
        step: Of this step alone; None: the newest.
        damaged_ok: Whether to pass over, on all ranks, what proves damaged while it is read.
            Another save has to fill all of *state* then, which without *strict* it need not.
    """
    how = {"checksum": True, **options}
    root = ranks.broadcast(on_first(ranks, partial(look_at_root, keeper, step)))
    fills_all = how.get("strict", True) in (True, "state")
    skippable = UNREADABLE if damaged_ok and fills_all else ()
    skipped: dict[str, str] = {}
    elsewhere: list[str] = []

    def wants() -> Wants:
        names = how.keys() & LoadOptions.__dataclass_fields__.keys()
        load_options = LoadOptions(**{name: how[name] for name in names})
        return Wants(state_of(Owners.of(state).plain(), on_meta=True), load_options)

    for one in _choices(ranks, folder, root, wants, step):
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
    """Return what :func:`load_local` would load into the state that was saved, if anything."""
    root = ranks.broadcast(on_first(ranks, partial(look_at_root, keeper, None)))
    saves = _choices(ranks, folder, root, None)
    return next((one.save for one in saves if one.way), None)


def _choices(
    ranks: Coordinator,
    folder: LocalFolder,
    root: RootState,
    wants: Callable[[], Wants] | None,
    step: int | None = None,
) -> list[Loadable]:
    """Return the saves that are as new as what the root has, the newest first; on all ranks."""
    if not root.run:
        return []

    def look() -> dict[LocalSave, Look]:
        saves = [one for one in folder.saves(root.run) if step in (None, one.step)]
        strange = folder.of_others(root.run)
        if strange:
            _log.warning(
                "%s: ignoring %s, which belongs to another run", folder.path, listed(strange)
            )
        wanted = wants() if wants and saves else None
        paths = {save: folder.path_of(save) for save in saves}
        return {save: _look(paths[save], ranks.rank, ranks.world, wanted) for save in saves}

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
    """Look at this rank's part of a save, and at those of others that lie beside it."""
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
            lacks = f"it was saved by {counted(saved_by, 'rank')}"
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
    """Return what this rank reads of the save at *path*; None: it cannot be resumed from."""
    whole = [not one.lacks for one in seen]
    if all(whole):
        return Way(path, alone=True)
    if copy:
        return Way(path if whole[rank] else copy.path, alone=True) if any(whole) else None
    return Way(path, alone=False) if all(one.union for one in seen) else None


def _lacking(seen: Sequence[Look]) -> str:
    """Say which ranks cannot resume from their own part, and why."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(seen):
        if one.lacks:
            ranks.setdefault(one.lacks, []).append(rank)
    return "; ".join(f"{format_ranks(numbers)}: {why}" for why, numbers in ranks.items())
