"""What schemes understand of names, dtypes, shapes and configurations, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError
from ckptctl.numerics.quantization.formulas import ScaleBlocks
from ckptctl.numerics.quantization.scheme import list_supported_methods, load_schemes
from ckptctl.numerics.quantization.statement import (
    QuantizationConfig,
    find_quantization_config,
    parse_sidecar_config,
    strip_quantization_config,
)
from ckptctl.numerics.quantization.survey import (
    UNQUANTIZED_DTYPES,
    UNQUANTIZED_ENDINGS,
    QuantizationSurvey,
    detect_quantized_weights,
    to_dequantized_names,
)

Tensors = dict[str, tuple[Any, ...]]


def surveyed(
    tensors: Tensors, said: dict[str, Any] | None = None, read: bytes = b""
) -> QuantizationSurvey:
    entries = {
        name: TensorEntry(name, dtype, tuple(shape), (), (name,))
        for name, (dtype, *shape) in tensors.items()
    }
    statement = (
        find_quantization_config({"quantization_config": said}) if said is not None else None
    )
    return detect_quantized_weights(entries, statement or QuantizationConfig(), lambda _: read)


def groups(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}


INT4 = groups("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
PACKED = {
    "a.weight_packed": ("int32", 7, 12),
    "a.weight_scale": ("bfloat16", 7, 3),
    "a.weight_shape": ("int64", 2),
}
NVFP4 = groups("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)
FP4 = {
    "a.weight_packed": ("uint8", 7, 48),
    "a.weight_scale": ("float8_e4m3fn", 7, 6),
    "a.weight_global_scale": ("float32", 1),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
ROWS = {
    "a.qweight": ("int32", 12, 40),
    "a.qzeros": ("int32", 3, 5),
    "a.scales": ("float16", 3, 40),
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
AWQ_ROWS = ROWS | {"a.qweight": ("int32", 96, 5)}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
OF_MODELOPT = {
    "a.weight": ("uint8", 7, 48),
    "a.weight_scale": ("float8_e4m3fn", 7, 6),
    "a.weight_scale_2": ("float32",),
}
FP8 = {"a.weight": ("float8_e4m3fn", 7, 96), "a.weight_scale": ("float32", 7)}
BNB = {"quant_method": "bitsandbytes"}
STATE = "a.weight.quant_state.bitsandbytes__nf4"
OF_BNB = {
    "a.weight": ("uint8", 32, 1),
    "a.weight.absmax": ("float32", 2),
    "a.weight.quant_map": ("float32", 16),
    STATE: ("uint8", 90),
}
SCALED = "compressed-tensors or fp8 with one scale or ModelOpt"
INT8 = "bitsandbytes int8 or compressed-tensors or int8 weights"
SAID = {"quant_type": "nf4", "blocksize": 32, "shape": [8, 8], "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("tensors", "said", "plain", "how"),
    [
        (PACKED, INT4, (7, 96), "compressed-tensors INT4 with groups of 32"),
        (FP4, NVFP4, (7, 96), "compressed-tensors NVFP4 with blocks of 16"),
        (ROWS, GPTQ, (40, 96), "GPTQ INT4 with groups of 32"),
        (AWQ_ROWS, AWQ, (96, 40), "AWQ INT4 with groups of 32"),
        (OF_MODELOPT, MODELOPT, (7, 96), "ModelOpt NVFP4 with blocks of 16"),
        (OF_BNB, BNB, (8, 8), "bitsandbytes nf4 with blocks of 32"),
    ],
)
def test_supported_schemes_are_recognized(
    tensors: Tensors, said: Any, plain: Any, how: str
) -> None:
    found = surveyed(tensors, said, json.dumps(SAID).encode())
    (weight,) = found.weights
    assert (weight.key, weight.shape, weight.description) == ("a.weight", plain, how)
    assert set(weight.names) == set(tensors)
    assert not (
        found.errors
        or found.unknown
        or found.weights_without_scales
        or found.scales_without_weights
        or found.dropped
    )


MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "four": {**INT4["config_groups"]["g"], "format": "pack-quantized"},
        "eight": {
            "targets": ["re:.*down_proj$", "lm_head"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "format": "float-quantized",
        },
    },
}


def test_weights_use_group_that_names_them() -> None:
    eight = {name.replace("a.", "x.down_proj."): tensor for name, tensor in FP8.items()}
    head = {name.replace("a.", "lm_head."): tensor for name, tensor in FP8.items()}
    found = surveyed(PACKED | eight | head, MIXED)
    assert [weight.description.split()[1] for weight in found.weights] == ["INT4", "FP8", "FP8"]


@pytest.mark.parametrize(
    ("tensors", "said", "named"),
    [
        (PACKED, {**INT4, "format": "marlin-24"}, "`format` 'marlin-24' does not match"),
        (
            PACKED,
            {**INT4, "format": "nvfp4-pack-quantized"},
            "`format` 'nvfp4-pack-quantized' does not match",
        ),
        (PACKED, {**INT4, "config_groups": {}}, "`config_groups` is {}"),
        (PACKED, {**INT4, "ignore": ["a"]}, "but `ignore` lists its layer"),
        (PACKED, {**INT4, "ignore": ["re:a"]}, "but `ignore` lists its layer"),
        (PACKED, {**INT4, "ignore": ["re:(a+)+$"]}, "is not supported"),
        (PACKED, {**INT4, "ignore": ["re:("]}, "is not supported"),
        (PACKED, {**INT4, "ignore": ["re:" + ".*" * 90 + "z"]}, "is not supported"),
        (PACKED, {**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (PACKED, {**INT4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (
            PACKED,
            groups("pack-quantized", num_bits=4, strategy="group", group_size=16),
            "does not match its declared quantization",
        ),
        (
            PACKED,
            groups("pack-quantized", num_bits=4, strategy="group", group_size="many"),
            "`group_size` is 'many'",
        ),
        (
            {"a.weight": ("int8", 7, 96), "a.weight_scale": ("bfloat16", 7, 3)},
            groups("int-quantized", num_bits=8, strategy="channel"),
            "`a.weight_scale` does not fit",
        ),
        (
            PACKED,
            groups("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
            "`a.weight_zero_point` is missing",
        ),
        (
            PACKED | {"a.weight_zero_point": ("int32", 2, 3)},
            groups("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
            "`a.weight_zero_point` does not fit",
        ),
        (
            FP4 | {"a.weight_scale": ("float8_e4m3fn", 7, 5)},
            NVFP4,
            "`a.weight_scale` does not fit",
        ),
        (FP4 | {"a.weight_global_scale": ("float32", 2)}, NVFP4, "does not fit"),
        (ROWS, {**GPTQ, "bits": 5}, "`bits` is 5"),
        (ROWS, {"quant_method": "gptq", "group_size": 32}, "`bits` is missing"),
        (ROWS, {"quant_method": "gptq", "bits": 4}, "`group_size` is missing"),
        (ROWS, {**GPTQ, "checkpoint_format": "gptq_p"}, "`checkpoint_format` is 'gptq_p'"),
        (ROWS, {**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "`dynamic` is"),
        (ROWS, {**GPTQ, "group_size": 64}, "`a.scales` does not fit"),
        (ROWS | {"a.g_idx": ("int32", 95)}, GPTQ, "`a.g_idx` does not fit"),
        (ROWS | {"a.qzeros": ("int32", 3, 4)}, GPTQ, "`a.qzeros` does not fit"),
        (AWQ_ROWS, {**AWQ, "version": "gemv"}, "`version` is 'gemv'"),
        (AWQ_ROWS, {**AWQ, "group_size": 40}, "does not match its declared quantization"),
        (OF_MODELOPT, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "`quant_algo` is"),
        (OF_MODELOPT, {"quant_method": "modelopt", "quant_algo": "FP8"}, "`quant_algo` is 'FP8'"),
        (OF_MODELOPT, {"quant_method": "modelopt"}, "`quant_algo` is None"),
        (
            OF_MODELOPT,
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "`quantized_layers` is {}",
        ),
        (OF_BNB | {"a.weight.absmax": ("float32", 3)}, BNB, "absmax` does not fit"),
        (OF_BNB | {"a.weight": ("uint8", 31, 1)}, BNB, "nf4` does not fit"),
    ],
)
def test_mismatched_tensors_are_refused_by_name(tensors: Tensors, said: Any, named: str) -> None:
    found = surveyed(tensors, said, json.dumps(SAID).encode())
    (error,) = found.errors.values()
    assert isinstance(error, CkptError)
    assert named in error.what
    assert not found.weights


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{", b"[" * 100_000, b'{"shape": 3}'])
def test_invalid_bnb_state_is_refused(text: bytes) -> None:
    found = surveyed(OF_BNB, BNB, text)
    assert found.errors and not found.weights


@pytest.mark.parametrize(
    ("tensors", "said", "name", "called"),
    [
        (ROWS, None, "a.qweight", "AWQ or GPTQ"),
        (PACKED, None, "a.weight_packed", "compressed-tensors"),
        (FP8, None, "a.weight_scale", SCALED),
        (OF_MODELOPT, None, "a.weight_scale_2", "ModelOpt"),
        (OF_BNB, None, STATE, "bitsandbytes nf4"),
        ({"a.weight": ("int8", 3, 3)}, None, "a.weight", INT8),
        (FP8, {"quant_method": "hqq"}, "a.weight_scale", SCALED),
        ({"a.weight": ("bfloat16", 3)}, {"quant_method": "torchao"}, "quantization_config",
         "`torchao`"),
        (
            {"a.weight": ("float8_e4m3fn", 3, 3), "a.qscale_weight": ("float32",)},
            None,
            "a.qscale_weight",
            "Mistral's fp8",
        ),
        (
            {"e.gate_up_proj": ("uint8", 3, 3, 3), "e.gate_up_proj_weight_scale": ("uint8", 3)},
            MODELOPT,
            "e.gate_up_proj_weight_scale",
            "ModelOpt's stacked experts",
        ),
    ],
)  # fmt: skip
def test_unstated_quantization_is_unknown(
    tensors: Tensors, said: Any, name: str, called: str
) -> None:
    found = surveyed(tensors, said)
    assert found.unknown[name] == called
    assert not found.weights


@pytest.mark.parametrize(
    ("tensors", "said", "bare", "lone"),
    [
        ({"a.weight_packed": ("int32", 7, 12)}, INT4, ["a.weight_packed"], []),
        ({"a.weight_scale": ("bfloat16", 7, 3)}, INT4, [], ["a.weight_scale"]),
        ({"a.qweight": ("int32", 12, 40)}, GPTQ, ["a.qweight"], []),
        ({"a.qzeros": ("int32", 3, 5), "a.scales": ("float16", 3, 40)}, GPTQ, [], ["a.qzeros"]),
        ({STATE: ("uint8", 90)}, BNB, [], [STATE]),
        ({"a.weight": ("float8_e4m3fn", 7, 96)}, INT4, ["a.weight"], []),
    ],
)
def test_incomplete_pairs_are_bare_or_lone(
    tensors: Tensors, said: Any, bare: list[str], lone: list[str]
) -> None:
    found = surveyed(tensors, said)
    assert (found.weights_without_scales, found.scales_without_weights) == (bare, lone)


def test_activation_and_kv_cache_scales_are_dropped() -> None:
    more = {"a.input_global_scale": ("float32", 1), "l.k_proj.k_scale": ("bfloat16", 1)}
    found = surveyed(FP4 | more, NVFP4)
    assert found.dropped == {
        "a.input_global_scale": "static activation scales",
        "l.k_proj.k_scale": "KV cache scales",
    }


def test_block_is_capped_at_weight_size() -> None:
    said = {"quant_method": "fp8", "weight_block_size": [1 << 99, 32]}
    tensors = {"a.weight": ("float8_e4m3fn", 7, 96), "a.weight_scale_inv": ("float32", 1, 3)}
    (weight,) = surveyed(tensors, said).weights
    assert weight.arguments == ScaleBlocks(7, 32)


def test_plain_names_omit_quantization_tensors() -> None:
    stored = [*PACKED, *(name.replace("a.", "b.") for name in ROWS), "b.g_idx", "b.bias"]
    stored += ["c.weight", "c.SCB", "c.weight_format", "norm.weight", "a.input_scale"]
    assert list(to_dequantized_names(stored)) == [
        "a.weight",
        "b.weight",
        "b.bias",
        "c.weight",
        "norm.weight",
    ]
    families = ["a.weight", "a.weight_scale_inv", "e.down_proj_blocks", "e.down_proj_scales"]
    assert to_dequantized_names(families) is families


def test_statement_records_method_and_location() -> None:
    assert find_quantization_config({"hidden_size": 3}) is None
    inner = find_quantization_config({"text_config": {"quantization_config": GPTQ}})
    assert inner and (inner.method, inner.where) == (
        "gptq",
        "text_config.quantization_config in config.json",
    )
    old = find_quantization_config({"compression_config": {"format": "pack-quantized"}})
    assert old and old.method == "compressed-tensors"
    assert parse_sidecar_config("quant_config.json", {"w_bit": 4}).method == "awq"
    config = {"a": 1, "text_config": {"b": 2, "quantization_config": {}}, "quantization": {}}
    assert strip_quantization_config(config) == {"a": 1, "text_config": {"b": 2}}


def test_every_method_has_a_scheme() -> None:
    assert {
        "fp8",
        "mxfp4",
        "compressed-tensors",
        "gptq",
        "awq",
        "bitsandbytes",
    } <= list_supported_methods()
    assert len({one.name for one in load_schemes()}) == len(load_schemes())


def test_plain_tensors_match_no_scheme() -> None:
    """So that where there are no others none has to be imported."""

    def plain(ending: str) -> bool:
        return ending.endswith(UNQUANTIZED_ENDINGS) or any(
            one.endswith(ending) for one in UNQUANTIZED_ENDINGS
        )

    for one in load_schemes():
        assert not any(map(plain, one.drop_reasons)), one.name
        for form in one.naming_patterns:
            told = {
                ending: dtypes for ending, dtypes in form.unique_suffixes.items() if plain(ending)
            }
            assert one.in_tables or told.keys() <= {form.dequantized_suffix}, one.name
            assert all(told.values()), one.name
            assert set(UNQUANTIZED_DTYPES).isdisjoint((*form.dtypes, *sum(told.values(), ()))), (
                one.name
            )
