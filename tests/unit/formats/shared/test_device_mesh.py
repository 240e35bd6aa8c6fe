"""Device meshes as ranks' files describe them, by ranks that cannot have written them."""

from __future__ import annotations

import pytest

from ckptctl.errors import UnsupportedError
from ckptctl.formats.shared.rank_archive import MeshParser


def record(coordinate: list[int] | None, rank: int, ranks: list[int]) -> dict[str, object]:
    layout = {"shape": (2, 2), "stride": (2, 1)}
    return {
        "_coordinate_on_dim": coordinate,
        "_rank": rank,
        "_flatten_rank_map": tuple(ranks),
        "_layout": layout,
    }


def test_coordinate_outside_mesh_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="rank 5 is outside the device mesh") as caught:
        MeshParser().parse_mesh(record([2, 1], 5, [0, 1, 2, 3]))
    assert caught.value.why == "its position is [2, 1], but the mesh has 2 x 2 ranks"
    assert caught.value.hint


def test_rank_not_in_mesh_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="rank 7 is outside") as caught:
        MeshParser().parse_mesh(record([1, 1], 7, [0, 1, 2, 3]))
    assert caught.value.why == "the 2 x 2 mesh has the ranks `0`, `1`, `2`, `3`"


def test_rank_without_coordinate_is_accepted() -> None:
    assert MeshParser().parse_mesh(record(None, 7, [0, 1, 2, 3])).coordinate is None


def test_submesh_of_larger_mesh_is_accepted() -> None:
    assert MeshParser().parse_mesh(record([1, 1], 7, list(range(8)))).rank == 7
