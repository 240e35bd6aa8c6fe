import numpy as np
import pytest
from numpy.typing import NDArray

from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import Region
from ckptctl.planner.mapping.tiles import TileConversion, convert_tiles, list_aspect_ratios
from tests.unit.planner.test_strided import elements_of_parts

Array = NDArray[np.int64]


def rows_of(grid: Array) -> Array:
    """Return what transformers' script makes of a grid, written from its definition."""
    tiles, width = grid.shape[0], int(np.prod(grid.shape[2:]))
    found = np.zeros((len(list_aspect_ratios(tiles)) + 1, tiles, width), grid.dtype)
    for index, (height, across) in enumerate(list_aspect_ratios(tiles), 1):
        found[index, : height * across] = grid[:height, :across].reshape(-1, width)
    return found.reshape(len(found), -1)


def moved(how: TileConversion, values: Array, shape: tuple[int, ...]) -> Array:
    found = np.full(shape, -1)
    for tensor in how.tensors:
        ((_, written),) = tensor.targets
        assert written.shape == shape
        zeros = next((one for one in how.zeros if one.key == tensor.sources[0].key), None)
        read = values if zeros is None else np.zeros(zeros.shape, int)
        found = np.maximum(found, elements_of_parts(written, {"0": read}))
    return found


def cells(origin: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(origin, sizes, strict=True))


def at(values: Array, part: Region) -> Array:
    return values[cells(part.origin, part.sizes)]


def grid_of(tiles: int, inner: tuple[int, ...]) -> Array:
    shape = (tiles, tiles, *inner)
    return np.arange(1, np.prod(shape) + 1).reshape(shape)


def test_ratios_match_transformers() -> None:
    expected = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]
    assert list_aspect_ratios(4) == expected


@pytest.mark.parametrize("inner", [(5, 3), (1, 3)])
@pytest.mark.parametrize("tiles", [1, 2, 4, 6])
def test_tiles_roundtrip_between_grid_and_rows(tiles: int, inner: tuple[int, ...]) -> None:
    grid = grid_of(tiles, inner)
    rows = rows_of(grid)
    there = convert_tiles("grid", "rows", grid.shape, inner, to_grid=False)
    assert (moved(there, grid, rows.shape) == rows).all()
    back = convert_tiles("rows", "grid", rows.shape, inner, to_grid=True)
    again = moved(back, rows, grid.shape)
    possible = np.add.outer(np.arange(tiles), np.zeros(tiles, int)) + 1
    possible = possible * (np.arange(tiles) + 1) <= tiles
    assert (again[possible] == grid[possible]).all() and not again[~possible].any()
    for one in back.redundant:
        expected = 0 if one.same_as is None else at(rows, one.same_as)
        assert (at(rows, one.part) == expected).all()


def test_every_row_value_is_copied_or_checked() -> None:
    """What is neither copied nor compared nor known to be zero could be lost."""
    rows = rows_of(grid_of(4, (2, 3)))
    how = convert_tiles("rows", "grid", rows.shape, (2, 3), to_grid=True)
    seen = np.zeros(rows.shape, int)
    for tensor in (one for one in how.tensors if one.sources[0].key == "rows"):
        read = elements_of_parts(
            tensor.targets[0].tensor, {"0": np.arange(rows.size).reshape(rows.shape)}
        )
        seen.flat[read[read >= 0]] = 1
    for one in how.redundant:
        seen[cells(one.part.origin, one.part.sizes)] = 1
    assert seen.all()


@pytest.mark.parametrize(
    ("shape", "grid"), [((8, 24), True), ((9, 23), True), ((4, 3, 2, 3), False), ((4, 4, 6), False)]
)
def test_non_tile_shapes_are_refused(shape: tuple[int, ...], grid: bool) -> None:
    with pytest.raises(MappingError, match="embeddings of tiles"):
        convert_tiles("one", "other", shape, (2, 3), grid)
    with pytest.raises(MappingError, match="embeddings of tiles"):
        convert_tiles("one", "other", (4, 4, 2, 3), (None, 3), grid)
