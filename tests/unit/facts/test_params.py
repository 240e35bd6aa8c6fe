"""Mistral's params.json; Meta's is in ``test_configs.py``."""

import copy
from typing import Any

import pytest

from ckptctl.errors import MappingError
from ckptctl.facts.contradictions import find_contradicting_facts, read_config_statements
from ckptctl.facts.params import (
    config_to_params,
    get_preset_facts,
    params_to_config,
    read_params_statements,
)
from ckptctl.families import family, load_families
from ckptctl.planner.config_facts import add_rope_fields, has_tied_embeddings
from ckptctl.planner.families.declarations import matches_conditions

BASE: dict[str, Any] = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "vocab_size": 32000,
}
V01: dict[str, Any] = BASE | {"sliding_window": 4096}
V03: dict[str, Any] = BASE | {"vocab_size": 32768, "rope_theta": 1000000.0}
NEMO: dict[str, Any] = V03 | {
    "dim": 5120,
    "n_layers": 40,
    "vocab_size": 131072,
    "max_seq_len": 128000,
}
MIXTRAL: dict[str, Any] = BASE | {"moe": {"num_experts_per_tok": 2, "num_experts": 8}}
VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "rope_theta": 10000.0,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_token_id": 10,
    "adapter_bias": True,
}
PIXTRAL: dict[str, Any] = NEMO | {"rope_theta": 1e9, "vision_encoder": VISION}
MERGER: dict[str, Any] = {
    "adapter_bias": False,
    "mm_projector_id": "patch_merge",
    "spatial_merge_size": 2,
    "add_pre_mm_projector_layer_norm": True,
}
SMALL_31: dict[str, Any] = PIXTRAL | {"vision_encoder": VISION | MERGER}
YARN: dict[str, Any] = {
    "yarn": {
        "original_max_position_embeddings": 16384,
        "factor": 16.0,
        "apply_scale": False,
        "beta": 32.0,
        "alpha": 1.0,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
}
MINISTRAL: dict[str, Any] = NEMO | YARN
EVERY = [
    ("mistral", V01),
    ("mistral", V03),
    ("mistral", NEMO),
    ("mixtral", MIXTRAL),
    ("pixtral", PIXTRAL),
    ("mistral3", SMALL_31),
    ("ministral3", MINISTRAL),
    ("ministral3_vision", SMALL_31 | YARN),
]


def sizes_of(name):
    return {"ve": 64} if "ve" in family(name).sizes else {}


def there(name, params):
    return params_to_config(family(name), params, sizes_of(name))


@pytest.mark.parametrize(("name", "params"), EVERY)
def test_params_roundtrip_through_config(name, params):
    back = config_to_params(family(name), there(name, params), sizes_of(name))
    silent = {"rope_theta": back["rope_theta"], "max_seq_len": back["max_seq_len"]}
    assert back == {**silent, **params}


@pytest.mark.parametrize(("name", "params"), EVERY)
def test_contradictions_are_found_only_in_changed_params(name, params):
    config = there(name, params)
    for changed, number in ({}, 0), ({"rope_theta": 5.0, "dim": 64}, 2):
        said = read_params_statements(family(name), params | changed, "params.json")
        found = find_contradicting_facts(
            [*read_config_statements(family(name), config, "config.json"), *said]
        )
        assert len(found) == number, found


def test_dense_params_convert_to_config():
    config = there("mistral", NEMO)
    assert config["architectures"] == ["MistralForCausalLM"]
    assert (config["hidden_size"], config["head_dim"], config["num_attention_heads"]) == (
        5120,
        128,
        32,
    )
    assert config["rope_theta"] == 1e6 and config["max_position_embeddings"] == 128000
    assert config["sliding_window"] is None and config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("name", "params", "theta", "window"),
    [
        ("mistral", V01, 1e4, 4096),
        ("mistral", BASE, 1e6, None),
        ("mistral", BASE | {"sliding_window": "4096"}, 1e4, 4096),
        ("mistral", BASE | {"_sliding_window": 4096}, 1e4, 4096),
        ("mistral", V03 | {"sliding_window": None}, 1e6, None),
        ("mixtral", MIXTRAL, 1e6, None),
    ],
)
def test_missing_params_get_defaults(name, params, theta, window):
    config = there(name, params)
    assert (config["rope_theta"], config["sliding_window"]) == (theta, window)
    assert ("rope_theta" in get_preset_facts(family(name), params)) is ("rope_theta" not in params)


def test_null_sliding_window_is_kept():
    config = there("mistral", V03)
    assert "sliding_window" not in config_to_params(family("mistral"), config, {})
    del config["sliding_window"]
    assert config_to_params(family("mistral"), config, {})["sliding_window"] == 4096


def test_moe_params_convert_to_config():
    config = there("mixtral", MIXTRAL | {"moe": {"num_experts_per_tok": 3, "num_experts": 16}})
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (16, 3)


def test_vision_params_convert_to_config():
    config = there("mistral3", SMALL_31)
    assert config["model_type"] == "mistral3"
    assert config["text_config"]["model_type"] == "mistral"
    assert config["vision_config"]["model_type"] == "pixtral"
    assert config["vision_config"]["hidden_act"] == "silu"
    assert config["vision_config"]["hidden_size"] == 1024
    assert (config["image_token_index"], config["spatial_merge_size"]) == (10, 2)
    assert config["multimodal_projector_bias"] is False
    assert there("pixtral", PIXTRAL)["multimodal_projector_bias"] is True


def test_yarn_params_convert_to_rope_parameters():
    config = there("ministral3", MINISTRAL)
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert "rope" not in config and "rope_theta" not in config


def test_ties_are_converted_both_ways():
    assert has_tied_embeddings(family("ministral3"), None, {"tied_embeddings": True})
    assert not has_tied_embeddings(family("ministral3"), {"tie_word_embeddings": False}, {})
    config = there("ministral3", MINISTRAL | {"tied_embeddings": True})
    assert config["tie_word_embeddings"] is True
    assert config_to_params(family("ministral3"), config, {})["tied_embeddings"] is True


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mistral", {"moe": {"num_experts": 8}}, "moe"),
        ("mistral", {"yarn": YARN["yarn"]}, "yarn"),
        ("mistral", {"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization"),
        ("mistral", {"multiple_of": 256}, "multiple_of"),
        ("mistral", {"sliding_window": [4096, 8192]}, "sliding_window"),
        ("mixtral", {"moe": MIXTRAL["moe"] | {"num_shared_experts": 1}}, "moe.num_shared_experts"),
        (
            "ministral3",
            YARN | {"yarn": YARN["yarn"] | {"apply_scale": True}},
            "yarn.apply_scale",
        ),
        ("mistral3", {"vision_encoder": VISION | MERGER | {"mm_projector_id": "x"}}, "projector"),
    ],
)
def test_params_that_config_cannot_express_are_refused(name, change, said):
    with pytest.raises(MappingError) as caught:
        there(name, dict(EVERY)[name] | change)
    assert said in caught.value.what


def test_self_contradictory_params_are_refused():
    scaling = YARN["llama_4_scaling"] | {"original_max_position_embeddings": 8192}
    with pytest.raises(MappingError, match="contradicts itself"):
        there("ministral3", MINISTRAL | {"llama_4_scaling": scaling})


@pytest.mark.parametrize(
    ("name", "place", "change", "said"),
    [
        ("mistral", "", {"hidden_act": "gelu"}, "hidden_act"),
        ("mistral", "", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope.rope_type"),
        ("mistral", "", {"rope_parameters": {"rope_theta": 1e6, "factor": 2}}, "rope.factor"),
        ("ministral3", "rope_parameters", {"mscale": 0.7}, "rope.mscale"),
        ("ministral3", "rope_parameters", {"truncate": True}, "rope.truncate"),
        ("mistral3", "vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act"),
        ("mistral3", "text_config", {"hidden_act": "gelu"}, "text_config.hidden_act"),
        ("mistral3", "", {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("pixtral", "", {"vision_feature_select_strategy": "default"}, "select_strategy"),
    ],
)
def test_config_that_params_cannot_express_is_refused(name, place, change, said):
    config = there(name, dict(EVERY)[name])
    (config[place] if place else config).update(change)
    with pytest.raises(MappingError) as caught:
        config_to_params(family(name), config, sizes_of(name))
    assert said in caught.value.what


def test_missing_fact_without_default_is_refused():
    config = there("ministral3", MINISTRAL)
    del config["rope_parameters"]["factor"]
    with pytest.raises(MappingError, match=r"yarn\.factor"):
        config_to_params(family("ministral3"), config, {})


@pytest.mark.parametrize(("name", "params"), EVERY)
def test_params_determine_family(name, params):
    stated = add_rope_fields(params)
    found = {
        other
        for other, known in load_families().items()
        if "mistral" in known.layouts
        and any(matches_conditions(s, stated) for s in known.params_signs)
    }
    shaped = {"pixtral", "mistral3"} if "vision_encoder" in params else set()
    assert name in found and found <= {*shaped, name}


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "params"), EVERY)
def test_transformers_reads_config_written_from_params(name, params):
    from transformers import AutoConfig

    written = there(name, params)
    said = AutoConfig.for_model(**copy.deepcopy(written)).to_dict()
    ours = config_to_params(family(name), written, sizes_of(name))
    assert config_to_params(family(name), said, sizes_of(name)) == ours


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "params"), EVERY)
def test_mistral_inference_reads_written_params(name, params):
    pytest.importorskip("simple_parsing", reason="mistral-inference is not installed")
    from tests.oracle.shims import xformers

    xformers()
    args = pytest.importorskip("mistral_inference.args", reason="it is not installed")
    written = config_to_params(family(name), there(name, params), sizes_of(name))
    found = args.TransformerArgs.from_dict(copy.deepcopy(written)).to_dict()
    for key in BASE.keys() | {"rope_theta"}:
        assert found[key] == written[key]
    assert (found["moe"] or {}) == written.get("moe", {})
    seen = written.get("vision_encoder", {})
    assert {key: (found["vision_encoder"] or {}).get(key) for key in seen} == seen
