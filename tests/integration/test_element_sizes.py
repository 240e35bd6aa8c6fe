"""Elements of several sizes, permuted one tensor after the other in one thread's buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptctl


@pytest.mark.filterwarnings("ignore")
def test_strided_float_after_odd_byte_count_converts_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "bytes": torch.randint(0, 255, (1003, 1001), dtype=torch.uint8).t(),
        "floats": torch.randn(300, 500).t(),
    }
    torch.save(state, tmp_path / "strided.pt")
    ckptctl.convert(tmp_path / "strided.pt", tmp_path / "dcp", to="dcp", jobs=1)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "stock.pt")
    stock = torch.load(tmp_path / "stock.pt")
    assert all(torch.equal(stock[name], tensor) for name, tensor in state.items())
