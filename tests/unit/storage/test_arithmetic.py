"""Elements that change places, beside torch's own copy of views."""

import pytest
import torch

from ckptctl.storage.arithmetic import TRANSPOSE_COLUMNS, permute_elements

ITEM = 2


@pytest.mark.parametrize("beside", [0, 3, 128])
@pytest.mark.parametrize(
    "columns", [1, TRANSPOSE_COLUMNS, TRANSPOSE_COLUMNS + 1, 3 * TRANSPOSE_COLUMNS - 5]
)
def test_matrix_is_transposed_into_part_of_larger_matrix(columns, beside):
    rows, width = 40, columns + beside
    source = torch.randint(0, 1 << 15, (columns, rows), dtype=torch.int16)
    target = torch.zeros(rows, width, dtype=torch.int16)
    axes = [(columns, rows * ITEM, ITEM), (rows, ITEM, width * ITEM)]
    begin = beside // 2
    expected = target.clone()
    expected[:, begin : begin + columns] = source.t()
    permute_elements(
        memoryview(source.numpy().reshape(-1).view("uint8")),
        memoryview(target.numpy().reshape(-1).view("uint8")),
        begin * ITEM,
        axes,
        ITEM,
    )
    assert torch.equal(target, expected)
