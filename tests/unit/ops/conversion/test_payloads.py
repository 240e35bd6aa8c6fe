import pytest

from ckptctl.errors import MappingError, UnsupportedError, UsageError
from ckptctl.ops.conversion.payloads import keep_together
from tests.unit.ops.recognition.test_dequantise import BLOCKS, NORM, SCALE, SCALES, WEIGHT, catalog

OTHER = {"b.weight": ("float8_e4m3fn", 128, 128)}
FP8 = {"quant_method": "fp8"}


def check(tensors, *, without=(), renamed=False, dtype=None, quantization=None):
    chosen = tensors.keys() - set(without)
    keep_together(catalog(tensors, quantization), chosen, renamed=renamed, dtype=dtype)


def test_a_whole_pair_may_get_other_names():
    check(WEIGHT | SCALE | NORM, renamed=True, quantization=FP8)
    check(BLOCKS | SCALES | NORM, renamed=True)


def test_a_copy_of_everything_is_not_looked_at():
    check(OTHER | WEIGHT | SCALE, quantization=FP8)


def test_float8_that_nobody_calls_quantised_is_just_numbers():
    check(OTHER | NORM, renamed=True, dtype="bfloat16")


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("pair", [WEIGHT | SCALE, BLOCKS | SCALES])
def test_scales_are_not_left_behind(pair, renamed):
    with pytest.raises(
        MappingError, match=r"1 quantised tensors .* without their scales"
    ) as caught:
        check(pair | NORM, without=[list(pair)[1]], renamed=renamed)
    assert "--dequantize" in caught.value.hint


def test_a_weight_may_be_left_out_with_its_scales():
    check(WEIGHT | SCALE | NORM, without=[*WEIGHT, *SCALE], renamed=True, dtype="float32")


def test_a_cast_is_no_dequantisation():
    with pytest.raises(UsageError, match="`--dtype` would cast 1 quantised") as caught:
        check(WEIGHT | SCALE | NORM, dtype="bfloat16")
    assert "--dequantize" in caught.value.hint


def test_a_cast_leaves_bytes_of_mxfp4_alone():
    check(BLOCKS | SCALES | NORM, dtype="float32")


@pytest.mark.parametrize(
    ("tensors", "quantization"), [(WEIGHT | SCALE | OTHER, None), (OTHER | NORM, FP8)]
)
def test_float8_without_scales_among_such_with_scales_is_not_understood(tensors, quantization):
    with pytest.raises(UnsupportedError, match=r"`b\.weight` has no scales"):
        check(tensors, renamed=True, quantization=quantization)
