import pytest

from ckptctl.catalog import TensorEntry
from ckptctl.errors import DamagedError, MappingError, UnsupportedError
from ckptctl.numerics.quantization.statement import QuantizationConfig, find_quantization_config
from ckptctl.numerics.quantization.survey import detect_quantized_weights, to_dequantized_names

PLAIN = {"group_size": 64, "bits": 4}


def seen(said, packed=(6, 16), scales=("bfloat16", 6, 2), biases=None, **others):
    """What is made of a weight of 6 rows and 128 columns."""
    statement = find_quantization_config({"quantization": said, "quantization_config": said})
    found = {"a.weight": ("uint32", *packed), "a.scales": scales, "a.biases": biases or scales}
    found |= {f"a.{name}": kind for name, kind in others.items()}
    entries = {
        name: TensorEntry(name, dtype, tuple(shape), (), (name,))
        for name, (dtype, *shape) in found.items()
        if shape
    }
    return detect_quantized_weights(entries, statement, lambda _: b"")


def test_uniform_quantization_is_recognized():
    (weight,) = seen(PLAIN).weights
    assert (weight.key, weight.shape, weight.description) == (
        "a.weight",
        (6, 128),
        "MLX 4 bits with groups of 64",
    )
    assert weight.names == ("a.weight", "a.scales", "a.biases")


def test_layer_override_is_applied():
    (weight,) = seen(PLAIN | {"a": {"group_size": 32, "bits": 8}}, scales=("float32", 6, 2)).weights
    assert (weight.shape, weight.arguments.bits) == ((6, 64), 8)


@pytest.mark.parametrize(
    ("mode", "packed", "groups", "shape"),
    [("mxfp4", 16, 4, 128), ("nvfp4", 16, 8, 128), ("mxfp8", 16, 2, 64)],
)
def test_float_modes_are_recognized(mode, packed, groups, shape):
    scales = ("uint8", 3, 6, groups)
    found = seen({"mode": mode}, (3, 6, packed), scales, biases=("none",)).weights
    assert [(one.shape, one.kind) for one in found] == [((3, 6, shape), "mlx_float")]


@pytest.mark.parametrize(
    ("said", "changes", "why"),
    [
        (PLAIN, {"packed": (6, 12)}, "2 groups of 64 elements of 4 bits"),
        (PLAIN, {"packed": (5, 16)}, "each group of each row"),
        (PLAIN, {"biases": ("none",)}, "`a.biases` is missing"),
        (PLAIN, {"biases": ("float32", 6, 2)}, "must match the scales in number and dtype"),
        (PLAIN, {"scales": ("uint8", 6, 2)}, "scales must be one of"),
        (PLAIN, {"global_scale": ("float32", 1)}, "is not supported"),
        ({"group_size": 64}, {}, "`bits` is missing"),
        (PLAIN | {"bits": 7}, {}, "`bits` is 7"),
        (PLAIN | {"mode": "mxfp5"}, {}, "`mode` is 'mxfp5'"),
        (PLAIN | {"mode": []}, {}, "`mode` is []"),
        (PLAIN | {"mode": "nvfp4"}, {}, "`group_size` is 64"),
        (PLAIN | {"a": False}, {}, "`a` is False"),
        (
            {"mode": "mxfp4"},
            {"scales": ("uint8", 6, 4)},
            "`mode` is mxfp4, so this tensor is not allowed",
        ),
    ],
)
def test_mismatched_mlx_tensors_are_refused(said, changes, why):
    (error,) = seen(said, **changes).errors.values()
    assert isinstance(error, DamagedError | MappingError | UnsupportedError)
    assert why in f"{error.what}: {error.why}"


def test_mlx_weight_without_config_is_unknown():
    entry = TensorEntry("a.weight", "uint32", (6, 16), (), ("a.weight",))
    found = detect_quantized_weights({"a.weight": entry}, QuantizationConfig(), lambda _: b"")
    assert found.unknown == {"a.weight": "MLX"}


def test_unscaled_weight_is_bare_and_biases_are_not_lone():
    assert seen(PLAIN, scales=("none",)).weights_without_scales == ["a.weight"]
    assert seen(PLAIN, other_biases=("float32", 1)).scales_without_weights == []


def test_plain_names_omit_scales_and_biases():
    names = ["a.weight", "a.scales", "a.biases", "norm.weight"]
    assert to_dequantized_names(names) == ["a.weight", "norm.weight"]
