"""Numbers of quantized elements, beside torch's own conversion."""

import pytest
import torch

from ckptctl.numerics.kinds.narrow_floats import _convert_to_float32


class Room:
    """Of the output, only the memory for what is between."""

    def get_scratch(self, _use, dtype, count):
        return torch.empty(count, dtype=getattr(torch, dtype))


def numbers(raw, dtype, scale=1.0):
    """Return what bytes of float8 stand for, times *scale*."""
    found, factor = _convert_to_float32(Room(), raw, dtype, torch.tensor([scale]))
    return found * factor


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("finite", [False, True])
def test_every_float8_byte_matches_torch(dtype, finite):
    every = torch.arange(256, dtype=torch.uint8)
    wanted = every.view(getattr(torch, dtype)).to(torch.float32)
    if finite:
        every, wanted = every[wanted.isfinite()], wanted[wanted.isfinite()]
    found = numbers(every.view(1, -1), dtype)[0]
    assert torch.equal(found.isnan(), wanted.isnan())
    rest = ~wanted.isnan()
    assert torch.equal(found[rest].view(torch.int32), wanted[rest].view(torch.int32))


def test_noncontiguous_columns_match_torch():
    raw = torch.arange(256, dtype=torch.uint8).view(4, 64)[:, 3:50]
    wanted = raw.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(numbers(raw, "float8_e4m3fn"), wanted)


@pytest.mark.parametrize("scale", [2.0**120, -(2.0**118), 2.0**-140, float("inf")])
def test_extreme_scales_match_torch(scale):
    every = torch.arange(120, dtype=torch.uint8).view(1, -1)
    wanted = every.view(torch.float8_e4m3fn).to(torch.float32) * torch.tensor([scale])
    found = numbers(every, "float8_e4m3fn", scale)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])
