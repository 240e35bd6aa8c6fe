"""Coverage of random boxes against a bitmap that counts every cell, and boxes that leave it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import CoverageError, UnsupportedError
from ckptctl.planner.boxes import check_coverage, compute_coverage

Shape = tuple[int, ...]
MARGIN = 3


def bitmap(shape: Shape, boxes: list[Box]) -> np.ndarray:
    """Count how often each cell is covered."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    return count


def leaves(shape: Shape, box: Box) -> bool:
    """Whether *box* has another rank, a negative number, or an end behind the tensor's."""
    if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
        return True
    return any(
        offset < 0 or size < 0 or offset + size > limit
        for offset, size, limit in zip(box.offsets, box.sizes, shape, strict=True)
    )


@st.composite
def tilings(draw: st.DrawFn, most: int = 7) -> tuple[Shape, list[Box]]:
    """Cut a tensor again and again; its sizes may be 0, 1 and odd, and so may the pieces'."""
    shape = tuple(draw(st.lists(st.integers(0, most), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 7))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        boxes += [_cut(box, dim, 0, at), _cut(box, dim, at, box.sizes[dim])]
    return shape, draw(st.permutations(boxes))


def _cut(box: Box, dim: int, start: int, end: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = end - start
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def changed(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """Move, resize, drop and double some boxes of a tiling, within the tensor or not."""
    shape, boxes = draw(tilings())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(boxes) - 1)) if boxes else 0
        kind = draw(st.sampled_from(["drop", "double", "move", "resize", "rank"]))
        if not boxes:
            break
        dim, by = draw(st.integers(0, len(shape) - 1)), draw(st.integers(-MARGIN, MARGIN))
        offsets, sizes = list(boxes[at].offsets), list(boxes[at].sizes)
        match kind:
            case "drop":
                del boxes[at]
                continue
            case "double":
                boxes.append(boxes[at])
                continue
            case "move":
                offsets[dim] += by
            case "resize":
                sizes[dim] += by
            case "rank":
                offsets, sizes = [*offsets, 0], [*sizes, 1]
        boxes[at] = Box(tuple(offsets), tuple(sizes))
    return shape, boxes


@given(changed())
def test_coverage_matches_bitmap(case: tuple[Shape, list[Box]]) -> None:
    shape, boxes = case
    found = compute_coverage(shape, boxes)
    outside = [box for box in boxes if leaves(shape, box)]
    assert list(found.outside) == outside
    if outside:
        assert not found.is_exact
        return
    count = bitmap(shape, boxes)
    assert np.array_equal(bitmap(shape, list(found.holes)), count == 0)
    assert np.array_equal(bitmap(shape, list(found.overlaps)) > 0, count > 1)
    assert found.is_exact == bool((count == 1).all())


@given(tilings())
def test_removed_box_of_tiling_is_a_hole(case: tuple[Shape, list[Box]]) -> None:
    shape, boxes = case
    assert compute_coverage(shape, boxes).is_exact
    for box in {box for box in boxes if box.numel}:
        found = compute_coverage(shape, [other for other in boxes if other != box])
        assert np.array_equal(bitmap(shape, list(found.holes)), bitmap(shape, [box]))
        assert not found.overlaps


@given(changed())
def test_coverage_error_names_wrong_box(case: tuple[Shape, list[Box]]) -> None:
    shape, boxes = case
    extents = tuple(Extent(box, "file", 0, 0) for box in boxes)
    entry = TensorEntry("some.name", "float32", shape, extents, ("some", "name"))
    found = compute_coverage(shape, boxes)
    if found.is_exact:
        check_coverage(entry)
        return
    with pytest.raises(CoverageError if found.holes else UnsupportedError) as caught:
        check_coverage(entry)
    assert "`some.name`" in caught.value.what
    wrong = (*found.outside, *found.holes, *found.overlaps)
    assert any(str(box) in str(caught.value.why) for box in wrong)
