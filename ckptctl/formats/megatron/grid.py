"""The files of all ranks of one Megatron save, checked for missing and swapped files.

The numbers of the writing processes ascend in the order of the grid positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product, starmap
from typing import NamedTuple

from ckptctl.errors import DamagedError, FormatError, SourceNotFoundError, UnsupportedError
from ckptctl.formats.megatron.megatron_folder import (
    MODEL,
    LocalTensor,
    Numbers,
    RankState,
    rank_folders,
    read_state,
)
from ckptctl.formats.shared.findings import Faults, mixed_saves
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import prefetch_zips
from ckptctl.units import pluralize

MAX_RANKS = 1 << 17
_SIZES = (
    ("pipeline_model_parallel_size",),
    ("expert_model_parallel_size",),
    ("tensor_model_parallel_size", "model_parallel_size"),
)


class GridPosition(NamedTuple):
    """A rank's position, or the size of the grid, sorted in rank order.

    Attributes:
        pipeline: The pipeline stage.
        expert: The expert-parallel rank.
        tensor: The tensor-parallel rank.
    """

    pipeline: int
    expert: int
    tensor: int


def sizes_of(
    named: Mapping[Numbers, str], states: Mapping[Numbers, RankState], where: str
) -> GridPosition:
    """Return the size of the grid from the arguments, or else from the folder names."""
    said: dict[GridPosition, str] = {}
    for state in states.values():
        known = _said(state)
        if known is not None:
            said.setdefault(known, state.file)
    if len(said) > 1:
        (one, first), (other, second) = list(said.items())[:2]
        raise mixed_saves(
            where,
            f"`{first}` belongs to {_shown(one)} ranks, `{second}` to {_shown(other)}",
        )
    lengths = {len(key) for key in named}
    if said:
        sizes = next(iter(said))
        expected = 1 + (sizes.pipeline > 1) + (sizes.expert > 1)
        if lengths != {expected}:
            raise mixed_saves(
                where,
                f"the folder names of {_shown(sizes)} ranks contain {pluralize(expected, 'number')}",
            )
        return sizes
    return _sizes_of_names(named, where)


def _said(state: RankState) -> GridPosition | None:
    found = [
        next((value for name in names if (value := state.argument(name)) is not None), None)
        for names in _SIZES
    ]
    if found[2] is None:
        return None
    pipeline, expert, tensor = (1 if value is None else value for value in found)
    if min(pipeline, expert, tensor) < 1 or pipeline * expert * tensor > MAX_RANKS:
        raise UnsupportedError(
            "the arguments contain an invalid number of ranks",
            where=state.file,
            why=f"{pluralize(pipeline, 'pipeline stage')}, "
            f"{pluralize(expert, 'expert-parallel rank')}, "
            f"{pluralize(tensor, 'tensor-parallel rank')}",
        )
    return GridPosition(pipeline, expert, tensor)


def _sizes_of_names(named: Mapping[Numbers, str], where: str) -> GridPosition:
    length = len(next(iter(named)))
    if length == 2:
        raise FormatError(
            "the meaning of the second number in the folder names is not recorded",
            where=where,
            why="it is a pipeline stage or an expert-parallel rank; the files have no `args`, "
            "which would show this",
        )
    tops = [1 + max(key[position] for key in named) for position in range(length)]
    sizes = GridPosition(tops[1], tops[2], tops[0]) if length == 3 else GridPosition(1, 1, tops[0])
    if sizes.pipeline * sizes.expert * sizes.tensor > MAX_RANKS:
        raise mixed_saves(where, f"the folders are numbered up to {_shown(sizes)}")
    return sizes


def _file_of(place: GridPosition, sizes: GridPosition) -> str:
    """Return the file of a rank, relative to the save's folder."""
    pipeline = f"_{place.pipeline:03d}" if sizes.pipeline > 1 else ""
    expert = f"_{place.expert:03d}" if sizes.expert > 1 else ""
    return f"mp_rank_{place.tensor:02d}{pipeline}{expert}/{MODEL}"


def _shown(sizes: GridPosition) -> str:
    """Format grid sizes as tensor x pipeline x expert."""
    return f"{sizes.tensor} x {sizes.pipeline} x {sizes.expert} (tensor x pipeline x expert)"


class Grid(NamedTuple):
    """Content of all ranks' files of one save.

    Attributes:
        sizes: Number of ranks along each kind of parallelism.
        states: Readable states by position, in order.
        files: Files of all ranks by position, including unreadable ones.
    """

    sizes: GridPosition
    states: Mapping[GridPosition, RankState]
    files: Mapping[GridPosition, str]

    @property
    def first(self) -> RankState:
        """First readable state."""
        return next(iter(self.states.values()))

    def held(self, chunk: tuple[int, int], key: str) -> dict[GridPosition, LocalTensor | None]:
        """Return each rank's tensor called *key* in a pipeline stage, or None if it has none."""
        virtual, stage = chunk
        found: dict[GridPosition, LocalTensor | None] = {}
        for place in self.files:
            if place.pipeline == stage:
                state = self.states.get(place)
                found[place] = state.chunks[virtual].get(key) if state else None
        return found


def read_grid(files: SourceFiles, folder: str, faults: Faults) -> Grid:
    """Read the files of all ranks of one save."""
    where = str(files.root / folder)
    prefix = f"{folder}/" if folder else ""
    named = {
        key: f"{prefix}{name}/{MODEL}" for key, name in rank_folders(files.root, folder).items()
    }

    def read_file(name: str) -> RankState:
        try:
            return read_state(files, name)
        except SourceNotFoundError as error:
            raise DamagedError(
                f"`{name}` is missing",
                where=str(files.root / name),
                hint="copy the file from the node of its rank",
            ) from error

    loaded = (faults.read(name, read_file) for name in prefetch_zips(files, named.values()))
    read = dict(zip(named, loaded, strict=True))
    states = {key: state for key, state in read.items() if state is not None}
    if not states:
        raise DamagedError("none of the rank files can be read", where=where)
    sizes = sizes_of(named, states, where)
    placed: dict[GridPosition, tuple[str, RankState | None]] = {}
    for key, file in named.items():
        tensor, second, third = (*key, 0, 0)[:3]
        both = len(key) == 3 or sizes.pipeline > 1
        place = GridPosition(second, third, tensor) if both else GridPosition(third, second, tensor)
        placed[place] = file, read[key]
    for place in placed:
        if any(at >= size for at, size in zip(place, sizes, strict=True)):
            beyond = f"`{_file_of(place, sizes)}` belongs to another save"
            raise mixed_saves(where, f"the save has {_shown(sizes)} ranks, but {beyond}")
    grid = Grid(
        sizes,
        {place: state for place, (_, state) in sorted(placed.items()) if state is not None},
        {
            place: placed[place][0] if place in placed else prefix + _file_of(place, sizes)
            for place in starmap(GridPosition, product(*map(range, sizes)))
        },
    )
    order = list(grid.files)
    there = {number for number, place in enumerate(order) if place in placed}
    faults.require_ranks(there, range(len(order)), lambda number: grid.files[order[number]])
    _require_order(grid, where)
    return grid


def _require_order(grid: Grid, where: str) -> None:
    """Raise if files belong to two saves or are swapped."""
    first = grid.first
    for state in grid.states.values():
        if state.iteration != first.iteration:
            raise mixed_saves(
                where,
                f"`{first.file}` belongs to iteration {first.iteration}, "
                f"`{state.file}` to {state.iteration}",
            )
    found = ((state.argument("rank"), state.file) for state in grid.states.values())
    writers = [(rank, file) for rank, file in found if rank is not None]
    # Conversion tools write the same rank to all files.
    distinct = len({rank for rank, _ in writers}) == len(grid.states)
    for (before, one), (after, other) in pairwise(writers):
        if distinct and after < before:
            raise UnsupportedError(
                "the files of two ranks are swapped",
                where=where,
                why=f"process {before} wrote `{one}`, and process {after} wrote `{other}`",
                hint="restore the original names",
            )
