"""Boxes of tensors that lie in any order in a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
import torch

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.storage.files import MemoryFiles
from ckptctl.storage.tensor_reader import TensorReader


class Counted(MemoryFiles):
    reads = most = 0

    def fill_views(self, name: str, views: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        self.most = max(self.most, sum(map(len, views)))
        return super().fill_views(name, views, offset)


def stored(tensor: torch.Tensor, offset: int = 0) -> tuple[Counted, TensorEntry]:
    """Return a view as a file has it: all of its storage, behind *offset* bytes."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    content = bytes(offset) + storage.numpy().tobytes()
    whole, size = Box.whole(tuple(tensor.shape)), tensor.itemsize
    strides = tuple(tensor.stride())
    start = offset + int(tensor.storage_offset()) * size
    extent = Extent(whole, "f", start, len(content) - start, strides=strides)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Counted(content, Path("/")), TensorEntry("t", dtype, whole.sizes, (extent,), ("t",))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64, torch.complex128])
def test_boxes_of_strided_views_match_torch(dtype: torch.dtype) -> None:
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
                found = TensorReader(files, entry).read(Box(tuple(first), tuple(sizes)))
                assert bytes(found) == bytes(
                    wanted.clone(memory_format=torch.contiguous_format).untyped_storage()
                ), (order, first, sizes)


def test_transposed_matrix_is_read_by_columns() -> None:
    files, entry = stored(torch.arange(600, dtype=torch.int32).reshape(6, 100).t())
    TensorReader(files, entry).read(Box((10, 0), (50, 6)))
    assert files.reads == 6


def test_nearby_columns_are_read_by_rows() -> None:
    """As one expert's part of a factor is, of which every expert has every n-th column."""
    base = torch.arange(700, dtype=torch.int32).reshape(100, 7)
    for view in (base[:, 1::3], base[:, 1::3].t()):
        files, entry = stored(view)
        found = TensorReader(files, entry).read(Box((0, 0), tuple(view.shape)))
        expected = view.clone(memory_format=torch.contiguous_format)
        assert bytes(found) == bytes(expected.untyped_storage())
        assert files.reads == 100, "one for each row, not for each element"


@pytest.mark.parametrize("nbytes", [1, 24, 100, 1 << 20])
def test_windows_yield_every_element_in_order(nbytes: int) -> None:
    base = torch.arange(5 * 6 * 7, dtype=torch.int32).reshape(5, 6, 7)
    for view in (base, base.permute(2, 0, 1), base[1:, ::2, 1:3]):
        files, entry = stored(view)
        found = list(TensorReader(files, entry).iterate_windows(nbytes=nbytes))
        assert max(map(len, found)) <= max(nbytes, 4)
        assert b"".join(found) == bytes(view.contiguous().view(torch.uint8).numpy())


def test_windows_of_box_yield_its_elements() -> None:
    base = torch.arange(60, dtype=torch.int16).reshape(6, 10)
    files, entry = stored(base.t())
    found = TensorReader(files, entry).iterate_windows(Box((3, 2), (5, 4)), 12)
    assert b"".join(found) == bytes(base.t()[3:8, 2:6].contiguous().view(torch.uint8).numpy())


def test_empty_tensor_has_no_windows() -> None:
    files, entry = stored(torch.zeros(4, 0))
    assert not list(TensorReader(files, entry).iterate_windows())


def test_expanded_tensor_is_read_once_per_copy() -> None:
    files, entry = stored(torch.arange(50, dtype=torch.int32).reshape(50, 1).expand(50, 3))
    found = TensorReader(files, entry).read()
    assert bytes(found) == bytes(torch.arange(50, dtype=torch.int32).repeat_interleave(3).numpy())
    assert files.reads == 3, "one for each copy, not for each element"


def test_gaps_between_rows_are_read_in_bounded_memory() -> None:
    base = torch.arange(3 << 20, dtype=torch.int32).reshape(-1, 512)
    for width in (1, 3):
        files, entry = stored(base[:, :width])
        found = TensorReader(files, entry).read()
        assert bytes(found) == bytes(base[:, :width].contiguous().view(torch.uint8).numpy())
        assert files.most <= 1 << 20 and files.reads == 12


@pytest.mark.parametrize(
    ("columns", "reads"), [(1000, 1), (700, 256)], ids=["small gaps", "large gaps"]
)
def test_rows_with_small_gaps_are_read_together(columns: int, reads: int) -> None:
    view = torch.arange(256 << 10, dtype=torch.int32).reshape(256, 1024)[:, :columns]
    files, entry = stored(view)
    found = TensorReader(files, entry).read()
    assert bytes(found) == bytes(view.contiguous().view(torch.uint8).numpy())
    assert files.reads == reads
