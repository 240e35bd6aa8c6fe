"""The files of all ranks of one Megatron save: each is there, and where it belongs.

The numbers of the processes that wrote them rise as the places do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckptctl.errors import DamagedError, FormatError, SourceNotFoundError, UnsupportedError
from ckptctl.formats.base import absent
from ckptctl.formats.megatron.files import MODEL, mixed, rank_folders
from ckptctl.formats.megatron.places import (
    Place,
    all_places,
    file_of,
    place_of,
    shown,
    sizes_of,
)
from ckptctl.formats.megatron.state import Local, RankState, read_state
from ckptctl.formats.shared.faults import UNUSABLE, Faults
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import zips_ahead


class Grid(NamedTuple):
    """What the ranks of one save wrote.

    Attributes:
        sizes: Ranks along each kind of parallelism.
        states: Those that could be read, by place and in order.
        files: The files of all ranks by place, also of those that could not be read.
    """

    sizes: Place
    states: Mapping[Place, RankState]
    files: Mapping[Place, str]

    @property
    def first(self) -> RankState:
        """Return the first state that could be read."""
        return next(iter(self.states.values()))

    def held(self, chunk: tuple[int, int], key: str) -> dict[Place, Local | None]:
        """Return what each rank of a pipeline stage has under a name; None: its file is lost.

        Args:
            chunk: The virtual and the pipeline stage.
            key: The name there.
        """
        virtual, stage = chunk
        found: dict[Place, Local | None] = {}
        for place in self.files:
            if place.pipeline == stage:
                state = self.states.get(place)
                found[place] = state.chunks[virtual].get(key) if state else None
        return found


def read_grid(files: SourceFiles, folder: str, faults: Faults | None) -> Grid:
    """Return what all ranks of one save wrote.

    Args:
        files: The checkpoint's files.
        folder: The save's folder.
        faults: Takes what is missing or unreadable; None: that is an error.

    Raises:
        DamagedError: Files are missing or damaged, or are not those of one save.
        FormatError: There is nothing to read, or what names mean is not recorded.
    """
    where = str(files.root / folder)
    prefix = f"{folder}/" if folder else ""
    named = {
        key: f"{prefix}{name}/{MODEL}" for key, name in rank_folders(files.root, folder).items()
    }
    loaded = (_state(files, name, faults) for name in zips_ahead(files, named.values()))
    read = dict(zip(named, loaded, strict=True))
    states = {key: state for key, state in read.items() if state is not None}
    if not states:
        raise DamagedError("no file of any rank can be read", where=where)
    sizes = sizes_of(named, states, where)
    placed = {place_of(key, sizes): (named[key], read[key]) for key in named}
    _require_within(placed, sizes, where)
    grid = Grid(
        sizes,
        {place: state for place, (_, state) in sorted(placed.items()) if state is not None},
        {
            place: placed[place][0] if place in placed else prefix + file_of(place, sizes)
            for place in all_places(sizes)
        },
    )
    _require_all(placed, grid, faults, where)
    _require_order(grid, where)
    return grid


def _state(files: SourceFiles, name: str, faults: Faults | None) -> RankState | None:
    try:
        return read_state(files, name)
    except (*UNUSABLE, FormatError) as error:
        if faults is None and isinstance(error, SourceNotFoundError):
            raise DamagedError(
                f"`{name}` is missing", where=str(files.root / name), hint="every rank writes one"
            ) from error
        if faults is None:
            raise
        faults.unreadable(name, error)
        return None


def _require_within(placed: Mapping[Place, object], sizes: Place, where: str) -> None:
    beyond = [p for p in placed if any(at >= size for at, size in zip(p, sizes, strict=True))]
    if beyond:
        raise mixed(
            where, f"{shown(sizes)} ranks saved this, `{file_of(beyond[0], sizes)}` is of another"
        )


def _require_all(
    placed: Mapping[Place, object], grid: Grid, faults: Faults | None, where: str
) -> None:
    order = list(grid.files)
    there = {number for number, place in enumerate(order) if place in placed}
    if faults is not None:
        for number in range(len(order)):
            if number not in there:
                faults.missing(grid.files[order[number]], f"{shown(grid.sizes)} ranks saved this")
        return
    count, names = absent(there, 0, len(order) - 1, lambda number: grid.files[order[number]])
    if count:
        raise DamagedError(
            f"{count:,} of {len(order):,} ranks' files are missing",
            where=where,
            why=names,
            hint="every rank writes its own file; copy them from the nodes they are on",
        )


def _require_order(grid: Grid, where: str) -> None:
    """Refuse files of two saves, and files that have changed places."""
    first = grid.first
    for state in grid.states.values():
        if state.iteration != first.iteration:
            raise mixed(
                where,
                f"`{first.file}` is of iteration {first.iteration}, "
                f"`{state.file}` of {state.iteration}",
            )
    writers = [(state.argument("rank"), state.file) for state in grid.states.values()]
    ranks = [rank for rank, _ in writers if rank is not None]
    if len(set(ranks)) == len(writers):  # tools that convert checkpoints write one rank into all
        _require_rising([(rank, file) for rank, file in writers if rank is not None], where)


def _require_rising(writers: Sequence[tuple[int, str]], where: str) -> None:
    for (before, one), (after, other) in pairwise(writers):
        if after < before:
            raise UnsupportedError(
                "files of two ranks have changed places",
                where=where,
                why=f"process {before} wrote `{one}`, process {after} `{other}`",
                hint="restore the original names",
            )
