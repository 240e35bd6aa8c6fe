import contextlib
import copy

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptctl.errors import MappingError
from ckptctl.facts.contradictions import find_contradicting_facts, read_config_statements
from ckptctl.facts.params import (
    compute_ffn_size,
    config_to_params,
    params_to_config,
    read_params_statements,
    solve_ffn_factors,
)
from ckptctl.families import family
from ckptctl.planner.config_facts import has_tied_embeddings, read_rope, read_sizes
from ckptctl.planner.mapping.detect import detect_layouts
from tests.contract.tables import stored_shapes

PARAMS_KEYS = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "multiple_of",
    "ffn_dim_multiplier",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
)

# params.json as Meta published them (Llama-2-7b, Llama-2-70b, Llama-3-8B, 3.1-8B, 3.2-1B, 3.2-3B)
L2_7B = {
    "dim": 4096,
    "multiple_of": 256,
    "n_heads": 32,
    "n_layers": 32,
    "norm_eps": 1e-05,
    "vocab_size": -1,
}
L2_70B = {
    "dim": 8192,
    "multiple_of": 4096,
    "ffn_dim_multiplier": 1.3,
    "n_heads": 64,
    "n_kv_heads": 8,
    "n_layers": 80,
    "norm_eps": 1e-05,
    "vocab_size": -1,
}
L3_8B = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "multiple_of": 1024,
    "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
}
L31_8B = L3_8B | {"use_scaled_rope": True}
L32_1B = {
    "dim": 2048,
    "ffn_dim_multiplier": 1.5,
    "multiple_of": 256,
    "n_heads": 32,
    "n_kv_heads": 8,
    "n_layers": 16,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
    "vocab_size": 128256,
}
L32_3B = L32_1B | {"dim": 3072, "n_heads": 24, "n_layers": 28, "ffn_dim_multiplier": 1.0}

PUBLISHED = [
    ("llama2", L2_7B, 11008, 4096),
    ("llama2", L2_70B, 28672, 4096),
    ("llama3", L3_8B, 14336, 8192),
    ("llama3", L31_8B, 14336, 131072),
    ("llama3_2", L32_1B, 8192, 131072),
    ("llama3_2", L32_3B, 8192, 131072),
]


def solved(params, size):
    return {"v": 32000 if params["vocab_size"] == -1 else params["vocab_size"], "f": size}


@pytest.mark.parametrize(("name", "params", "size", "length"), PUBLISHED)
def test_published_params_convert_to_expected_config(name, params, size, length):
    config = params_to_config(family(name), params, solved(params, size), dtype="bfloat16")
    assert config["intermediate_size"] == size
    assert config["max_position_embeddings"] == length
    assert config["vocab_size"] == solved(params, size)["v"]
    assert config["num_key_value_heads"] == params.get("n_kv_heads", params["n_heads"])
    assert config["rope_theta"] == params.get("rope_theta", 10000.0)
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is (name == "llama3_2")
    factor = {"llama3": 8.0, "llama3_2": 32.0}.get(name)
    scaling = config.get("rope_scaling")
    assert (scaling and scaling["factor"]) == (factor if "use_scaled_rope" in params else None)


@pytest.mark.parametrize(("name", "params", "size", "length"), PUBLISHED)
def test_published_params_roundtrip_through_config(name, params, size, length):
    sizes = solved(params, size)
    config = params_to_config(family(name), params, sizes)
    back = config_to_params(family(name), config, sizes)
    assert set(back) <= set(PARAMS_KEYS)
    expected = params | {"vocab_size": sizes["v"]}
    expected.setdefault("n_kv_heads", params["n_heads"])
    expected.setdefault("rope_theta", 10000.0)
    if expected.get("ffn_dim_multiplier") == 1.0:
        del expected["ffn_dim_multiplier"]
    assert back == expected


def test_ffn_size_is_computed_without_tensor():
    config = params_to_config(family("llama3"), L3_8B, {})
    assert config["intermediate_size"] == 14336
    with pytest.raises(MappingError, match="vocab_size"):
        params_to_config(family("llama2"), L2_7B, {})


def test_nested_params_match_flat_ones():
    plain, nested = L3_8B, {"model": L3_8B}
    sizes = solved(L3_8B, 14336)
    llama = family("llama3")
    assert params_to_config(llama, nested, sizes) == params_to_config(llama, plain, sizes)
    assert read_sizes(llama, None, nested) == read_sizes(llama, None, plain)


def test_code_llama_gets_its_context_length():
    config = params_to_config(
        family("llama2"), L2_7B | {"rope_theta": 1000000.0}, {"v": 32016, "f": 11008}
    )
    assert (config["rope_theta"], config["max_position_embeddings"]) == (1e6, 16384)


def test_unsupported_params_are_refused_by_name():
    for strange in ({"moe": {"num_experts": 8}}, {"quantization_args": {"group_size": 32}}):
        with pytest.raises(MappingError, match=next(iter(strange))):
            params_to_config(family("llama3"), L3_8B | strange, {})
    with pytest.raises(MappingError, match="scaled rotary"):
        params_to_config(family("llama2"), L2_7B | {"use_scaled_rope": True}, {"v": 9, "f": 9})


@given(st.integers(1, 20000), st.integers(1, 200000))
def test_every_ffn_size_has_multiple_and_factor(dim, size):
    multiple, factor = solve_ffn_factors(dim, size)
    assert compute_ffn_size(dim, multiple, factor) == size


@pytest.mark.parametrize(("params", "size"), [(L2_7B, 11008), (L2_70B, 28672), (L3_8B, 14336)])
def test_known_ffn_params_are_recovered(params, size):
    found = solve_ffn_factors(params["dim"], size)
    assert found == (params["multiple_of"], params.get("ffn_dim_multiplier"))


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_sizes_are_read_from_config_and_params():
    expected = {"v": 96, "d": 64, "f": 96, "h": 8, "k": 2, "e": 8, "i": 2}
    assert read_sizes(family("llama3"), CONFIG) == expected
    assert read_sizes(family("llama3"), {"num_attention_heads": 8}) == {"h": 8, "k": 8}
    assert read_sizes(family("llama3"), CONFIG | {"head_dim": 32})["e"] == 32
    assert read_sizes(family("llama3")) == {}
    assert "v" not in read_sizes(family("llama2"), None, L2_7B)


@pytest.mark.parametrize("value", ["8", 8.0, True, 0, -2, [8], 1 << 60])
def test_invalid_sizes_are_refused(value):
    with pytest.raises(MappingError, match="num_attention_heads"):
        read_sizes(family("llama3"), CONFIG | {"num_attention_heads": value})


def test_indivisible_hidden_size_is_refused():
    with pytest.raises(MappingError, match="not divisible"):
        read_sizes(family("llama3"), CONFIG | {"num_attention_heads": 7})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (None, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, (5e5, LLAMA3)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            (None, {"rope_type": "linear", "factor": 2}),
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, None)),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, (5e5, LLAMA3)),
    ],
)
def test_both_rope_spellings_are_read(config, expected):
    assert read_rope(config) == expected


def test_returned_config_is_a_copy():
    first = params_to_config(family("llama3"), L31_8B, {})
    first["rope_scaling"]["factor"] = 1.0
    assert params_to_config(family("llama3"), L31_8B, {})["rope_scaling"]["factor"] == 8.0


def test_ties_follow_config_and_family_default():
    assert has_tied_embeddings(family("llama3_2"), None) and not has_tied_embeddings(
        family("llama3"), None
    )
    assert has_tied_embeddings(family("llama3"), {"tie_word_embeddings": True})
    assert not has_tied_embeddings(family("llama3_2"), {"tie_word_embeddings": False})


@pytest.mark.parametrize("said", ["yes", 1, 0, [True]])
def test_tie_must_be_true_or_false(said):
    for files in ({"tie_word_embeddings": said}, None), (None, {"tied_embeddings": said}):
        with pytest.raises(MappingError, match="must be true or false"):
            has_tied_embeddings(family("llama3"), *files)
    assert not has_tied_embeddings(family("llama3"), {"tie_word_embeddings": None})


def test_config_converts_to_params():
    params = config_to_params(family("llama3"), CONFIG | {"rope_scaling": LLAMA3}, {})
    assert params["use_scaled_rope"] is True
    assert params["rope_theta"] == 500000.0 and params["n_kv_heads"] == 2
    assert compute_ffn_size(64, params["multiple_of"], params.get("ffn_dim_multiplier")) == 96
    assert config_to_params(family("llama3"), CONFIG, {}, ranks=4)["n_kv_heads"] == 4
    silent = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    assert config_to_params(family("llama2"), silent, {})["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("llama3", {"rope_scaling": LLAMA3 | {"factor": 16.0}}, "16.0"),
        ("llama3", {"rope_scaling": LLAMA3 | {"factor": 32.0}}, "32.0"),
        ("llama3_2", {"rope_scaling": LLAMA3}, "8.0"),
        ("llama2", {"rope_scaling": LLAMA3}, "rope_scaling"),
        ("llama3", {"attention_bias": True}, "attention_bias"),
        ("llama3", {"mlp_bias": True}, "mlp_bias"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama3", {"head_dim": 32}, "head_dim"),
    ],
)
def test_config_that_params_cannot_express_is_refused(name, change, said):
    with pytest.raises(MappingError) as caught:
        config_to_params(family(name), CONFIG | change, {})
    assert said in caught.value.what


def compared(family, config, params):
    """The facts on which the two files disagree."""
    said = [
        *read_config_statements(family, config, "config.json"),
        *read_params_statements(family, params, "params.json"),
    ]
    return [one.fact for one in find_contradicting_facts(said)]


def test_contradictory_params_are_listed():
    llama = family("llama3")
    config = params_to_config(llama, L31_8B, solved(L31_8B, 14336))
    assert compared(llama, config, L31_8B) == []
    assert compared(llama, config, L31_8B | {"n_kv_heads": 16}) == ["num_key_value_heads"]
    found = compared(llama, config, L31_8B | {"n_layers": 80, "rope_theta": 1e4})
    assert found == ["num_hidden_layers", "rope_theta"]


NONSENSE: tuple[object, ...] = (
    None,
    True,
    0,
    -1,
    3,
    10**400,
    0.0,
    1e-320,
    1e308,
    float("nan"),
    "",
    "8",
    [],
    [1],
    {},
)
VALUES = st.sampled_from(NONSENSE)
NESTED = st.dictionaries(st.sampled_from(["rope_type", "type", "rope_theta", "factor"]), VALUES)
KEYS = [*CONFIG, *PARAMS_KEYS, "model", "rope_scaling", "rope_parameters", "head_dim"]


def only_mapping_errors(call, *arguments):
    with contextlib.suppress(MappingError):
        call(*arguments)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES | NESTED, max_size=3))
@example({"ffn_dim_multiplier": 1e308})
def test_arbitrary_config_values_raise_only_mapping_errors(change):
    llama, sizes = family("llama3"), {"v": 96, "f": 96}
    for file in (change, CONFIG | change, L31_8B | change):
        only_mapping_errors(detect_layouts, {}, {"llama3": llama}, file, file)
        only_mapping_errors(config_to_params, llama, file, sizes)
        only_mapping_errors(params_to_config, llama, file, sizes)
        only_mapping_errors(compared, llama, file, file)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "params", "size", "length"), PUBLISHED)
def test_transformers_reads_config_written_from_params(name, params, size, length):
    from transformers import LlamaConfig

    written = params_to_config(family(name), params, solved(params, size), dtype="bfloat16")
    config = LlamaConfig.from_dict(copy.deepcopy(written))  # it changes what it is given
    assert config.head_dim == params["dim"] // params["n_heads"]
    assert config.intermediate_size == size
    assert config.tie_word_embeddings is (name == "llama3_2")
    said = config.to_dict()
    theta, scaling = read_rope(said)
    assert theta == written["rope_theta"] and scaling == written.get("rope_scaling")
    assert config_to_params(family(name), said, solved(params, size)) == config_to_params(
        family(name), written, solved(params, size)
    )


@pytest.mark.oracle
@pytest.mark.parametrize(
    "change", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_transformers_keys_and_shapes_match_tables(change):
    from transformers import LlamaConfig, LlamaForCausalLM

    from ckptctl.families import load_families
    from ckptctl.planner.mapping.source import ModelFacts
    from ckptctl.planner.mapping.tensors import map_tensors

    config = CONFIG | change
    model = LlamaForCausalLM(LlamaConfig(**config))
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    found = detect_layouts(shapes, load_families(), model.config.to_dict())
    assert all(c.is_exact for c in found)
    name = "llama3_2" if model.config.tie_word_embeddings else "llama3"
    assert [(c.family, c.layout) for c in found] == [(name, "hf")]
    mapped = map_tensors(
        family(name), "hf", "hf", shapes, ModelFacts(sizes=read_sizes(family(name), config))
    )
    found = stored_shapes(mapped.tensors)
    assert found == shapes and list(found) == list(shapes)
