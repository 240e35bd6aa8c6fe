from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry, build_computed_name
from ckptctl.errors import DamagedError, MappingError, UnsupportedError, UsageError
from ckptctl.numerics.quantization.formulas import ScaleBlocks
from ckptctl.numerics.quantized import dequantize_catalog, find_quantized_tensors, is_unquantized


def catalog(tensors, quantization=None):
    """A checkpoint of *tensors*: dtype and shape by name."""
    entries = {}
    for name, (dtype, *shape) in tensors.items():
        entry = TensorEntry(name, dtype, tuple(shape), (), (name,))
        extent = Extent(Box.whole(tuple(shape)), "f", 0, entry.nbytes)
        entries[name] = TensorEntry(name, dtype, tuple(shape), (extent,), (name,))
    config = {"model_type": "x", **({"quantization_config": quantization} if quantization else {})}
    return Catalog(
        Path("/r"), Path("/r"), "hf", {"f": 1}, entries, documents={"config.json": config}
    )


WEIGHT = {"a.weight": ("float8_e4m3fn", 300, 200)}
SCALE = {"a.weight_scale_inv": ("float32", 3, 2)}
NORM = {"norm.weight": ("bfloat16", 7)}
BLOCKS = {"m.experts.down_proj_blocks": ("uint8", 2, 5, 3, 16)}
SCALES = {"m.experts.down_proj_scales": ("uint8", 2, 5, 3)}
NATIVE = {
    "b.mlp2_weight.blocks": ("uint8", 2, 5, 3, 16),
    "b.mlp2_weight.scales": ("uint8", 2, 5, 3),
}


def test_weight_and_scales_become_one_tensor():
    source = catalog(WEIGHT | SCALE | NORM, {"quant_method": "fp8"})
    found = dequantize_catalog(source, "bfloat16")
    assert list(found.tensors) == ["a.weight", "norm.weight"]
    assert found.tensors["norm.weight"] is source.tensors["norm.weight"]
    entry = found.tensors["a.weight"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("bfloat16", (300, 200), 120_000)
    made = found.computed[entry.extents[0].file]
    assert (made.kind, made.dtype, made.shape) == ("block_fp8", "bfloat16", (300, 200))
    assert made.arguments == ScaleBlocks(128, 128)
    assert [one.entry.name for one in made.inputs] == ["a.weight", "a.weight_scale_inv"]
    assert found.documents["config.json"] == {"model_type": "x"}
    assert "quantization_config" in source.documents["config.json"]


def test_hf_experts_are_transposed_and_native_ones_are_not():
    found = dequantize_catalog(catalog(BLOCKS | SCALES | NATIVE), "float32").tensors
    hf, native = found["m.experts.down_proj"], found["b.mlp2_weight"]
    assert (hf.shape, hf.extents[0].strides) == ((2, 96, 5), (480, 1, 96))
    assert (native.shape, native.extents[0].strides) == ((2, 5, 96), None)
    assert hf.extents[0].file == build_computed_name("m.experts.down_proj")


def test_deepseek_scale_names_are_recognized():
    found = dequantize_catalog(catalog(WEIGHT | {"a.scale": ("float32", 3, 2)}), "float32")
    assert list(found.tensors) == ["a.weight"]


def test_block_size_is_read_from_config():
    source = catalog(
        WEIGHT | {"a.weight_scale_inv": ("bfloat16", 5, 7)}, {"weight_block_size": [64, 32]}
    )
    assert find_quantized_tensors(source) == {"a.weight": "fp8 with 64x32 blocks"}


def test_quantization_schemes_are_named():
    assert find_quantized_tensors(catalog(WEIGHT | SCALE | NORM | BLOCKS | SCALES)) == {
        "a.weight": "fp8 with 128x128 blocks",
        "m.experts.down_proj": "MXFP4 with blocks of 32",
    }
    assert find_quantized_tensors(catalog(NORM | WEIGHT)) == {}
    assert find_quantized_tensors(catalog(WEIGHT | {"a.weight_scale_inv": ("float32", 9)})) == {
        "a.weight": "mismatched scales"
    }
    assert find_quantized_tensors(catalog({"a.qweight": ("int32", 1, 1)})) == {
        "a.qweight": "AWQ or GPTQ"
    }


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (WEIGHT | {"a.weight_scale_inv": ("float32", 2, 2)}, "a.weight_scale_inv` does not fit"),
        (WEIGHT | {"a.weight_scale_inv": ("float32", 3)}, "does not fit"),
        (WEIGHT | {"a.weight_scale_inv": ("uint8", 3, 2)}, "does not fit"),
        (WEIGHT | NORM, "without scales: `a.weight`"),
        (WEIGHT | SCALE | {"b.weight": ("float8_e4m3fn", 1, 1)}, "without scales: `b.weight`"),
        (SCALE | {"a.weight": ("bfloat16", 300, 200)}, "scales without quantized tensors"),
        (SCALE, "scales without quantized tensors"),
        (BLOCKS, "quantized tensors without scales"),
        (SCALES, "scales without quantized tensors"),
        (BLOCKS | {"m.experts.down_proj_scales": ("uint8", 2, 5, 4)}, "does not fit"),
        ({"k_blocks": ("uint8", 3, 16), "k_scales": ("uint8", 3)}, "does not fit"),
    ],
)
def test_inconsistent_weights_and_scales_are_errors(tensors, named):
    with pytest.raises((DamagedError, UnsupportedError)) as caught:
        dequantize_catalog(catalog(tensors), "bfloat16")
    assert named in caught.value.what


def test_missing_scale_among_scaled_weights_is_damage():
    tensors = WEIGHT | SCALE | {"b.weight": ("float8_e4m3fn", 1, 1)}
    with pytest.raises(DamagedError, match=r"without scales: `b\.weight`"):
        dequantize_catalog(catalog(tensors), "bfloat16")
    with pytest.raises(UnsupportedError):  # without any scales they may be all there is
        dequantize_catalog(catalog(WEIGHT), "bfloat16")


@pytest.mark.parametrize(
    ("tensors", "quantization", "named"),
    [
        ({"a.qweight": ("int32", 4, 4)}, None, "AWQ or GPTQ"),
        ({"a.weight": ("int8", 4, 4), "a.SCB": ("float32", 4)}, None, "bitsandbytes int8"),
        ({"a.weight": ("uint8", 8, 1), "a.weight.quant_state.bitsandbytes__nf4": ("uint8", 9)},
         None, "bitsandbytes nf4"),
        (WEIGHT | {"a.weight_scale": ("bfloat16", 300, 1)}, None, "compressed-tensors"),
        (NORM, {"quant_method": "hqq"}, "`hqq`"),
        (WEIGHT | SCALE, {"weight_block_size": "big"}, "`weight_block_size` is 'big'"),
        (BLOCKS | SCALES | {"m.experts.down_proj": ("bfloat16", 1)}, None, "names exist"),
    ],
)  # fmt: skip
def test_unsupported_quantization_is_refused_by_name(tensors, quantization, named):
    with pytest.raises(MappingError) as caught:
        dequantize_catalog(catalog(tensors, quantization), "bfloat16")
    assert named in caught.value.what


def test_dequantizing_unquantized_checkpoint_is_a_usage_error():
    with pytest.raises(UsageError, match="the checkpoint is not quantized"):
        dequantize_catalog(catalog(NORM), "bfloat16")


@pytest.mark.parametrize("shape", [(), (7,)])
def test_weights_without_blocks_are_unsupported(shape):
    found = catalog({"a.weight": ("float8_e4m3fn", *shape), "a.weight_scale_inv": ("float32", 1)})
    with pytest.raises(UnsupportedError, match="does not fit"):
        dequantize_catalog(found, "bfloat16")


def test_replicas_are_ignored_when_dequantizing(monkeypatch):
    source = catalog(WEIGHT | SCALE)
    source = replace(source, replicas={n: t.extents for n, t in source.tensors.items()})
    seen = []
    monkeypatch.setattr(formats, "resolve_codecs", lambda one: seen.append(one.replicas) or one)
    assert list(dequantize_catalog(source, "bfloat16").tensors) == ["a.weight"]
    assert seen == [{}]


@pytest.mark.parametrize(
    ("tensors", "quantization", "plain"),
    [
        (NORM, None, True),
        (NORM, {"quant_method": "fp8"}, False),
        (NORM | WEIGHT, None, False),
        (NORM | {"a.scales": ("bfloat16", 7)}, None, False),
    ],
)
def test_is_plain_checks_names_dtypes_and_config(tensors, quantization, plain):
    assert is_unquantized(catalog(tensors, quantization)) is plain
