"""Layouts with the same names: the dimensions of the tensors tell them apart, where they do."""

from __future__ import annotations

import pytest

from ckptctl.planner.mapping.detect import detect_layouts
from tests import effort
from tests.contract.tables import FAMILIES, tiny


def layouts(shapes: dict[str, tuple[int, ...]], name: str) -> list[str]:
    return [one.layout for one in detect_layouts(shapes, {name: FAMILIES[name]})]


@pytest.mark.parametrize("layout", ["hf", "mlx"])
@pytest.mark.parametrize("name", ["lfm2", "apertus"])
def test_dimensions_distinguish_layouts(name: str, layout: str) -> None:
    assert layouts(tiny(FAMILIES[name], layout), name) == [layout]


def test_indistinguishable_layouts_are_both_detected() -> None:
    square = {
        key: (11, 1, 1) if len(s) == 3 else s for key, s in tiny(FAMILIES["lfm2"], "hf").items()
    }
    assert layouts(square, "lfm2") == ["hf", "mlx"]


def test_impossible_shapes_keep_both_layouts() -> None:
    odd = {key: (11, 2, 3) if len(s) == 3 else s for key, s in tiny(FAMILIES["lfm2"], "hf").items()}
    assert layouts(odd, "lfm2") == ["hf", "mlx"]


def test_unknown_keys_cost_linear_work() -> None:
    """Not by each family, twice: a hostile header has as many of them as it likes."""

    def work(count: int) -> int:
        shapes = {f"t{n}": (8,) for n in range(count)}
        return effort.lines(lambda: detect_layouts(shapes, FAMILIES))

    work(1_000)
    assert work(3_000) - work(1_000) < 2_000 * 40
