import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import CoverageError, UnsupportedError
from ckptctl.planner.boxes import check_coverage, compute_coverage, intersect_boxes, split_rows
from tests import effort


def cells(box):
    spans = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*spans))


@st.composite
def scattered(draw):
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 5)) for _ in range(rank))
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, s - o)) for s, o in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    return shape, boxes


@given(scattered())
def test_coverage_matches_painting_every_cell(case):
    shape, boxes = case
    count = {}
    for box in boxes:
        for cell in cells(box):
            count[cell] = count.get(cell, 0) + 1
    everything = cells(Box.whole(shape))
    found = compute_coverage(shape, boxes)
    assert set().union(*map(cells, found.holes)) == everything - set(count)
    doubled = {cell for cell, times in count.items() if times > 1}
    assert set().union(*map(cells, found.overlaps)) == doubled


@st.composite
def nearly_tiled(draw):
    """Cut a tensor again and again, then perhaps drop, double or change one piece."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        head, tail = (list(box.sizes) for _ in range(2))
        head[dim], tail[dim] = at, box.sizes[dim] - at
        start = list(box.offsets)
        start[dim] += at
        boxes += [Box(box.offsets, tuple(head)), Box(tuple(start), tuple(tail))]
    change = draw(st.sampled_from(["none", "drop", "double", "shrink"]))
    at = draw(st.integers(0, len(boxes) - 1))
    if change == "drop":
        del boxes[at]
    elif change == "double":
        boxes.append(boxes[at])
    elif change == "shrink":
        sizes = tuple(max(size - 1, 0) for size in boxes[at].sizes)
        boxes[at] = Box(boxes[at].offsets, sizes)
    return shape, draw(st.permutations(boxes))


@given(nearly_tiled())
def test_exact_tilings_are_distinguished_from_near_misses(case):
    shape, boxes = case
    painted = sorted(cell for box in boxes for cell in cells(box))
    assert compute_coverage(shape, boxes).is_exact == (painted == sorted(cells(Box.whole(shape))))


def test_coverage_of_many_dimensions_is_exact():
    shape = (2,) * 24
    boxes = list[Box]()
    for dim in range(24):
        boxes.append(Box((1,) * dim + (0,) * (24 - dim), (1,) * (dim + 1) + (2,) * (23 - dim)))
    boxes.append(Box((1,) * 24, (1,) * 24))
    assert compute_coverage(shape, boxes).is_exact
    assert compute_coverage(shape, boxes[:-1]).holes == (boxes[-1],)


def test_heavily_overlapping_boxes_are_refused_by_name():
    extents = tuple(Extent(Box((i, i), (4000, 4000)), "a", 0, 4 * 4000 * 4000) for i in range(2000))
    with pytest.raises(UnsupportedError, match="too many overlaps") as caught:
        check_coverage(TensorEntry("w", "float32", (8000, 8000), extents, ("w",)))
    assert "`w`" in (caught.value.where or "")


def test_pinwheel_is_exact():
    boxes = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert compute_coverage((3, 3), boxes).is_exact
    assert compute_coverage((3, 3), boxes[:-1]).holes == (Box((1, 1), (1, 1)),)


@pytest.mark.parametrize(
    "box", [Box((2,), (3,)), Box((-1,), (2,)), Box((0, 0), (1, 1)), Box((0,), (-1,))]
)
def test_boxes_outside_are_reported(box):
    assert compute_coverage((4,), [box]).outside == (box,)


def test_hole_is_located_in_error():
    extents = (Extent(Box((0, 0), (4, 4)), "a", 0, 64),)
    entry = TensorEntry("w", "float32", (8, 4), extents, ("w",))
    with pytest.raises(CoverageError) as caught:
        check_coverage(entry)
    assert "[4:8, 0:4]" in (caught.value.why or "")
    assert "`w`" in caught.value.what


def test_large_grids_and_stacks_cost_near_linear_work():
    def work(rows):
        grid = [Box((i * 4, j * 4), (4, 4)) for i in range(rows) for j in range(64)]
        assert compute_coverage((rows * 4, 256), grid).is_exact
        assert compute_coverage((rows * 4, 256), grid[:-1]).holes == (
            Box((rows * 4 - 4, 252), (4, 4)),
        )
        columns = [Box((0, i), (1_000_000, 1)) for i in range(16 * rows)]
        assert compute_coverage((1_000_000, 16 * rows), columns).is_exact

    assert effort.growth(work, 64) < 2.2


def test_brick_pattern_costs_near_linear_work():
    """Bricks, each row shifted by half a brick: no line cuts through all of them."""

    def work(rows):
        bricks = [
            Box((row, max(start, 0)), (1, min(start + 4, 256) - max(start, 0)))
            for row in range(rows)
            for start in range(-2 * (row % 2), 256, 4)
        ]
        assert compute_coverage((rows, 256), bricks).is_exact

    assert effort.growth(work, 100) < 2.2


def test_intersect_and_split_rows_return_expected_boxes():
    assert intersect_boxes(Box((0, 0), (4, 4)), Box((2, 3), (4, 4))) == Box((2, 3), (2, 1))
    assert intersect_boxes(Box((0,), (2,)), Box((2,), (2,))) is None
    assert [box.sizes[0] for box in split_rows((7, 2), 3)] == [3, 2, 2]
    assert compute_coverage((7, 2), list(split_rows((7, 2), 3))).is_exact


def test_spiral_of_many_strips_is_exact():
    top, left, bottom, right = 0, 0, 700, 700
    boxes = []
    while top < bottom and left < right:
        match len(boxes) % 4:
            case 0:
                boxes.append(Box((top, left), (1, right - left)))
                top += 1
            case 1:
                boxes.append(Box((top, right - 1), (bottom - top, 1)))
                right -= 1
            case 2:
                boxes.append(Box((bottom - 1, left), (1, right - left)))
                bottom -= 1
            case _:
                boxes.append(Box((top, left), (bottom - top, 1)))
                left += 1
    assert len(boxes) > 1300
    assert compute_coverage((700, 700), boxes).is_exact
    assert compute_coverage((700, 700), boxes[:-1]).holes == (boxes[-1],)


@pytest.mark.parametrize("box", [Box((0, 0), (2, 2)), Box((0, 1), (2, 3)), Box((0,), (6,))])
def test_single_box_that_misses_tensor_shape_is_refused(box):
    extent = Extent(box, "f", 0, 4)
    with pytest.raises((CoverageError, UnsupportedError)):
        check_coverage(TensorEntry("w", "uint8", (2, 3), (extent,), ("w",)))
