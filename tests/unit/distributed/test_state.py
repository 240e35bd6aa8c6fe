from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptctl.distributed.loading.target_memory import TensorSink
from ckptctl.distributed.saving.device_memory import DeviceMemory, DeviceReader
from ckptctl.distributed.state import flatten_state, to_memoryview, view_as_bytes
from ckptctl.errors import UsageError

ODD_STRIDES = {
    "no elements": torch.empty(0)[::2],
    "no columns": torch.empty(4, 0)[:, ::3],
    "one of six": torch.arange(6.0)[3],
    "one of two": torch.tensor([7.0, 8.0])[::2],
    "expanded to one": torch.tensor(5.0).expand(1),
    "one of a matrix": torch.arange(16.0).view(4, 4)[::4][:, :1].t(),
}


@pytest.mark.parametrize("name", ODD_STRIDES)
def test_contiguous_tensors_with_odd_strides_are_read_and_written(name: str) -> None:
    tensor = ODD_STRIDES[name]
    assert tensor.is_contiguous()
    expected = bytes(to_memoryview(tensor))
    assert bytes(to_memoryview(view_as_bytes(tensor))) == expected
    assert bytes(DeviceMemory(tensor, DeviceReader(64)).view_memory(0, len(expected))) == expected
    if tensor.numel():
        TensorSink(tensor).write(0, memoryview(bytearray(expected)))
        assert bytes(to_memoryview(tensor)) == expected


@pytest.mark.parametrize("error", [ValueError, RecursionError])
def test_errors_of_user_state_dict_are_raised_unchanged(error: type[Exception]) -> None:
    class Failing:
        def state_dict(self) -> dict[str, Any]:
            raise error("no batch yet")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with pytest.raises(error, match="no batch yet"):
        flatten_state({"model": Failing()})
    with pytest.raises(UsageError, match="two values of the state dict have the same name"):
        flatten_state({"a.b": 1, "a": {"b": 2}})
