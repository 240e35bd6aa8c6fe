"""From which save a run goes on that saves to local disks first: by what the ranks can prove.

Each rank says what it has of each save; all of them then decide alike. A save can be gone on from
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

from ckptctl.distributed.group import UnreachableError
from ckptctl.distributed.loading.load import load, own_part
from ckptctl.distributed.loading.owners import Owners
from ckptctl.distributed.run.keeper import Start
from ckptctl.distributed.run.local_folder import LocalFolder, LocalSave, number_of
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
from ckptctl.ops.loading.options import LoadOptions, LoadReport
from ckptctl.ops.ranks.coordinator import (
    Coordinator,
    RankError,
    format_ranks,
    on_first,
    sendable,
    telling,
)
from ckptctl.ops.runs.notes import run_record
from ckptctl.storage.tree import TreePath
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

    lacks: str = ""  # why it cannot go on from its own part; empty: it can
    here: frozenset[int] = frozenset()  # the ranks whose parts it sees
    world: int = 0  # how many ranks saved; 0: it sees no part
    union: bool = False  # whether it can go on from the parts of all ranks


class InRoot(NamedTuple):
    """What the root has to go on from, as rank 0 sees it."""

    run: str
    start: Start | None
    copy_of: LocalSave | None


class Went(NamedTuple):
    """A load from local disks, or none; and what was passed over before."""

    skipped: Mapping[str, str]
    save: LocalSave | None = None
    path: TreePath | None = None
    report: LoadReport | None = None


class Wants(NamedTuple):
    """What a rank wants, and how."""

    state: State
    options: LoadOptions


class Loadable(NamedTuple):
    """A save that may be gone on from."""

    save: LocalSave
    way: Way | None  # what this rank reads; None, on all ranks: it cannot be gone on from
    problem: str
    all_parts: bool  # whether each part is within reach of some rank


class Way(NamedTuple):
    """What one rank reads, and whether it does so by itself."""

    path: TreePath
    alone: bool


def in_root(run: str, start: Start | None) -> InRoot:
    """Say of which local save *start* is a copy."""
    name = run_record(start.entry).members.get(COPY_OF) if start else None
    number = number_of(name, run)
    copy_of = LocalSave(number, start.step, str(name)) if start and number else None
    return InRoot(run, start, copy_of)


def go_on(
    ranks: Coordinator,
    folder: LocalFolder,
    state: MutableMapping[str, Any],
    options: Mapping[str, Any],
    find: Callable[[], InRoot],
    step: int | None = None,
    *,
    damaged_ok: bool = True,
) -> Went:
    """Fill *state* from local disks, if something there is newer than what the root has, or as new.

    All ranks call it, and decide alike.

    Args:
        ranks: All of them.
        folder: This rank's.
        state: It is filled in place.
        options: Those of :func:`ckptctl.load`.
        find: Looks at the root, on rank 0.
        step: Of this step alone; None: the newest.
        damaged_ok: Whether to pass over, on all ranks, what proves damaged while it is read.
            Another save has to fill all of *state* then, which without *strict* it need not.
    """
    how = {"checksum": True, **options}
    there = ranks.broadcast(on_first(ranks, find))
    skipped: dict[str, str] = {}
    elsewhere: list[str] = []
    for one in _choices(ranks, folder, there, partial(_wants, state, how), step):
        save, problem = one.save, one.problem
        if one.way:
            fills_all = how.get("strict", True) in (True, "state")
            report, problem = _load(ranks, state, one.way, how, again=damaged_ok and fills_all)
            if report:
                return Went(skipped, save, one.way.path, report)
        elif one.all_parts:
            elsewhere.append(save.name)
        if save != there.copy_of:
            skipped[save.name] = problem
        if ranks.rank == 0:
            _log.warning("skipped %s on local disks: %s", save.name, problem)
    if elsewhere and there.start is None:
        raise SourceNotFoundError(
            "the only saves are on local disks, and the ranks cannot resume from them",
            where=str(folder.path),
            why="; ".join(f"{name}: {skipped[name]}" for name in elsewhere),
            hint="start the same number of ranks, in the same order on the same machines; or "
            "remove these saves to start over",
        )
    return Went(skipped)


def newest(ranks: Coordinator, folder: LocalFolder, find: Callable[[], InRoot]) -> LocalSave | None:
    """Return what :func:`go_on` would load into the state that was saved; None: nothing here."""
    there = ranks.broadcast(on_first(ranks, find))
    found = _choices(ranks, folder, there, None)
    return next((one.save for one in found if one.way), None)


def _choices(
    ranks: Coordinator,
    folder: LocalFolder,
    there: InRoot,
    wants: Callable[[], Wants] | None,
    step: int | None = None,
) -> list[Loadable]:
    """Return the saves that are as new as what the root has, the newest first; on all ranks."""
    if not there.run:
        return []

    def look() -> dict[LocalSave, Look]:
        saves = [one for one in folder.saves(there.run) if step in (None, one.step)]
        strange = folder.of_others(there.run)
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
        if _counts(save, there):
            seen = [one.get(save, Look("it has no data of this save")) for one in looks]
            copy = there.start if save == there.copy_of else None
            way = _way(folder.path_of(save), seen, ranks.rank, copy)
            found.append(Loadable(save, way, _lacking(seen), _all_parts(seen)))
    return found


def _wants(state: MutableMapping[str, Any], how: Mapping[str, Any]) -> Wants:
    names = how.keys() & LoadOptions.__dataclass_fields__.keys()
    options = LoadOptions(**{name: how[name] for name in names})
    return Wants(state_of(Owners.of(state).plain(), on_meta=True), options)


def _counts(save: LocalSave, there: InRoot) -> bool:
    """Return whether a save is as new as what the root has, or newer."""
    if there.copy_of:
        return save >= there.copy_of
    return there.start is None or save.step > there.start.step


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
    """Return what this rank reads of the save at *path*; None: it cannot be gone on from."""
    whole = [not one.lacks for one in seen]
    if all(whole):
        return Way(path, alone=True)
    if copy:
        return Way(path if whole[rank] else copy.path, alone=True) if any(whole) else None
    return Way(path, alone=False) if all(one.union for one in seen) else None


def _load(
    ranks: Coordinator,
    state: MutableMapping[str, Any],
    way: Way,
    how: Mapping[str, Any],
    *,
    again: bool,
) -> tuple[LoadReport | None, str]:
    """Load a save, or say why the next one is to be loaded, on all ranks alike.

    Raises:
        CkptError: It cannot be loaded, and another one is not tried: not *again*, or the call is
            what is wrong.
    """
    report: LoadReport | None = None
    error: BaseException | None = None
    try:
        report = load(state, way.path, **{**how, "collectives": not way.alone})
    except BaseException as failure:
        error = failure
    if isinstance(error, UnreachableError):
        raise error
    said = ranks.all_gather(sendable(error))
    failures = {rank: one for rank, one in enumerate(said) if one}
    if not failures:
        return report, ""
    if not again or any(one.code not in UNREADABLE for one in failures.values()):
        raise error or RankError(*next(iter(failures.items())))
    return None, "; ".join(f"rank {rank}: {one.line}" for rank, one in failures.items())


def _lacking(seen: Sequence[Look]) -> str:
    """Say which ranks cannot go on from their own part, and why."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(seen):
        if one.lacks:
            ranks.setdefault(one.lacks, []).append(rank)
    return "; ".join(f"{format_ranks(numbers)}: {why}" for why, numbers in ranks.items())


def _all_parts(seen: Sequence[Look]) -> bool:
    """Return whether every part of a save is within reach of some rank."""
    world = max(one.world for one in seen)
    return bool(world) and frozenset(range(world)) <= frozenset().union(*(one.here for one in seen))
