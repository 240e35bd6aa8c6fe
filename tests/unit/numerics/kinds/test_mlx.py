"""What MLX quantizes, by its definition; tests/oracle/test_mlx.py compares with MLX itself."""

import pytest
import torch

from ckptctl.catalog import ComputedTensor
from ckptctl.numerics.quantization.formulas import MlxGroups
from tests.checkpoints.mxfp4 import TABLE
from tests.sweeps import one_in
from tests.unit.storage.test_computed import DTYPES, files, same_everywhere, stored

__all__ = ["files"]
BITS = (1, 2, 3, 4, 5, 6, 8)


def packed(numbers, bits):
    """The words of rows of integers, the first in the lowest bits."""
    every = (numbers[..., None] >> torch.arange(bits)) & 1
    octets = every.reshape(*numbers.shape[:-1], -1, 8)
    raw = (octets << torch.arange(8)).sum(-1).to(torch.uint8)
    return raw.contiguous().view(torch.uint32)


def integers(bits, *shape):
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, shape, generator=generator)


def computed(files, kind, dtype, shape, given, said):
    inputs = tuple(stored(files, role, value) for role, value in given.items())
    return ComputedTensor(kind, dtype, shape, inputs, said)


@pytest.mark.parametrize("bits", one_in(5, BITS))
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16])
def test_affine_integers_of_any_width_are_dequantized(files, bits, scales):
    numbers = integers(bits, 2, 5, 96)
    generator = torch.Generator().manual_seed(1)
    scale, bias = (torch.randn(2, 5, 3, generator=generator).to(scales) for _ in range(2))
    wide = (one.repeat_interleave(32, -1) for one in (scale, bias))
    expected = numbers.to(scales) * next(wide) + next(wide)
    given = {"weight": packed(numbers, bits), "scales": scale, "biases": bias}
    for dtype in DTYPES:
        said = MlxGroups(32, bits, "affine")
        made = computed(files, "mlx_affine", dtype, (2, 5, 96), given, said)
        same_everywhere(files, made, expected.to(DTYPES[dtype]))


@pytest.mark.parametrize(
    ("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_modes_are_dequantized(files, mode, bits, group, dtype):
    numbers = integers(bits, 6, 96)
    if bits == 4:
        values = TABLE[numbers]
    else:
        numbers[numbers % 128 == 127] = 0  # no NaN, whose bits are nobody's business
        values = numbers.to(torch.uint8).view(torch.float8_e4m3fn).float()
    scale = torch.randint(40, 120, (6, 96 // group), dtype=torch.uint8)
    factor = torch.exp2(scale.float() - 127)
    if mode == "nvfp4":
        factor = scale.view(torch.float8_e4m3fn).float()
    expected = (values * factor.repeat_interleave(group, -1)).to(DTYPES[dtype])
    given = {"weight": packed(numbers, bits), "scales": scale}
    made = computed(files, "mlx_float", dtype, (6, 96), given, MlxGroups(group, bits, mode))
    same_everywhere(files, made, expected)
