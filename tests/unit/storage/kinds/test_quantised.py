"""Numbers of quantised elements, beside torch's own conversion."""

import pytest
import torch

from ckptctl.storage.kinds.quantised import _numbers


class Room:
    """Of the inputs of a virtual file, only the memory."""

    def scratch(self, _use, dtype, count):
        return torch.empty(count, dtype=getattr(torch, dtype))


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("finite", [False, True])
def test_every_byte_of_float8(dtype, finite):
    every = torch.arange(256, dtype=torch.uint8)
    wanted = every.view(getattr(torch, dtype)).to(torch.float32)
    if finite:
        every, wanted = every[wanted.isfinite()], wanted[wanted.isfinite()]
    found = _numbers(Room(), every.view(1, -1), dtype)[0]
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


def test_columns_of_wider_rows():
    raw = torch.arange(256, dtype=torch.uint8).view(4, 64)[:, 3:50]
    wanted = raw.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(_numbers(Room(), raw, "float8_e4m3fn"), wanted)
