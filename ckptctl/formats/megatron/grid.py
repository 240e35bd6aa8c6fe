"""Read the files of all ranks of one Megatron save, and detect missing and swapped files.

The recorded process ranks must ascend in the order of the grid positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product, starmap
from typing import NamedTuple

from ckptctl.errors import DamagedError, FormatError, SourceNotFoundError, UnsupportedError
from ckptctl.formats.megatron.megatron_folder import (
    MODEL_FILE,
    FolderNumbers,
    LocalTensor,
    RankState,
    list_rank_folders,
    read_rank_state,
)
from ckptctl.formats.shared.findings import FaultCollector, mixed_saves_error
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import prefetch_zips
from ckptctl.units import pluralize

MAX_RANKS = 1 << 17
_SIZE_ARGUMENTS = (
    ("pipeline_model_parallel_size",),
    ("expert_model_parallel_size",),
    ("tensor_model_parallel_size", "model_parallel_size"),
)


class GridPosition(NamedTuple):
    """Position of a rank in the grid, or number of ranks along each axis of the grid.

    Positions sort in rank order.

    Attributes:
        pipeline: Pipeline stage, or number of pipeline stages.
        expert: Expert-parallel rank or size.
        tensor: Tensor-parallel rank or size.
    """

    pipeline: int
    expert: int
    tensor: int


def determine_grid_sizes(
    files_by_numbers: Mapping[FolderNumbers, str],
    states: Mapping[FolderNumbers, RankState],
    where: str,
) -> GridPosition:
    """Return the grid size from the recorded arguments, or from folder names without arguments."""
    files_by_size: dict[GridPosition, str] = {}
    for state in states.values():
        state_sizes = _read_sizes(state)
        if state_sizes is not None:
            files_by_size.setdefault(state_sizes, state.file)
    if len(files_by_size) > 1:
        (first_sizes, first), (second_sizes, second) = list(files_by_size.items())[:2]
        raise mixed_saves_error(
            where,
            f"`{first}` belongs to {_format_sizes(first_sizes)} ranks, `{second}` to "
            f"{_format_sizes(second_sizes)}",
        )
    lengths = {len(key) for key in files_by_numbers}
    if files_by_size:
        sizes = next(iter(files_by_size))
        expected = 1 + (sizes.pipeline > 1) + (sizes.expert > 1)
        if lengths != {expected}:
            raise mixed_saves_error(
                where,
                f"the folder names of {_format_sizes(sizes)} ranks contain "
                f"{pluralize(expected, 'number')}",
            )
        return sizes
    return _infer_sizes(files_by_numbers, where)


def _read_sizes(state: RankState) -> GridPosition | None:
    values = [
        next((value for name in names if (value := state.find_argument(name)) is not None), None)
        for names in _SIZE_ARGUMENTS
    ]
    if values[2] is None:
        return None
    pipeline, expert, tensor = (1 if value is None else value for value in values)
    if min(pipeline, expert, tensor) < 1 or pipeline * expert * tensor > MAX_RANKS:
        raise UnsupportedError(
            "the arguments contain an invalid number of ranks",
            where=state.file,
            why=f"{pluralize(pipeline, 'pipeline stage')}, "
            f"{pluralize(expert, 'expert-parallel rank')}, "
            f"{pluralize(tensor, 'tensor-parallel rank')}",
        )
    return GridPosition(pipeline, expert, tensor)


def _infer_sizes(files_by_numbers: Mapping[FolderNumbers, str], where: str) -> GridPosition:
    length = len(next(iter(files_by_numbers)))
    if length == 2:
        raise FormatError(
            "the meaning of the second number in the folder names is not recorded",
            where=where,
            why="it is a pipeline stage or an expert-parallel rank; the files have no `args`, "
            "which would show this",
        )
    maxima = [1 + max(key[position] for key in files_by_numbers) for position in range(length)]
    sizes = (
        GridPosition(maxima[1], maxima[2], maxima[0])
        if length == 3
        else GridPosition(1, 1, maxima[0])
    )
    if sizes.pipeline * sizes.expert * sizes.tensor > MAX_RANKS:
        raise mixed_saves_error(where, f"the folders are numbered up to {_format_sizes(sizes)}")
    return sizes


def _format_file_name(place: GridPosition, sizes: GridPosition) -> str:
    """Return the path of the file of the rank at *place*, relative to the save's folder."""
    pipeline = f"_{place.pipeline:03d}" if sizes.pipeline > 1 else ""
    expert = f"_{place.expert:03d}" if sizes.expert > 1 else ""
    return f"mp_rank_{place.tensor:02d}{pipeline}{expert}/{MODEL_FILE}"


def _format_sizes(sizes: GridPosition) -> str:
    """Format grid sizes as tensor x pipeline x expert."""
    return f"{sizes.tensor} x {sizes.pipeline} x {sizes.expert} (tensor x pipeline x expert)"


class Grid(NamedTuple):
    """Files of all ranks of one save, and their contents.

    Attributes:
        sizes: Number of ranks along each kind of parallelism.
        states: Contents of the readable files by position, in rank order.
        files: Paths of all files by position, including missing and unreadable files.
    """

    sizes: GridPosition
    states: Mapping[GridPosition, RankState]
    files: Mapping[GridPosition, str]

    @property
    def first_state(self) -> RankState:
        """Content of the first readable file in rank order."""
        return next(iter(self.states.values()))

    def get_tensors_by_position(
        self, chunk: tuple[int, int], key: str
    ) -> dict[GridPosition, LocalTensor | None]:
        """Return the tensor *key* of each rank of a pipeline stage, or None for ranks without it.

        *chunk* is ``(virtual stage, pipeline stage)``.
        """
        virtual, stage = chunk
        tensors: dict[GridPosition, LocalTensor | None] = {}
        for place in self.files:
            if place.pipeline == stage:
                state = self.states.get(place)
                tensors[place] = state.model_chunks[virtual].get(key) if state else None
        return tensors


def read_grid(files: SourceFiles, folder: str, faults: FaultCollector) -> Grid:
    """Read the files of all ranks of the save in *folder*.

    Raises if files belong to different saves, or if one is unusable and the read is not partial.
    """
    where = str(files.root / folder)
    prefix = f"{folder}/" if folder else ""
    files_by_numbers = {
        key: f"{prefix}{name}/{MODEL_FILE}"
        for key, name in list_rank_folders(files.root, folder).items()
    }

    def read_file(name: str) -> RankState:
        try:
            return read_rank_state(files, name)
        except SourceNotFoundError as error:
            raise DamagedError(
                f"`{name}` is missing",
                where=str(files.root / name),
                hint="copy the file from the node of its rank",
            ) from error

    loaded = (
        faults.try_read(name, read_file) for name in prefetch_zips(files, files_by_numbers.values())
    )
    states_by_numbers = dict(zip(files_by_numbers, loaded, strict=True))
    states = {key: state for key, state in states_by_numbers.items() if state is not None}
    if not states:
        raise DamagedError("none of the rank files can be read", where=where)
    sizes = determine_grid_sizes(files_by_numbers, states, where)
    placed: dict[GridPosition, tuple[str, RankState | None]] = {}
    for key, file in files_by_numbers.items():
        tensor, second, third = (*key, 0, 0)[:3]
        both = len(key) == 3 or sizes.pipeline > 1
        place = GridPosition(second, third, tensor) if both else GridPosition(third, second, tensor)
        placed[place] = file, states_by_numbers[key]
    for place in placed:
        if any(coordinate >= size for coordinate, size in zip(place, sizes, strict=True)):
            message = f"`{_format_file_name(place, sizes)}` belongs to another save"
            raise mixed_saves_error(
                where, f"the save has {_format_sizes(sizes)} ranks, but {message}"
            )
    grid = Grid(
        sizes,
        {place: state for place, (_, state) in sorted(placed.items()) if state is not None},
        {
            place: placed[place][0] if place in placed else prefix + _format_file_name(place, sizes)
            for place in starmap(GridPosition, product(*map(range, sizes)))
        },
    )
    order = list(grid.files)
    present = {number for number, place in enumerate(order) if place in placed}
    faults.require_rank_files(present, range(len(order)), lambda number: grid.files[order[number]])
    _require_rank_order(grid, where)
    return grid


def _require_rank_order(grid: Grid, where: str) -> None:
    """Raise if files belong to two saves, or if the files of two ranks are swapped."""
    first = grid.first_state
    for state in grid.states.values():
        if state.iteration != first.iteration:
            raise mixed_saves_error(
                where,
                f"`{first.file}` belongs to iteration {first.iteration}, "
                f"`{state.file}` to {state.iteration}",
            )
    writer_ranks = ((state.find_argument("rank"), state.file) for state in grid.states.values())
    writers = [(rank, file) for rank, file in writer_ranks if rank is not None]
    # Conversion tools write the same rank to all files.
    distinct = len({rank for rank, _ in writers}) == len(grid.states)
    for (previous, first_file), (current, second_file) in pairwise(writers):
        if distinct and current < previous:
            raise UnsupportedError(
                "the files of two ranks are swapped",
                where=where,
                why=f"process {previous} wrote `{first_file}`, and process {current} wrote "
                f"`{second_file}`",
                hint="restore the original names",
            )
