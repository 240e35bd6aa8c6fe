from __future__ import annotations

import pytest
import torch

from ckptctl.distributed.loading.target_memory import Filled
from ckptctl.distributed.saving.device_memory import DeviceMemory, DeviceReader
from ckptctl.distributed.state import bytes_of, memory

ODD_STRIDES = {
    "no elements": torch.empty(0)[::2],
    "no columns": torch.empty(4, 0)[:, ::3],
    "one of six": torch.arange(6.0)[3],
    "one of two": torch.tensor([7.0, 8.0])[::2],
    "expanded to one": torch.tensor(5.0).expand(1),
    "one of a matrix": torch.arange(16.0).view(4, 4)[::4][:, :1].t(),
}


@pytest.mark.parametrize("name", ODD_STRIDES)
def test_contiguous_tensors_with_strides_that_mean_nothing(name: str) -> None:
    tensor = ODD_STRIDES[name]
    assert tensor.is_contiguous()
    expected = bytes(memory(tensor))
    assert bytes(memory(bytes_of(tensor))) == expected
    assert bytes(DeviceMemory(tensor, DeviceReader(64))[0 : len(expected)]) == expected
    if tensor.numel():
        Filled(tensor)[0:4] = memoryview(bytearray(expected))
        assert bytes(memory(tensor)) == expected
