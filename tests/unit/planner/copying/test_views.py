"""Views of stored tensors, against numpy on the bytes that they name."""

from __future__ import annotations

import numpy as np
import pytest

from ckptctl.catalog import Box, Checksum, Extent, TensorEntry
from ckptctl.planner.copying.blocks import build_view, transpose_entry
from ckptctl.planner.strided import StridedTensor

STORED = np.arange(200, dtype=np.uint8)


def entry(*extents: Extent) -> TensorEntry:
    return TensorEntry("a", "uint8", (6, 8), extents, ("a",))


WHOLE = entry(Extent(Box((0, 0), (6, 8)), "f", 100, 48, crc32=7))
HALVES = entry(
    Extent(Box((0, 0), (6, 3)), "f", 0, 18, crc32=1),
    Extent(Box((0, 3), (6, 5)), "f", 20, 30, strides=(1, 6), within=Checksum(20, 40, 2)),
)


def elements(tensor: TensorEntry) -> np.ndarray:
    found = np.full(tensor.shape, -1)
    for extent in tensor.extents:
        offsets, sizes = extent.box.offsets, extent.box.sizes
        place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        content = STORED[extent.offset : extent.offset + extent.nbytes]
        strides = extent.strides or np.empty(sizes, np.uint8).strides
        assert sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) < len(content)
        found[place] = np.lib.stride_tricks.as_strided(content, sizes, strides)
    assert (found != -1).all()
    return found


@pytest.mark.parametrize("tensor", [WHOLE, HALVES])
def test_strided_rows_are_a_view(tensor: TensorEntry) -> None:
    """Expert 1 of 2: every second column, from the second on."""
    apart = StridedTensor.from_entry(tensor).narrow(0, 1, 4).split(1, (4, 2)).select(2, 1)
    found = build_view(tensor, apart, "b")
    assert (elements(found) == elements(tensor)[1:5, 1::2]).all()
    assert (found.name, found.path, found.shape) == ("b", ("b",), (4, 4))
    assert all(extent.recorded_checksum is None for extent in found.extents)


@pytest.mark.parametrize("tensor", [WHOLE, HALVES])
def test_transposed_extents_keep_checksums(tensor: TensorEntry) -> None:
    found = transpose_entry(tensor)
    assert (elements(found) == elements(tensor).T).all()
    assert [one.recorded_checksum for one in found.extents] == [
        one.recorded_checksum for one in tensor.extents
    ]
    assert transpose_entry(found) == tensor


def test_complete_extents_keep_checksums() -> None:
    found = build_view(HALVES, StridedTensor.from_entry(HALVES).narrow(1, 0, 4))
    first, second = found.extents
    assert first == HALVES.extents[0]
    assert (second.box, second.nbytes, second.recorded_checksum) == (Box((0, 3), (6, 1)), 6, None)


def test_unevenly_spaced_elements_are_no_view() -> None:
    turned = StridedTensor.from_entry(WHOLE).split(0, (3, 2)).permute((1, 0, 2)).merge(0, 2)
    with pytest.raises(ValueError, match="evenly"):
        build_view(WHOLE, turned)
