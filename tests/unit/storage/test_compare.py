"""Boxes of tensors that lie in any order in a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
import torch

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.storage.compare import read_box
from ckptctl.storage.files import MemoryFiles


class Counted(MemoryFiles):
    reads = 0

    def fill(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        return super().fill(name, views, offset)


def stored(tensor: torch.Tensor, offset: int = 0) -> tuple[Counted, TensorEntry]:
    """Return a view as a file has it: all of its storage, behind *offset* bytes."""
    content = bytes(offset) + bytes(tensor.untyped_storage())
    whole, size = Box.whole(tuple(tensor.shape)), tensor.itemsize
    strides = tuple(tensor.stride())
    start = offset + int(tensor.storage_offset()) * size
    extent = Extent(whole, "f", start, len(content) - start, strides=strides)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Counted(content, Path("/")), TensorEntry("t", dtype, whole.sizes, (extent,), ("t",))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64, torch.complex128])
def test_boxes_of_views(dtype: torch.dtype) -> None:
    draw = random.Random(1)
    base = torch.arange(4 * 5 * 6).to(dtype).reshape(4, 5, 6)
    for order in permutations(range(3)):
        for view in (
            base.permute(order),
            base[1:, ::2, 1:5].permute(order),
            base[0:1].permute(order),
        ):
            files, entry = stored(view, 16)
            for _ in range(4):
                first = [draw.randrange(size) for size in view.shape]
                sizes = [draw.randint(1, n - f) for n, f in zip(view.shape, first, strict=True)]
                wanted = view
                for dim, (start, size) in enumerate(zip(first, sizes, strict=True)):
                    wanted = wanted.narrow(dim, start, size)
                found = read_box(files, entry, Box(tuple(first), tuple(sizes)))
                assert bytes(found) == bytes(
                    wanted.clone(memory_format=torch.contiguous_format).untyped_storage()
                ), (order, first, sizes)


def test_a_transposed_matrix_is_read_by_its_columns() -> None:
    files, entry = stored(torch.arange(600, dtype=torch.int32).reshape(6, 100).t())
    read_box(files, entry, Box((10, 0), (50, 6)))
    assert files.reads == 6


def test_columns_that_are_near_each_other_are_read_by_their_rows() -> None:
    """As one expert's part of a factor is, of which every expert has every n-th column."""
    base = torch.arange(600, dtype=torch.int32).reshape(100, 6)
    for view in (base[:, 1::3], base[:, 1::3].t()):
        files, entry = stored(view)
        found = read_box(files, entry, Box((0, 0), tuple(view.shape)))
        expected = view.clone(memory_format=torch.contiguous_format)
        assert bytes(found) == bytes(expected.untyped_storage())
        assert files.reads == 100, "one for each row, not for each element"
